"""Runs in a file, and back: every row of every table as Postgres itself writes it, with what proves it whole.

Invariant: a dump is one snapshot, and what is restored equals it row by row, numbers of writing included; sequences
go on behind them. A file is restored whole, in one transaction, or not at all: where its schema is another, a checksum
does not hold or one of its runs is there, nothing is written. Rows pass in pieces, so memory does not grow with a run.

The file is a zip: `manifest.json`, and for each table one stream of `COPY … (FORMAT binary)`, which Postgres 15 to 18
write alike. So runs move between servers of different versions without programs of Postgres at hand.
"""

import hashlib
import json
import zipfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from sqlalchemy import Table

from .errors import Refused, StoreError, Unknown
from .limits import NO_HURRY
from .models import Base
from .store import Direct, Store

FORMAT: Final = 1
_MANIFEST: Final = "manifest.json"
_PIECE: Final = 1 << 20
_REVISION: Final = "SELECT version_num FROM alembic_version"
_SEQUENCES: Final = """
SELECT sequencename, coalesce(last_value, 0) FROM pg_sequences WHERE schemaname = current_schema() ORDER BY sequencename
"""


class BadDump(StoreError):
    """A file that cannot be restored."""


@dataclass(frozen=True)
class Stream:
    """A table of a dump."""

    table: str
    columns: tuple[str, ...]
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a dump says of itself."""

    revision: str
    runs: tuple[str, ...]
    streams: tuple[Stream, ...]
    sequences: dict[str, int]
    made_at: str

    @property
    def rows(self) -> int:
        return sum(stream.rows for stream in self.streams)


def tables() -> tuple[Table, ...]:
    """All tables, each behind those that its rows name."""
    return tuple(Base.metadata.sorted_tables)


async def dump(store: Store, file: IO[bytes], runs: Sequence[str] | None) -> AsyncGenerator[Stream]:
    """Write these runs, or all, to `file`; yields each table when it is written. Raises Unknown for a run that is not.

    Live runs too: what they had when the dump began.
    """
    async with store.direct() as connection, connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.execute(NO_HURRY)
        known = {run_id for (run_id,) in await (await connection.execute("SELECT run_id FROM runs")).fetchall()}
        for run_id in runs or ():
            if run_id not in known:
                raise Unknown(f"There is no run called {run_id}; `atropos run list` shows those there are.")
        chosen = sorted(known if runs is None else set(runs))
        streams: list[Stream] = []
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for table in tables():
                streams.append(await _written(connection, archive, table, chosen))
                yield streams[-1]
            archive.writestr(_MANIFEST, json.dumps(await _manifest(connection, chosen, streams), indent=1))


async def restore(store: Store, file: IO[bytes], manifest: Manifest) -> AsyncGenerator[Stream]:
    """Write what `read_manifest` found in `file`; yields each table when it is written, which counts once all are.

    Raises BadDump for another schema or a damaged file, Refused where one of its runs is there already.
    """
    async with store.direct() as connection, connection.transaction():
        await connection.execute(NO_HURRY)
        await _refuse(connection, manifest)
        with zipfile.ZipFile(file) as archive:
            for stream in manifest.streams:
                await _read_back(connection, archive, stream)
                yield stream
        for name, last in manifest.sequences.items():
            if last:
                await connection.execute(
                    "SELECT setval(to_regclass(%(name)s), greatest(%(last)s::bigint, coalesce((SELECT last_value"
                    " FROM pg_sequences WHERE schemaname = current_schema() AND sequencename = %(name)s), 1)))",
                    {"name": name, "last": last},
                )


def read_manifest(path: Path) -> Manifest:
    """What a dump says of itself. Raises BadDump for a file that is none, or is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = json.loads(archive.read(_MANIFEST))
        if found["format"] != FORMAT:
            raise BadDump(f"{path} was written in format {found['format']}; this build reads {FORMAT}.")
        streams = tuple(Stream(**{**one, "columns": tuple(one["columns"])}) for one in found["streams"])
        wanted = {table.name: {column.name for column in table.columns} for table in tables()}
        if {one.table: set(one.columns) for one in streams} != wanted:
            names = sorted(wanted)
            raise BadDump(f"{path} was written for other tables or columns than these: {', '.join(names)}.")
        return Manifest(
            found["revision"],
            tuple(found["runs"]),
            streams,
            {str(name): int(last) for name, last in found["sequences"].items()},
            found["made_at"],
        )
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, AttributeError, EOFError) as error:
        raise BadDump(f"{path} is no dump of Atropos, or is damaged: {error}.") from None


