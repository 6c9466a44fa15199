"""Registering a run: its row, its environments and its engines in one transaction, or a sentence why not.

Invariant: an engine that a live run trains belongs to that run alone. Two runs that publish to one engine would take it
from each other for ever, and a run that only samples would find weights that it does not know. Whether an engine is
free is looked up behind a lock that every registration takes, so that of two at once one is refused.
"""

from typing import Final
from urllib.parse import urlsplit

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from ..contracts.engines import EngineConfig
from ..contracts.runfile import RunConfig, RunFileError, why_no_run_id
from ..contracts.states import LIVE_RUNS, EngineState
from .engines import engine_id, insert_engines
from .models import Run
from .runs import NewEnvironment, RunRow, insert_run
from .store import Store

_LOCK: Final = 0x41545245
"""Held by whoever registers a run: `ATRE` in ASCII."""
_OTHERS: Final = text(
    "SELECT run_id, config->'trainer'->>'kind' <> 'none' AS trains, engines.url"
    " FROM runs JOIN engines USING (run_id)"
    " WHERE runs.state = ANY(:live) AND engines.state <> 'removed' AND run_id <> :run ORDER BY created_at, run_id"
)


async def register_run(store: Store, run_id: str, config: RunConfig, environments: list[NewEnvironment]) -> RunRow:
    """Write a run down. The same id with the same document is a no-op that returns what is stored.

    Raises RunExists for another document under this id, RunFileError for an id that is none, for an engine that is not
    free or for text that Postgres cannot hold.
    """
    no_id = why_no_run_id(run_id)
    if no_id is not None and "\0" in run_id:  # not even a question that Postgres can be asked
        raise RunFileError([no_id])
    async with store.begin() as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        if await connection.scalar(select(Run.run_id).where(Run.run_id == run_id)) is None:
            refused = no_id or await _taken(connection, run_id, config, config.engines)
            if refused is not None:
                raise RunFileError([refused])
        row = await insert_run(connection, run_id, config, environments)
        await insert_engines(connection, run_id, config.engines)
        return row


async def add_engine(store: Store, run_id: str, config: RunConfig, engine: EngineConfig) -> str:
    """Give a run another engine, or change or put back one it has; its id. It gets work once it has been asked.

    Raises RunFileError where the run cannot use it, or it is not free.
    """
    if engine.capabilities.tokens != config.tokens:
        raise RunFileError([f"engines: the run's take {'tokens' if config.tokens else 'messages'}, and this one not"])
    async with store.begin() as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        problem = await _taken(connection, run_id, config, (engine,))
        if problem is not None:
            raise RunFileError([problem])
        await insert_engines(connection, run_id, (engine,), EngineState.DOWN, "it was just added")
    return engine_id(engine.url)


async def engine_taken(store: Store, config: RunConfig, run_id: str = "") -> str | None:
    """Why a new run cannot have an engine of its file, as one sentence; None where all are free."""
    async with store.begin() as connection:
        return await _taken(connection, run_id, config, config.engines)


async def _taken(
    connection: AsyncConnection, run_id: str, config: RunConfig, engines: tuple[EngineConfig, ...]
) -> str | None:
    wanted = {_place(engine.url): engine.url for engine in engines}
    for other in await connection.execute(_OTHERS, {"run": run_id, "live": list(LIVE_RUNS)}):
        url = wanted.get(_place(other.url))
        if url is not None and (config.trains or other.trains):
            does = "trains it" if other.trains else "samples with its weights"
            return (
                f"engines: {url} is in use by {other.run_id}, which {does}, and a run that trains needs engines of its "
                f"own; name another engine, or end that run with `atropos run cancel {other.run_id}`"
            )
    return None


async def first_user(store: Store, url: str) -> str | None:
    """The oldest live run that names the engine, however its address is spelt; None where none does."""
    async with store.begin() as connection:
        for other in await connection.execute(_OTHERS, {"run": "", "live": list(LIVE_RUNS)}):
            if _place(other.url) == _place(url):
                return str(other.run_id)
    return None


def _place(url: str) -> tuple[str, int | None, str]:
    """What tells engines apart, however their addresses are spelt."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return "127.0.0.1" if host == "localhost" else host, port, parts.path.rstrip("/").removesuffix("/v1")
