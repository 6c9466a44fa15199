"""Supervised examples and preference pairs, streamed out of the store.

Invariant: an export is read in one snapshot that is read only and locks nothing a run needs. Its rows are chosen once,
as keys that a cursor keeps on the server, and their texts follow page by page in statements of a moment each: an export
of any size takes the memory of a row here, outlives a statement timeout, and can go on from any row. Read again with
the same `as_of` it chooses the same rows, however much was played since. Texts are as they were sampled, also where
the display copy in the tables is not.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg

from .errors import StoreError
from .exports_exact import conversation
from .exports_sql import SAID, Source, Wanted, chosen, key_columns
from .store import Direct, Store

__all__ = ["Chosen", "ExportRow", "Source", "Wanted", "opened_export"]

PAGE: Final = 500
"""Rows of which the texts are asked for at once; they arrive one by one."""

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ExportRow:
    """A row as JSON texts."""

    key: Key
    test: bool
    """It belongs to the rows for testing."""
    lineage: bytes
    """An object that says where it came from."""
    rewards: tuple[bytes, ...]
    """One number; of a pair, that of the better one and that of the other."""
    prompt: bytes
    """An array of messages."""
    completions: tuple[bytes, ...]
    """Arrays of the messages that followed; of a pair, of both."""
    rebuilt: bool
    """The display copy was not exact, so these are from the exact bytes; only then there may be lone surrogates."""
    lossy: bool
    """JSON cannot say exactly what was sampled."""


@dataclass(frozen=True)
class Chosen:
    """The rows of an export, chosen and not read yet."""

    connection: Direct
    wanted: Wanted
    as_of: datetime
    """Groups that were closed by then are in it."""
    total: int

    async def rows(self, start: int = 0, page: int = PAGE) -> AsyncGenerator[ExportRow]:
        """From the row of that number on, in order. To be read to its end or closed before the next is asked for."""
        await self.connection.execute(f"MOVE ABSOLUTE {int(start)} IN export".encode(), prepare=False)
        while keys := await self._fetch(page):
            async for row in _texts(self.connection, self.wanted, keys):
                yield row

    async def key_at(self, place: int) -> Key | None:
        """The key of a row by its number, from 0."""
        await self.connection.execute(f"MOVE ABSOLUTE {int(place)} IN export".encode(), prepare=False)
        found = await self._fetch(1)
        return found[0][:-1] if found else None

    async def _fetch(self, count: int) -> list[tuple[Any, ...]]:
        found = await self.connection.execute(f"FETCH FORWARD {int(count)} FROM export".encode(), prepare=False)
        return await found.fetchall()


@asynccontextmanager
async def opened_export(store: Store, wanted: Wanted, as_of: datetime | None = None) -> AsyncIterator[Chosen]:
    """Choose the rows, as of now or of an earlier export's moment.

    Raises StoreError where Postgres ends a statement.
    """
    async with store.direct() as connection:
        try:
            async with connection.transaction():
                await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                yield await _choose(connection, wanted, as_of)
        except (psycopg.errors.QueryCanceled, psycopg.errors.SerializationFailure) as error:
            raise StoreError(
                f"Postgres ended a statement of the export ({error.diag.message_primary}); choose fewer rows, raise "
                "statement_timeout for this user, or try again."
            ) from error


async def _choose(connection: Direct, wanted: Wanted, as_of: datetime | None) -> Chosen:
    if as_of is None:
        [as_of] = await _one(connection, "SELECT now()")
    # Choosing reads all groups once and may take its time; it disturbs nobody.
    await connection.execute("SET LOCAL statement_timeout = 0")
    await connection.execute("SET LOCAL jit = off")
    query = f"DECLARE export SCROLL CURSOR FOR {chosen(wanted)}"
    await psycopg.AsyncClientCursor(connection).execute(query.encode(), wanted.values(as_of))
    total = (await connection.execute("MOVE FORWARD ALL IN export", prepare=False)).rowcount
    await connection.execute("SET LOCAL statement_timeout TO DEFAULT")
    return Chosen(connection, wanted, as_of, total)


async def _one(connection: Direct, query: str) -> tuple[Any, ...]:
    row = await (await connection.execute(query.encode())).fetchone()
    assert row is not None
    return row


async def _texts(connection: Direct, wanted: Wanted, keys: Sequence[tuple[Any, ...]]) -> AsyncGenerator[ExportRow]:
    values: dict[str, Any] = {
        name: [key[place] for key in keys] for place, name in enumerate(key_columns(wanted.source))
    } | {
        "rows": len(keys),
        "scores": wanted.scores,
    }
    async with connection.cursor() as cursor:
        place = 0
        async for found in cursor.stream(SAID[wanted.source].encode(), values, binary=True):
            yield _row(keys[place], found)
            place += 1
    if place != len(keys):
        raise StoreError(f"{len(keys) - place} rows of the export are gone from the store; start it anew.")


def _row(key: tuple[Any, ...], found: tuple[Any, ...]) -> ExportRow:
    lineage, reward, other, prompt, said, rejected, exact, rejected_exact = found
    held = rejected_held = True
    if exact is not None:
        prompt, said, held = conversation(exact)
    if rejected_exact is not None:
        _, rejected, rejected_held = conversation(rejected_exact)
    return ExportRow(
        key=key[:-1],
        test=key[-1],
        lineage=lineage,
        rewards=(reward,) if other is None else (reward, other),
        prompt=prompt,
        completions=(said,) if rejected is None else (said, rejected),
        rebuilt=exact is not None or rejected_exact is not None,
        lossy=not (held and rejected_held),
    )
