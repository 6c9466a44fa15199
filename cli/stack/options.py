"""What a stack should consist of, as one value that fits on a command line (it holds no secrets)."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

Port = Field(default=None, ge=1, le=65_535)


class StackOptions(BaseModel):
    """Which parts to start and where; a port of None is chosen free and kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temporal: bool = True
    """Start a Temporal dev server; otherwise workers use `temporal_address`."""
    postgres: bool = True
    """Start Postgres; otherwise workers use `DATABASE_URL` of the environment."""
    migrate: bool = True
    """Bring the schema of the stack's own Postgres up to date; a database of yours is never touched."""
    engine_model: Path | None = None
    """Folder of the model the dev engine serves; None starts no engine."""
    workers: bool = True
    dashboard: bool = False
    temporal_address: str | None = None
    """A Temporal server that was found running; None leaves the choice to the workers' environment."""

    temporal_port: int | None = Port
    ui_port: int | None = Port
    postgres_port: int | None = Port
    engine_port: int | None = Port
    dashboard_port: int | None = Port

    def ports(self) -> dict[str, int]:
        """The ports that were asked for, by the name of their field."""
        names = ("temporal_port", "ui_port", "postgres_port", "engine_port", "dashboard_port")
        asked = {name: getattr(self, name) for name in names}
        return {name: port for name, port in asked.items() if port is not None}
