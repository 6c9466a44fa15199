"""The state file: what is running, where it listens, and what to stop if everybody forgot.

Invariant: it is written before a part is announced as started, and removed only after all parts have ended, so
any process it names is either one of ours or gone. Passwords are in it, hence its mode 0600.
"""

from enum import StrEnum
from pathlib import Path

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    SerializationInfo,
    ValidationError,
    field_serializer,
)

from .errors import StackError
from .files import StackHome, why_no_folder, write_atomically
from .process import ProcessId, is_alive


class Phase(StrEnum):
    """Where the supervisor stands."""

    STARTING = "starting"
    RUNNING = "running"
    """Every part was ready at least once."""
    STOPPING = "stopping"
    FAILED = "failed"
    """Starting failed; everything was stopped again and `error` says why."""


class PartStatus(StrEnum):
    """Where one part stands."""

    WAITING = "waiting"
    """For the parts it depends on."""
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    """It died and will be started again after a pause."""
    DONE = "done"
    """A one-shot part that has ended well."""
    STOPPED = "stopped"


class PartState(BaseModel):
    """One part as the supervisor sees it."""

    model_config = ConfigDict(frozen=True)

    name: str
    status: PartStatus
    address: str | None = None
    """`host:port` or URL without a password."""
    process: ProcessId | None = None
    restarts: int = 0
    detail: str | None = None
    """Why it is not ready, or how it last died."""
    stop_signal: int
    grace_s: float


class StackState(BaseModel):
    """The whole stack."""

    model_config = ConfigDict(frozen=True)

    format: int = 1
    supervisor: ProcessId
    phase: Phase
    error: str | None = None
    temporal_address: str | None = None
    temporal_ui: str | None = None
    database_url: SecretStr | None = None
    engine_url: str | None = None
    notes: tuple[str, ...] = ()
    """Sentences the user should read once, such as where Postgres keeps its data."""
    parts: tuple[PartState, ...] = ()

    @field_serializer("database_url", when_used="json")
    def _reveal_on_request(self, value: SecretStr | None, info: SerializationInfo) -> str | None:
        reveal = bool(info.context and info.context.get("reveal"))
        return None if value is None else value.get_secret_value() if reveal else str(value)

    def supervised(self) -> bool:
        """Whether the supervisor that wrote this is still alive."""
        return is_alive(self.supervisor)

    def orphans(self) -> tuple[PartState, ...]:
        """Parts whose process is running."""
        return tuple(part for part in self.parts if is_alive(part.process))


class Kept(BaseModel):
    """What stays the same over `down` and `up`: addresses clients remember, and the database's password."""

    model_config = ConfigDict(frozen=True)

    ports: dict[str, int] = Field(default_factory=dict)
    postgres_password: SecretStr | None = None
    postgres_outside: Path | None = None
    """Where Postgres keeps its data if that could not be below the home."""

    @field_serializer("postgres_password", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


def read_state(home: StackHome) -> StackState | None:
    """The state file, None where there is none. Raises `StackError` where it is damaged."""
    try:
        return StackState.model_validate_json(home.state.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        if no_folder := why_no_folder(home.root):
            raise StackError(no_folder) from error
        reason = error.strerror if isinstance(error, OSError) else "its content is damaged"
        raise StackError(
            f"{home.state} cannot be read ({reason}); end any leftover processes of the stack, remove the file "
            "and run `atropos up` again."
        ) from error


def launched(home: StackHome) -> ProcessId | None:
    """The supervisor that was launched last, if it is alive: it may not have come to its first state yet."""
    try:
        process = ProcessId.model_validate_json(home.launched.read_bytes())
    except (OSError, ValidationError):
        return None
    return process if is_alive(process) else None


def write_state(home: StackHome, state: StackState) -> None:
    """Write the state file atomically."""
    write_atomically(home.state, state.model_dump_json(indent=2, context={"reveal": True}) + "\n")


def read_kept(home: StackHome) -> Kept:
    """What an earlier stack left to be kept; empty where there is nothing usable (all of it can be made anew)."""
    try:
        return Kept.model_validate_json(home.kept.read_bytes())
    except (OSError, ValidationError):
        return Kept()


def write_kept(home: StackHome, kept: Kept) -> None:
    """Write the kept file atomically."""
    write_atomically(home.kept, kept.model_dump_json(indent=2) + "\n")
