"""How the store is: its schema, its constraints, the ledgers of its runs, what it takes and what it wastes.

Invariant: looking changes nothing. Constraints and indexes are held against what Postgres' own catalogue says of them,
rows against each other by the audit, run by run, each in a snapshot of its own.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from .audit import Audit, audit_run
from .models import Base
from .store import Store

_UNPROVED: Final = """
SELECT 'constraint ' || conname || ' of ' || conrelid::regclass || ' was never checked against the rows there are'
FROM pg_constraint WHERE connamespace = current_schema()::regnamespace AND NOT convalidated
UNION ALL
SELECT 'index ' || indexrelid::regclass || ' is not valid: build it again with REINDEX'
FROM pg_index JOIN pg_class c ON c.oid = indexrelid
WHERE c.relnamespace = current_schema()::regnamespace AND NOT (indisvalid AND indisready)
UNION ALL
SELECT 'table ' || name || ' is missing' FROM unnest(%(tables)s::text[]) AS name
WHERE to_regclass(quote_ident(current_schema()) || '.' || quote_ident(name)) IS NULL
ORDER BY 1
"""
_SIZES: Final = """
SELECT c.relname, pg_total_relation_size(c.oid), pg_indexes_size(c.oid), coalesce(s.n_live_tup, 0),
  coalesce(s.n_dead_tup, 0)
FROM pg_class c LEFT JOIN pg_stat_user_tables s ON s.relid = c.oid
WHERE c.relnamespace = current_schema()::regnamespace AND c.relname = ANY(%(tables)s) AND c.relkind IN ('r', 'p')
ORDER BY 2 DESC, 1
"""
_RUNS: Final = "SELECT run_id FROM runs ORDER BY created_at, run_id"


@dataclass(frozen=True)
class TableSize:
    """What a table takes on disk, in bytes, and Postgres' estimate of its rows."""

    name: str
    bytes: int
    """Everything, its indexes included."""
    indexes: int
    rows: int
    dead: int
    """Row versions that nobody sees any more, until a vacuum makes room of them."""


async def unproved(store: Store) -> list[str]:
    """What of the schema does not hold, as sentences without their end."""
    async with store.direct() as connection:
        found = await connection.execute(_UNPROVED, {"tables": sorted(Base.metadata.tables)})
        return [name for (name,) in await found.fetchall()]


async def table_sizes(store: Store) -> list[TableSize]:
    """The largest first."""
    async with store.direct() as connection:
        found = await connection.execute(_SIZES, {"tables": sorted(Base.metadata.tables)})
        return [TableSize(*row) for row in await found.fetchall()]


async def all_runs(store: Store) -> list[str]:
    """Ids of all runs, the oldest first."""
    async with store.direct() as connection:
        return [run_id for (run_id,) in await (await connection.execute(_RUNS)).fetchall()]


async def audits(store: Store) -> AsyncGenerator[tuple[str, Audit]]:
    """The audit of every run, one after the other."""
    for run_id in await all_runs(store):
        yield run_id, await audit_run(store, run_id)
