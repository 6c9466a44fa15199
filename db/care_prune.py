"""Runs that nobody needs any more leave the store: chosen by name or age, a few groups a transaction.

Invariant: a run goes only where it has ended and nothing there is still holds on to it (`kept`); that is asked again
behind the lock of its row before the first of its rows goes, and from then on the run says what is happening to it. A
prune that breaks off is finished by the next one: the run's own row is the last to go. Rows go in an order in which no
row ever names one that is gone. Exports and audits that have begun read their snapshot to its end.

What goes is the whole run. Tokens alone do not: a ledger without them could not prove what it counts.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from ..contracts.states import LIVE_RUNS
from .errors import Refused
from .limits import NO_HURRY
from .models import Base
from .store import Direct, Store

PRUNING: Final = "prune"
"""Kind of the event that a run has from the moment on in which it begins to go."""
_GROUPS: Final = 50
"""Groups of a transaction."""
_BLOBS: Final = 200
_LIVE: Final = ", ".join(f"'{state}'" for state in LIVE_RUNS)

_OF_GROUPS: Final = (
    "evaluation_samples",
    "scores",
    "tool_calls",
    "turns",
    "segments",
    "partial_turns",
    "late_results",
    "episodes",
    "batch_groups",
    "groups",
)
"""Tables with a group's number, in the order in which their rows can go."""
_OF_RUN: Final = (
    "train_steps",
    "publications",
    "policy_versions",
    "batches",
    "evaluations",
    "tasks",
    "environments",
    "engines",
    "late_results",
    "events",
    "runs",
)
"""What is left then, in the same order; `blobs` go before it, a few at a time."""

_CHOSEN: Final = f"""
SELECT run_id FROM (
  SELECT r.*, row_number() OVER (ORDER BY created_at DESC, run_id) AS place FROM runs r WHERE state NOT IN ({_LIVE})
) AS ended
WHERE (%(runs)s::text[] IS NULL OR run_id = ANY(%(runs)s)) AND place > %(keep)s
  AND (%(older)s::interval IS NULL OR ended_at < now() - %(older)s::interval)
ORDER BY created_at, run_id
"""
_BEGUN: Final = "SELECT DISTINCT run_id FROM events WHERE kind = 'prune' ORDER BY run_id"
_KEPT: Final = f"""
WITH run AS (SELECT * FROM runs WHERE run_id = %(run)s)
SELECT 'it is ' || state FROM run WHERE state IN ({_LIVE})
UNION ALL SELECT 'its batch ' || batch_no || ' is leased' FROM batches WHERE run_id = %(run)s AND state = 'leased'
UNION ALL SELECT 'its evaluation ' || name || ' is running' FROM evaluations
  WHERE run_id = %(run)s AND state = 'running'
UNION ALL SELECT 'its group ' || min(group_no) || ' is open' FROM groups
  WHERE run_id = %(run)s AND state IN ('admitted', 'running', 'waiting') HAVING count(*) > 0
UNION ALL SELECT o.run_id || ' begins with its version ' || v.version
  FROM policy_versions v JOIN runs o ON o.run_id <> v.run_id
    AND v.path IN (o.config->'model'->>'init_from', o.config->'model'->>'path')
  WHERE v.run_id = %(run)s AND v.version > 0 AND NOT o.run_id = ANY(%(going)s)
"""


@dataclass(frozen=True)
class Share:
    """Rows of a table that belong to a run, and what they take without indexes."""

    table: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class Candidate:
    """A run that was chosen. `kept`: why it stays nevertheless, as sentences without their end."""

    run_id: str
    shares: tuple[Share, ...]
    kept: tuple[str, ...]
    begun: bool
    """An earlier prune began with it: it has to go."""
    folders: tuple[str, ...]
    """Its checkpoints. They stay where they are: files are not ours to remove."""

    @property
    def rows(self) -> int:
        return sum(share.rows for share in self.shares)

    @property
    def bytes(self) -> int:
        return sum(share.bytes for share in self.shares)


