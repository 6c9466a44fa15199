"""A pool of connections to the trajectory store.

Invariant: a process holds at most `pool_size` connections, and a broken one never poisons the next caller: the whole
pool is replaced and whoever noticed gets `StoreUnreachable`, which says that trying again may help. Nobody waits for
ever: not for a connection, a lock, a statement (`limits`) or a server that has vanished from the network. Without
`prepare` nothing of ours lives in a server session between two transactions, so a transaction-pooling PgBouncer may
stand in between.

Two ways in. `direct()` gives a psycopg connection in autocommit for the statements of every turn: one statement, one
round trip, no transaction around it. `begin()` gives an SQLAlchemy connection inside one transaction for the rest.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from sqlalchemy import URL, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.util import greenlet_spawn

from .errors import Refused, StoreBusy, StoreError, StoreUnreachable, gist
from .limits import WORK, TimeLimits

MAX_POOL: Final = 8
"""A dozen processes then stay below Postgres' default of 100 connections."""
CONNECT_TIMEOUT_S: Final = 10
OLDEST_POSTGRES: Final = 15
_DRIVER: Final = "postgresql+psycopg"
_ALIVE: Final = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
"""libpq's: a server that is gone without a word, as after a failover, is noticed within 30 s."""
_IN_THE_WAY: Final = {
    "57014": "a statement took longer than it may",
    "55P03": "a lock was held by another transaction for too long",
    "40P01": "two transactions waited for each other",
    "40001": "another transaction changed the same rows",
}
"""SQLSTATEs of what was undone and may be done again, and what they mean."""
_TOO_LONG_IDLE: Final = "25P03"

Direct = psycopg.AsyncConnection[tuple[Any, ...]]


class Store:
    """An open store: one per process and event loop. Close it."""

    def __init__(self, pool: AsyncEngine) -> None:
        self._pool = pool
        self.engine: AsyncEngine = pool.execution_options(isolation_level="READ COMMITTED")
        """For statements in transactions of one's own."""

    @property
    def address(self) -> str:
        """The URL without its password."""
        return masked(self._pool.url)

    @asynccontextmanager
    async def direct(self) -> AsyncIterator[Direct]:
        """A psycopg connection in autocommit. Raises StoreUnreachable when it cannot be had or breaks."""
        try:
            lent = await self._pool.raw_connection()
            driver = cast(Direct, lent.driver_connection)
            try:
                yield driver
            finally:
                give_back = lent.close if _is_idle(driver) else lent.invalidate
                await asyncio.shield(greenlet_spawn(give_back))
        except (PoolTimeout, DBAPIError, psycopg.Error) as error:
            translated = _translated(self._pool.url, error)
            if isinstance(translated, StoreUnreachable) and not isinstance(translated, StoreBusy):
                await self._pool.dispose()
            if translated is error:  # an error that is its own cause has no end for whoever walks the chain
                raise
            raise translated from error

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """An SQLAlchemy connection in one transaction. Raises StoreUnreachable when it cannot be had or breaks."""
        try:
            async with self.engine.begin() as connection:
                yield connection
        except (PoolTimeout, DBAPIError) as error:
            translated = _translated(self._pool.url, error)
            if translated is error:
                raise
            raise translated from error

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.dispose()


