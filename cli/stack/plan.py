"""From options to parts: the addresses are settled first, then every part is built knowing all of them."""

import secrets
from collections.abc import Set
from dataclasses import dataclass

from pydantic import SecretStr

from . import apps
from .files import StackHome
from .options import StackOptions
from .part import Part
from .ports import HOST, choose_port, explicit_port
from .postgres_server import locate_postgres
from .state import Kept
from .temporal_server import NAMESPACE, TemporalServer, installed_temporal


@dataclass(frozen=True)
class Plan:
    """Everything the supervisor needs to start, and what others will ask it for."""

    parts: tuple[Part, ...]
    kept: Kept
    temporal_profile: str | None = None
    """Text of a Temporal profile file that points to our server."""
    temporal_address: str | None = None
    temporal_ui: str | None = None
    database_url: SecretStr | None = None
    engine_url: str | None = None
    notes: tuple[str, ...] = ()


class _Ports:
    def __init__(self, kept: dict[str, int], asked: Set[int]) -> None:
        """`asked`: ports that a person named for one part, and no other part gets."""
        self._kept = kept
        self._asked = asked
        self._taken: set[int] = set()
        self.chosen: dict[str, int] = {}

    def get(self, name: str, asked: int | None = None) -> int:
        port = (
            choose_port(self._kept.get(name), self._taken, self._asked)
            if asked is None
            else explicit_port(asked, name, self._taken)
        )
        self.chosen[name] = port
        return port


def make_plan(home: StackHome, options: StackOptions, kept: Kept) -> Plan:
    """Choose ports, find programs and build the parts.

    Raises `StackError` where a wheel is missing, an explicit port is taken or no folder can be used.
    """
    ports = _Ports(kept.ports, frozenset(options.ports().values()))
    parts: list[Part] = []
    notes: tuple[str, ...] = ()
    profile = temporal_ui = engine_url = database_url = None
    temporal_address = options.temporal_address
    outside, password = kept.postgres_outside, kept.postgres_password

    if options.postgres:
        password = password or SecretStr(secrets.token_hex(16))
        postgres, notes = locate_postgres(
            home,
            port=ports.get("postgres", options.postgres_port),
            password=password,
            password_is_new=kept.postgres_password is None,
            outside=outside,
        )
        outside = None if postgres.folder.is_relative_to(home.root) else postgres.folder
        database_url = postgres.url()
        parts.append(postgres.part())
    if options.temporal:
        temporal = TemporalServer(
            installed_temporal(),
            home,
            port=ports.get("temporal", options.temporal_port),
            ui_port=ports.get("temporal-ui", options.ui_port),
            http_port=ports.get("temporal-http"),
            metrics_port=ports.get("temporal-metrics"),
        )
        temporal_address, temporal_ui = temporal.address, temporal.ui
        profile = f'[profile.default]\naddress = "{temporal.address}"\nnamespace = "{NAMESPACE}"\n'
        parts.append(temporal.part())

    engine_port = None
    if options.engine_model is not None:
        apps.check_model(options.engine_model)
        engine_port = ports.get("engine", options.engine_port)
        engine_url = f"http://{HOST}:{engine_port}"

    env = apps.app_environment(
        home,
        own_temporal=options.temporal,
        temporal=temporal_address,
        database=database_url.get_secret_value() if database_url else None,
        engine=engine_url,
    )
    if options.postgres and options.migrate:
        parts.append(apps.migration(env))
    if options.engine_model is not None and engine_port is not None:
        parts.append(apps.engine(home, options.engine_model, engine_port, env))
    if options.workers:
        before = tuple(part.name for part in parts)
        parts.extend(apps.worker(home, name, env, before) for name in apps.workers())
    if options.dashboard:
        before = tuple(part.name for part in parts if part.name in ("postgres", "migrate"))
        parts.append(apps.dashboard(ports.get("dashboard", options.dashboard_port), temporal_ui, env, before))

    return Plan(
        parts=tuple(parts),
        kept=Kept(ports=kept.ports | ports.chosen, postgres_password=password, postgres_outside=outside),
        temporal_profile=profile,
        temporal_address=temporal_address,
        temporal_ui=temporal_ui,
        database_url=database_url,
        engine_url=engine_url,
        notes=notes,
    )