async def _written(connection: Direct, archive: zipfile.ZipFile, table: Table, runs: list[str]) -> Stream:
    columns = [column.name for column in table.columns]
    keys = ", ".join(f'"{column.name}"' for column in table.primary_key.columns)
    query = f'SELECT {_quoted(columns)} FROM "{table.name}" WHERE run_id = ANY(%s)'
    digest, size = hashlib.sha256(), 0
    async with connection.cursor() as cursor:
        with archive.open(f"{table.name}.copy", "w", force_zip64=True) as target:
            copying = f"COPY ({query} ORDER BY {keys}) TO STDOUT (FORMAT binary)"
            async with cursor.copy(copying.encode(), (runs,)) as copy:
                async for piece in copy:
                    data = bytes(piece)
                    target.write(data)
                    digest.update(data)
                    size += len(data)
        return Stream(table.name, tuple(columns), cursor.rowcount, size, digest.hexdigest())


async def _manifest(connection: Direct, runs: list[str], streams: Sequence[Stream]) -> dict[str, Any]:
    revision = await (await connection.execute(_REVISION)).fetchone()
    sequences = await (await connection.execute(_SEQUENCES)).fetchall()
    return {
        "format": FORMAT,
        "revision": revision[0] if revision else None,
        "runs": runs,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "sequences": dict(sequences),
        "streams": [vars(stream) for stream in streams],
    }


async def _refuse(connection: Direct, manifest: Manifest) -> None:
    row = await (await connection.execute(_REVISION)).fetchone()
    here = row[0] if row else None
    if here != manifest.revision:
        raise BadDump(
            f"The dump has schema {manifest.revision} and this database {here}; restore it with the build that wrote "
            "it into a database of that schema, and bring that up to date with `atropos db upgrade`."
        )
    found = await connection.execute(
        "SELECT run_id FROM runs WHERE run_id = ANY(%s) ORDER BY run_id", (list(manifest.runs),)
    )
    there = [run_id for (run_id,) in await found.fetchall()]
    if there:
        shown = ", ".join(there[:5]) + (f" and {len(there) - 5} more" if len(there) > 5 else "")
        raise Refused(f"{shown} there already; nothing was restored. Restore into another database, or prune it first.")


async def _read_back(connection: Direct, archive: zipfile.ZipFile, stream: Stream) -> None:
    digest = hashlib.sha256()
    try:
        async with connection.cursor() as cursor:
            with archive.open(f"{stream.table}.copy") as source:
                query = f'COPY "{stream.table}" ({_quoted(stream.columns)}) FROM STDIN (FORMAT binary)'
                async with cursor.copy(query.encode()) as copy:
                    while piece := source.read(_PIECE):
                        digest.update(piece)
                        await copy.write(piece)
            rows = cursor.rowcount
    except (zipfile.BadZipFile, EOFError, KeyError, ValueError) as error:
        raise BadDump(f"The dump is damaged: {stream.table} cannot be read ({error}); nothing was restored.") from None
    if (rows, digest.hexdigest()) != (stream.rows, stream.sha256):
        raise BadDump(f"The dump is damaged: {stream.table} is not what was written; nothing was restored.")


def _quoted(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)
