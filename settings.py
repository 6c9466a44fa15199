"""What this process was told by its surroundings, read once and in one place.

Invariant: no other module reads our settings (`ATROPOS_*`, `DATABASE_URL`) from the process environment, so that
`Settings` is the whole truth about how a process was configured, and a test can build any configuration as a value.
Temporal's own settings (`TEMPORAL_ADDRESS`, `TEMPORAL_PROFILE`, profile files) are read by Temporal's own
`envconfig`; `temporal_profile` asks it lazily, because importing the SDK costs a third of a second.

Secrets are `SecretStr`: they never appear in a log, a repr or an error sentence. Show URLs through `mask_url`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

if TYPE_CHECKING:
    from temporalio.envconfig import ClientConnectConfig

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

_POSTGRES_SCHEMES: Final = frozenset({"postgresql", "postgres", "postgresql+psycopg"})
_ADDRESS: Final = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.%a-z]+\]):(?P<port>[0-9]{1,5})")
_LARGEST_PORT: Final = 65_535
SHORTEST_TOKEN: Final = 8
"""Characters of a dashboard's token."""
_SECRET_QUERY_KEYS: Final = frozenset({"password", "sslpassword"})


class SettingsError(Exception):
    """A setting is unusable; the message is one sentence that names it and says what to do."""


class Settings(BaseSettings):
    """Our settings. Each field is read from `ATROPOS_<NAME>`; `database_url` from `DATABASE_URL` first."""

    model_config = SettingsConfigDict(
        env_prefix="ATROPOS_", env_ignore_empty=True, frozen=True, populate_by_name=True, extra="ignore"
    )

    home: Path = Path(".atropos")
    """Folder of everything the dev stack keeps: data, logs, state file. Relative to the working directory.

    Workers note in it which inline code runs, so that their successors know what killed them.
    """
    database_url: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("DATABASE_URL", "ATROPOS_DATABASE_URL")
    )
    """Postgres to use instead of the dev stack's, `postgresql://user:password@host:port/database`.

    Other spellings of the scheme (`postgres`, `postgresql+psycopg`) are turned into this one.
    """
    engine_url: str | None = None
    """Base URL of an inference server to use instead of the dev engine, `http://host:port`."""
    log_level: LogLevel = "INFO"
    dashboard_token: SecretStr | None = Field(default=None, min_length=SHORTEST_TOKEN)
    """What people enter to see the dashboard; needed where it listens on more than loopback."""

    max_model_calls: int = Field(default=128, ge=1)
    """Model calls one worker process has in flight at once."""
    max_tool_calls: int = Field(default=16, ge=1)
    """Scheduled tool calls, environment steps and scores one worker process runs at once."""
    max_control_calls: int = Field(default=32, ge=1)
    """Database-only activities one worker process runs at once."""
    trainer_threads: int = Field(default=1, ge=1)
    """Threads of a train step on a CPU. A small model is slower with more."""
    trainer_device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where a train step computes; `auto`: a CUDA device where there is one, else the CPU."""
    tool_processes: int = Field(default=2, ge=1)
    """Processes of the killable pool that runs synchronous tools and scorers."""
    max_cached_workflows: int = Field(default=500, ge=1)
    """Workflows a worker keeps in memory between tasks (66 KB to 10 MB each)."""
    database_pool: int = Field(default=8, ge=1, le=8)
    """Connections to Postgres a process may hold; no overflow beyond them."""
    shutdown_grace_s: float = Field(default=15.0, ge=0)
    """Seconds a stopping worker gives its running activities before it cancels them."""
    ready_file: Path | None = None
    """A file the worker creates once it polls; whoever started it waits for that."""

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value

    @field_validator("database_url")
    @classmethod
    def _plain_postgres(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        scheme, separator, rest = value.get_secret_value().partition("://")
        if not separator or scheme not in _POSTGRES_SCHEMES:
            raise ValueError("must look like postgresql://user:password@host:port/database")
        return SecretStr(f"postgresql://{rest}")

    @field_validator("dashboard_token", mode="before")
    @classmethod
    def _hard_to_guess(cls, value: object) -> object:
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if isinstance(text, str) and len(text) < SHORTEST_TOKEN:  # pydantic would count "items"
            raise ValueError(f"it needs at least {SHORTEST_TOKEN} characters")
        return value

    @field_validator("engine_url")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).scheme not in {"http", "https"}:
            raise ValueError("must look like http://host:port")
        return value


def load_settings(**overrides: object) -> Settings:
    """Read the settings now; `overrides` are field names that win over the environment.

    Raises `SettingsError` naming the first unusable setting.
    """
    arguments: dict[str, Any] = dict(overrides)
    try:
        return Settings(**arguments)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        variable = name if name.isupper() else f"ATROPOS_{name.upper()}"
        reason = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{variable} is not usable: {reason}.") from None


def mask_url(url: str) -> str:
    """The URL with any password in it replaced by `***`; text that is no URL comes back as `***`."""
    try:
        parts = urlsplit(url)
        password, host, port = parts.password, parts.hostname or "", parts.port
    except ValueError:
        return "***"
    netloc = parts.netloc
    if password is not None:
        shown = f"[{host}]" if ":" in host else host
        netloc = f"{parts.username or ''}:***@{shown}" + (f":{port}" if port is not None else "")
    query = parts.query
    if any(key in _SECRET_QUERY_KEYS for key, _ in parse_qsl(query)):
        kept = parse_qsl(query, keep_blank_values=True)
        query = urlencode([(k, "***" if k in _SECRET_QUERY_KEYS else v) for k, v in kept], safe="*/")
    return urlunsplit(SplitResult(parts.scheme, netloc, parts.path, query, parts.fragment))


class TemporalProfile(BaseModel):
    """What Temporal's own environment variables and profile file say about the address."""

    model_config = ConfigDict(frozen=True)

    address: str | None
    """`host:port`, or None where nothing was configured."""
    namespace: str
    source: str
    """Where the address came from, for people: `TEMPORAL_ADDRESS` or `profile file`."""