async def candidates(
    store: Store, *, runs: Sequence[str] | None = None, older: timedelta | None = None, keep_last: int = 0
) -> list[Candidate]:
    """Ended runs that fit all that is asked, the oldest first, and those that a prune had begun with.

    `keep_last`: so many of the newest ended runs are not chosen, whatever else is asked.
    """
    async with store.direct() as connection, connection.transaction():
        await connection.execute(NO_HURRY)
        values = {"runs": None if runs is None else list(runs), "older": older, "keep": keep_last}
        begun = [run_id for (run_id,) in await (await connection.execute(_BEGUN)).fetchall()]
        found = [run_id for (run_id,) in await (await connection.execute(_CHOSEN.encode(), values)).fetchall()]
        chosen = [*begun, *(run_id for run_id in found if run_id not in begun)]
        kept = {run_id: await _kept(connection, run_id, chosen) for run_id in chosen if run_id not in begun}
        # Who stays may hold on to others, which then stay as well.
        while True:
            going = [run_id for run_id in chosen if not kept.get(run_id)]
            again = {run_id: await _kept(connection, run_id, going) for run_id in going if run_id not in begun}
            kept |= again
            if not any(again.values()):
                break
        return [
            Candidate(
                run_id,
                tuple([await _share(connection, run_id, table) for table in sorted(Base.metadata.tables)]),
                tuple(kept.get(run_id, ())),
                run_id in begun,
                await _folders(connection, run_id),
            )
            for run_id in chosen
        ]


async def prune(store: Store, run_id: str, going: Sequence[str] = ()) -> AsyncGenerator[int]:
    """Remove a run; yields how many rows each transaction removed. `going`: runs that go in the same breath.

    Raises Refused where something needs it by now; then nothing of it has gone.
    """
    async with store.direct() as connection:
        await _begin(connection, run_id, [*going, run_id])
        while True:
            gone = await _some_groups(connection, run_id)
            if not gone:
                break
            yield gone
        while True:
            gone = await _some_blobs(connection, run_id)
            if not gone:
                break
            yield gone
        async with connection.transaction():
            await connection.execute(NO_HURRY)
            gone = 0
            for table in _OF_RUN:
                query = f"DELETE FROM {table} WHERE run_id = %s"
                gone += (await connection.execute(query.encode(), (run_id,))).rowcount
        yield gone


async def _kept(connection: Direct, run_id: str, going: Sequence[str]) -> list[str]:
    found = await connection.execute(_KEPT.encode(), {"run": run_id, "going": list(going)})
    return [reason for (reason,) in await found.fetchall()]


async def _folders(connection: Direct, run_id: str) -> tuple[str, ...]:
    found = await connection.execute(
        "SELECT path FROM policy_versions WHERE run_id = %s AND digest IS NOT NULL ORDER BY version", (run_id,)
    )
    return tuple(path for (path,) in await found.fetchall())


async def _share(connection: Direct, run_id: str, table: str) -> Share:
    sizes = " + ".join(f"coalesce(pg_column_size({column.name}), 0)" for column in Base.metadata.tables[table].columns)
    query = f"SELECT count(*), coalesce(sum(24 + {sizes}), 0)::bigint FROM {table} WHERE run_id = %s"
    row = await (await connection.execute(query.encode(), (run_id,))).fetchone()
    rows, size = row or (0, 0)
    return Share(table, rows, size)


async def _begin(connection: Direct, run_id: str, going: Sequence[str]) -> None:
    """Write down that the run goes, unless it was, or something needs it."""
    async with connection.transaction():
        await connection.execute("SELECT FROM runs WHERE run_id = %s FOR UPDATE", (run_id,))
        begun = await connection.execute("SELECT FROM events WHERE run_id = %s AND kind = %s", (run_id, PRUNING))
        if begun.rowcount:
            return
        kept = await _kept(connection, run_id, going)
        if kept:
            raise Refused(f"{run_id} stays: {'; '.join(kept)}.")
        text = "it is being pruned: what is left of it is no whole run"
        await connection.execute("UPDATE runs SET reason = %s, changed_at = now() WHERE run_id = %s", (text, run_id))
        await connection.execute(
            "INSERT INTO events (run_id, kind, text, data) SELECT run_id, %s, %s, '{}' FROM runs WHERE run_id = %s",
            (PRUNING, text, run_id),
        )


async def _some_groups(connection: Direct, run_id: str) -> int:
    """The newest groups go, so that those that are left have no gap."""
    async with connection.transaction():
        found = await connection.execute(
            "SELECT min(group_no) FROM (SELECT group_no FROM groups WHERE run_id = %s ORDER BY group_no DESC LIMIT %s)"
            " AS last",
            (run_id, _GROUPS),
        )
        [first] = await found.fetchone() or [None]
        if first is None:
            return 0
        gone = 0
        for table in _OF_GROUPS:
            query = f"DELETE FROM {table} WHERE run_id = %s AND group_no >= %s"
            gone += (await connection.execute(query.encode(), (run_id, first))).rowcount
        return gone


async def _some_blobs(connection: Direct, run_id: str) -> int:
    deleted = await connection.execute(
        "DELETE FROM blobs WHERE run_id = %(run)s AND digest IN (SELECT digest FROM blobs WHERE run_id = %(run)s"
        " ORDER BY digest LIMIT %(most)s)",
        {"run": run_id, "most": _BLOBS},
    )
    return deleted.rowcount
