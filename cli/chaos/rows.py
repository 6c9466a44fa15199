"""What a chaos run asks the store: which calls are not stored, whether work goes on, what was lost.

Invariant: these only read, and wait for a store that is away instead of failing: it may be us who killed it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any, Final, TypeVar

from ...contracts.ids import EpisodeKey
from ...db.errors import StoreUnreachable
from ...db.store import Direct, Store
from .journal import Place

T = TypeVar("T")
_AGAIN_S: Final = 0.1

_STORED: Final = """
SELECT p.* FROM unnest(%(groups)s::int[], %(members)s::int[], %(attempts)s::int[], %(turns)s::int[])
  AS p(group_no, member, attempt, turn)
WHERE EXISTS (SELECT FROM turns t WHERE t.run_id = %(run)s
    AND (t.group_no, t.member, t.attempt, t.turn) = (p.group_no, p.member, p.attempt, p.turn))
  OR NOT EXISTS (SELECT FROM episodes e WHERE e.run_id = %(run)s AND e.state = 'running'
    AND (e.group_no, e.member, e.attempt) = (p.group_no, p.member, p.attempt))
"""
"""Calls of which nothing is open: they are stored, or their episode has ended without them."""

_RUNNING: Final = """
SELECT e.group_no, e.member, e.attempt FROM episodes e WHERE e.run_id = %(run)s AND e.state = 'running'
ORDER BY e.started_at DESC LIMIT %(n)s
"""

_ANSWERED: Final = """
SELECT e.group_no, e.member, e.attempt FROM episodes e
JOIN LATERAL (
  SELECT max(turn) AS turn FROM turns t
  WHERE (t.run_id, t.group_no, t.member, t.attempt) = (e.run_id, e.group_no, e.member, e.attempt)
) AS last ON last.turn IS NOT NULL
JOIN tool_calls c ON (c.run_id, c.group_no, c.member, c.attempt, c.turn)
  = (e.run_id, e.group_no, e.member, e.attempt, last.turn)
WHERE e.run_id = %(run)s AND e.state = 'running'
ORDER BY c.created_at DESC LIMIT %(n)s
"""
"""Running episodes whose last turn is answered, the newest answer first."""

_ROUND: Final = """
SELECT min(t.created_at) FROM turns t
JOIN tool_calls c ON (c.run_id, c.group_no, c.member, c.attempt, c.turn)
  = (t.run_id, t.group_no, t.member, t.attempt, t.turn - 1)
WHERE t.run_id = %(run)s AND c.created_at > %(since)s
"""
"""When the first turn was stored that followed an answer given after `since`: workflows, workers, engine, Temporal and
Postgres all had to do their part for it."""

_LOST: Final = """
SELECT 'group ' || group_no || ' is ' || state || coalesce(' (' || failure || ')', '') FROM groups
WHERE run_id = %(run)s AND kind = 'train'
  AND NOT (state IN ('sealed', 'trained', 'filtered', 'stale') OR state = 'failed' AND failure = 'cancelled')
ORDER BY group_no
"""
_TWICE: Final = """
SELECT 'group ' || group_no FROM batch_groups g JOIN batches b USING (run_id, batch_no)
WHERE g.run_id = %(run)s AND b.state = 'committed' GROUP BY group_no HAVING count(*) > 1 ORDER BY group_no
"""


class Rows:
    """Questions about one run."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self.run_id = store, run_id

    async def settled(self, places: Iterable[Place], through: Direct | None = None) -> set[Place]:
        """Those of the calls that nothing is open of. `through`: a connection to ask instead of the store's own."""
        asked = list(places)
        columns = list(zip(*asked, strict=True)) or [(), (), (), ()]
        names = ("groups", "members", "attempts", "turns")
        values = {name: list(one) for name, one in zip(names, columns, strict=True)}
        found = await self.all(_STORED, values, through)
        return {(row[0], row[1], row[2], row[3]) for row in found}

    async def running(self, at_most: int) -> list[EpisodeKey]:
        return [self._episode(row) for row in await self.all(_RUNNING, {"n": at_most})]

    async def answered(self, at_most: int) -> list[EpisodeKey]:
        return [self._episode(row) for row in await self.all(_ANSWERED, {"n": at_most})]

    async def committed(self) -> int:
        """Train steps."""
        return int((await self.all("SELECT count(*) FROM train_steps WHERE run_id = %(run)s"))[0][0])

    async def went_round(self, since: datetime) -> datetime | None:
        """When work was seen that began after `since` and took every part but the trainer."""
        found: datetime | None = (await self.all(_ROUND, {"since": since}))[0][0]
        return found

    async def stepped(self, since: datetime) -> datetime | None:
        """When the first step after `since` was committed."""
        query = "SELECT min(committed_at) FROM train_steps WHERE run_id = %(run)s AND committed_at > %(since)s"
        found: datetime | None = (await self.all(query, {"since": since}))[0][0]
        return found

    async def lost(self) -> list[str]:
        """Training groups that are nothing they may be at the end of a run."""
        return [str(row[0]) for row in await self.all(_LOST)]

    async def trained_twice(self) -> list[str]:
        return [str(row[0]) for row in await self.all(_TWICE)]

    async def all(
        self, query: str, values: dict[str, Any] | None = None, through: Direct | None = None
    ) -> list[tuple[Any, ...]]:
        """The rows, once the store is there."""
        given = {"run": self.run_id} | (values or {})
        if through is not None:
            return await (await through.execute(query, given)).fetchall()

        async def ask() -> list[tuple[Any, ...]]:
            async with self._store.direct() as connection:
                return await (await connection.execute(query, given)).fetchall()

        return await outlasting(ask)

    def _episode(self, row: tuple[Any, ...]) -> EpisodeKey:
        return EpisodeKey(run_id=self.run_id, group_no=row[0], member=row[1], attempt=row[2])


async def outlasting(ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` returns, however often the store is away before."""
    while True:
        try:
            return await ask()
        except StoreUnreachable:
            await asyncio.sleep(_AGAIN_S)