def temporal_profile() -> TemporalProfile:
    """Ask Temporal's `envconfig` for the active profile. Raises `SettingsError` where it cannot be read."""
    from temporalio.envconfig import ClientConfigProfile

    try:
        profile = ClientConfigProfile.load()
        from_environment = ClientConfigProfile.load(disable_file=True).address
    except (RuntimeError, ValueError, OSError) as error:
        raise SettingsError(
            f"Temporal's client configuration cannot be read ({error}); check TEMPORAL_PROFILE, "
            "TEMPORAL_CONFIG_FILE and the profile file."
        ) from None
    source = "TEMPORAL_ADDRESS" if from_environment else "profile file"
    if profile.address:
        _refuse_no_address(profile.address, source)
    return TemporalProfile(address=profile.address or None, namespace=profile.namespace or "default", source=source)


def _refuse_no_address(address: str, source: str) -> None:
    """Raise SettingsError unless it is `host:port`: the SDK would say so in the words of its own parser."""
    found = _ADDRESS.fullmatch(address)
    if found is not None and 1 <= int(found["port"]) <= _LARGEST_PORT:
        return
    what = "TEMPORAL_ADDRESS" if source == "TEMPORAL_ADDRESS" else "The address in Temporal's profile file"
    shown = "" if "@" in address else f", not {address[:60]!r}"  # before an @ there may be a password
    raise SettingsError(f"{what} is not usable: it must look like host:port, such as 127.0.0.1:7233{shown}.")


def temporal_connect_config(address: str | None = None) -> "ClientConnectConfig":
    """Arguments for `temporalio.client.Client.connect`.

    With an explicitly configured address: all of that profile, TLS and API key included. Otherwise `address` in
    plain text with the profile's namespace; credentials meant for another server are not sent to it.
    Raises `SettingsError` where neither gives an address.
    """
    from temporalio.envconfig import ClientConfigProfile

    profile = temporal_profile()
    if profile.address is not None:
        return ClientConfigProfile.load().to_client_connect_config()
    if address is None:
        raise SettingsError("No Temporal address is known: set TEMPORAL_ADDRESS or run `atropos up`.")
    return {"target_host": address, "namespace": profile.namespace}


def child_environment(changes: Mapping[str, str | None], *, inherit: bool) -> dict[str, str]:
    """The environment for a process we start: `changes` over ours, or over a bare minimum.

    A None removes a variable. Servers that need no secrets of ours (`inherit=False`) get only what finds
    programs, libraries and temporary folders.
    """
    minimum = ("PATH", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
    base = dict(os.environ) if inherit else {k: os.environ[k] for k in minimum if k in os.environ}
    for name, value in changes.items():
        if value is None:
            base.pop(name, None)
        else:
            base[name] = value
    return base


def secret_from_environment(name: str) -> str | None:
    """The value of the variable that a run file names instead of a secret (`api_key_env`); None where it is unset."""
    return os.environ.get(name) or None


def temporal_variables() -> tuple[str, ...]:
    """Names of the `TEMPORAL_*` variables that are set, so that a child can be started without them."""
    return tuple(name for name in os.environ if name.startswith("TEMPORAL_"))
