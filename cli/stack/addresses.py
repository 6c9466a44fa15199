"""Where Temporal, Postgres and the engine are, and why we think so.

The order is always the same: explicit settings, then the state file of a running stack, then (Temporal only) a
server that answers on 127.0.0.1:7233, then "embedded": nothing is there, and whoever asks may start a part.
"""

import socket
from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict, SecretStr

from ...settings import Settings, mask_url, temporal_profile
from .files import StackHome
from .ports import HOST
from .state import read_state

USUAL_TEMPORAL: Final = (HOST, 7233)


class Origin(StrEnum):
    """Which rule of the look-up order gave an address."""

    SETTINGS = "settings"
    STACK = "stack"
    FOUND = "found"
    EMBEDDED = "embedded"
    """No address: a part of our own has to be started."""


class Address(BaseModel):
    """An address, and where it came from in words for people."""

    model_config = ConfigDict(frozen=True)

    value: str | None
    origin: Origin
    source: str

    def shown(self) -> str:
        """The address for people."""
        return self.value or "embedded"


class DatabaseAddress(BaseModel):
    """A connection URL, which may hold a password."""

    model_config = ConfigDict(frozen=True)

    value: SecretStr | None
    origin: Origin
    source: str

    def shown(self) -> str:
        """The URL for people, its password hidden."""
        return "embedded" if self.value is None else mask_url(self.value.get_secret_value())


class Addresses(BaseModel):
    """Where each thing that we talk to is."""

    model_config = ConfigDict(frozen=True)

    temporal: Address
    database: DatabaseAddress
    engine: Address


def resolve_addresses(settings: Settings) -> Addresses:
    """Look everything up. Raises `StackError` for a damaged state file, `SettingsError` for a bad profile."""
    home = StackHome(settings.home)
    state = read_state(home)
    running = state if state is not None and state.supervised() else None
    stack_source = f"running stack in {home.root}"

    profile = temporal_profile()
    if profile.address is not None:
        temporal = Address(value=profile.address, origin=Origin.SETTINGS, source=profile.source)
    elif running is not None and running.temporal_address is not None:
        temporal = Address(value=running.temporal_address, origin=Origin.STACK, source=stack_source)
    elif speaks_http2(*USUAL_TEMPORAL):
        value = f"{USUAL_TEMPORAL[0]}:{USUAL_TEMPORAL[1]}"
        temporal = Address(value=value, origin=Origin.FOUND, source=f"answers on {value}")
    else:
        temporal = Address(value=None, origin=Origin.EMBEDDED, source="nothing found")

    if settings.database_url is not None:
        database = DatabaseAddress(value=settings.database_url, origin=Origin.SETTINGS, source="DATABASE_URL")
    elif running is not None and running.database_url is not None:
        database = DatabaseAddress(value=running.database_url, origin=Origin.STACK, source=stack_source)
    else:
        database = DatabaseAddress(value=None, origin=Origin.EMBEDDED, source="nothing found")

    if settings.engine_url is not None:
        engine = Address(value=settings.engine_url, origin=Origin.SETTINGS, source="ATROPOS_ENGINE_URL")
    elif running is not None and running.engine_url is not None:
        engine = Address(value=running.engine_url, origin=Origin.STACK, source=stack_source)
    else:
        engine = Address(value=None, origin=Origin.EMBEDDED, source="nothing found")
    return Addresses(temporal=temporal, database=database, engine=engine)


def speaks_http2(host: str, port: int, timeout_s: float = 0.5) -> bool:
    """Whether something there answers as a plain-text gRPC server would (any other server is not Temporal)."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # an empty SETTINGS frame
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(preface)
            header = connection.recv(9)
    except OSError:
        return False
    return len(header) >= 4 and header[3] == 4