async def open_store(url: str, *, pool_size: int = MAX_POOL, limits: TimeLimits = WORK, prepare: bool = True) -> Store:
    """Connect once to see that it works, and return the store.

    `limits`: how long its connections wait and hold; options in the URL win.
    `prepare`: let the server keep prepared statements (and their planner's setting) in its sessions; faster, but not
    through PgBouncer.
    Raises StoreUnreachable, or StoreError for an unusable URL or a Postgres older than 15.
    """
    if not 1 <= pool_size <= MAX_POOL:
        raise StoreError(f"A pool has 1 to {MAX_POOL} connections, not {pool_size}.")
    parsed = parse_url(url)
    pool = create_async_engine(
        parsed,
        isolation_level="AUTOCOMMIT",
        skip_autocommit_rollback=True,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=limits.wait,
        pool_use_lifo=True,
        connect_args=_connect_args(parsed, limits, prepare),
    )
    store = Store(pool)
    try:
        async with store.begin() as connection:
            number = int((await connection.execute(text("SHOW server_version_num"))).scalar_one())
        if number < OLDEST_POSTGRES * 10_000:
            raise StoreError(
                f"Postgres at {store.address} is {number // 10_000}; {OLDEST_POSTGRES} or newer is needed."
            )
    except BaseException:
        await store.close()
        raise
    return store


def _connect_args(url: URL, limits: TimeLimits, prepare: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "prepare_threshold": 0 if prepare else None,
        "connect_timeout": int(str(url.query.get("connect_timeout", CONNECT_TIMEOUT_S))),
        "application_name": str(url.query.get("application_name", "atropos")),
    }
    arguments |= {name: value for name, value in _ALIVE.items() if name not in url.query}
    if prepare:
        # Of two options the later one counts, so a person's word wins.
        # A plan made while a table is small is kept while it grows; with this cost it is an index scan from the start.
        arguments["options"] = f"-c random_page_cost=1.1 {limits.options} {url.query.get('options', '')}".strip()
    return arguments


def parse_url(url: str) -> URL:
    """`postgres://`, `postgresql://` and `postgresql+psycopg://` as a URL of our driver. Raises StoreError."""
    try:
        parsed = make_url(url.replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.drivername not in ("postgresql", _DRIVER):
        raise StoreError("The address of the store must look like postgresql://user:password@host:port/database.")
    return parsed.set(drivername=_DRIVER)


def masked(url: URL) -> str:
    """The URL for people: no driver, no password, no options."""
    return url.set(drivername="postgresql", query={}).render_as_string(hide_password=True)


def unreachable(url: URL, error: BaseException) -> StoreUnreachable:
    """One sentence about a connection that cannot be had, without the password."""
    detail = gist(error)
    if url.password:
        detail = detail.replace(url.password, "***")
    return StoreUnreachable(
        f"Postgres at {masked(url)} cannot be reached ({detail}); start it, or set DATABASE_URL to one that runs."
    )


def _is_idle(connection: Direct) -> bool:
    """Fit for the next borrower: alive, between two transactions, in no pipeline (a cancel may leave it otherwise)."""
    pgconn = connection.pgconn
    return (
        not connection.closed
        and pgconn.transaction_status == TransactionStatus.IDLE
        and pgconn.pipeline_status == PipelineStatus.OFF
    )


def _translated(url: URL, error: PoolTimeout | DBAPIError | psycopg.Error) -> Exception:
    """What a driver's error means for our callers."""
    if isinstance(error, PoolTimeout):
        return StoreBusy(f"All connections of this process to {masked(url)} are busy with other work; try again.")
    cause = error.orig if isinstance(error, DBAPIError) else error
    state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
    if state in _IN_THE_WAY:
        return StoreBusy(f"Postgres at {masked(url)} gave up on this, since {_IN_THE_WAY[state]}; try again.")
    if state == _TOO_LONG_IDLE:
        return StoreUnreachable(f"Postgres at {masked(url)} ended a transaction that did nothing for long; try again.")
    if isinstance(cause, psycopg.OperationalError) and _lost(cause):
        return unreachable(url, cause)
    if isinstance(cause, psycopg.IntegrityError | psycopg.DataError):
        return Refused(f"The store refuses this: {cause.diag.message_primary or cause}.")
    return error


def _lost(error: psycopg.OperationalError) -> bool:
    """The connection could not be had or is gone: no SQLSTATE, class 08, or a server that is going down."""
    state = error.sqlstate
    return state is None or state.startswith(("08", "57P", "53300"))
