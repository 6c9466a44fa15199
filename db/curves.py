"""A run over time and over its train steps, as sums that can be added up.

Invariant: sums are over ended episodes and are read again only where they may still change: groups below the lowest
open one are final, and so are the groups that a batch reported. Whoever keeps what was read asks from there on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from .batches import StepRow, train_steps
from .store import Store

MOST_PLACES: Final = 128
"""Buckets of a run's groups at most; a few pixels each on a chart."""

RATE_PLACES: Final = 30
"""Points of a rate over time: fewer than buckets, which end in clumps."""

_SUMS: Final = """
  g.kind, e.failure, min(e.started_at), max(e.ended_at), count(*), count(e.reward), coalesce(sum(e.reward), 0),
  coalesce(sum(e.reward * e.reward), 0), sum(e.turns), sum(e.sampled_tokens), max(e.sampled_tokens)
FROM groups g JOIN episodes e ON e.run_id = g.run_id AND e.group_no = g.group_no
"""

_BY_GROUPS: Final = f"""
SELECT g.group_no / %(width)s, {_SUMS}
WHERE g.run_id = %(run)s AND g.group_no >= %(first)s AND e.ended_at IS NOT NULL GROUP BY 1, 2, 3
"""

_BY_STEP: Final = f"""
SELECT b.step, {_SUMS}
JOIN batches b ON b.run_id = g.run_id AND b.batch_no = g.reported_in AND b.state <> 'abandoned'
WHERE g.run_id = %(run)s AND b.step >= %(first)s AND e.ended_at IS NOT NULL GROUP BY 1, 2, 3
"""

_EXTENT: Final = """
SELECT next_group_no, coalesce(
  (SELECT min(group_no) FROM groups g WHERE g.run_id = r.run_id AND state IN ('admitted', 'running', 'waiting')),
  next_group_no)
FROM runs r WHERE run_id = %(run)s
"""


@dataclass(frozen=True)
class Sums:
    """Ended episodes of one place: of a bucket of groups, or of the groups that a step's batch reported."""

    place: int
    kind: str
    """`train` or `eval`."""
    began: datetime
    ended: datetime
    episodes: int
    scored: int
    reward: float
    squares: float
    turns: int
    tokens: int
    longest: int
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        return self.reward / self.scored if self.scored else None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the rewards."""
        if self.mean is None:
            return None
        return float(max(0.0, self.squares / self.scored - self.mean**2) ** 0.5)

    @property
    def length(self) -> float:
        """Mean tokens of an episode."""
        return self.tokens / self.episodes


def width_for(groups: int) -> int:
    """Groups in a bucket: a power of two, so that it changes seldom while a run grows."""
    width = 1
    while groups > width * MOST_PLACES:
        width *= 2
    return width


@dataclass
class RunCurves:
    """What was read of a run so far. `update` reads what may have changed since."""

    run_id: str
    trains: bool
    width: int = 1
    final: int = 0
    """Groups below this number were all closed when they were read."""
    places: dict[tuple[int, str], Sums] = field(default_factory=dict)
    steps: dict[int, Sums] = field(default_factory=dict)
    trained: list[StepRow] = field(default_factory=list)

    async def update(self, store: Store) -> None:
        """Read on."""
        async with store.direct() as connection:
            extent = await (await connection.execute(_EXTENT, {"run": self.run_id})).fetchone()
        groups, lowest_open = extent or (0, 0)
        if width_for(groups) != self.width:
            self.width, self.final = width_for(groups), 0
            self.places.clear()
        first = self.final // self.width * self.width
        if first < groups:
            values = {"run": self.run_id, "first": first, "width": self.width}
            found = await _read(store, _BY_GROUPS, values)
            self.places |= {(one.place, one.kind): one for one in found}
        self.final = lowest_open
        if self.trains:
            since = self.trained[-1].version if self.trained else 0
            fresh = await train_steps(store, self.run_id, since)
            if fresh:
                self.trained += fresh
                found = await _read(store, _BY_STEP, {"run": self.run_id, "first": since})
                self.steps |= {one.place: one for one in found if one.kind == "train"}

    def over_time(self, kind: str = "train") -> list[Sums]:
        """Buckets of groups in their order."""
        return sorted((one for one in self.places.values() if one.kind == kind), key=lambda one: one.place)

    def over_steps(self) -> list[Sums]:
        return [self.steps[step] for step in sorted(self.steps)]

    def failures(self) -> dict[str, int]:
        """Failed attempts by kind, evaluations included."""
        counts: dict[str, int] = {}
        for one in self.places.values():
            for kind, count in one.failures.items():
                counts[kind] = counts.get(kind, 0) + count
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


def rates(buckets: Sequence[Sums], places: int = RATE_PLACES) -> list[tuple[datetime, float]]:
    """Tokens a second over equal pieces of the time that the buckets span: where each ends, and its rate."""
    if not buckets:
        return []
    began, ended = min(one.began for one in buckets), max(one.ended for one in buckets)
    piece = (ended - began) / places
    if not piece:
        return []
    tokens = [0] * places
    for one in buckets:
        tokens[min(places - 1, int((one.ended - began) / piece))] += one.tokens
    return [(began + (place + 1) * piece, count / piece.total_seconds()) for place, count in enumerate(tokens)]


async def _read(store: Store, query: str, values: dict[str, Any]) -> list[Sums]:
    async with store.direct() as connection:
        rows = await (await connection.execute(query.encode(), values)).fetchall()
    return merged(rows)


def merged(rows: Iterable[tuple[Any, ...]]) -> list[Sums]:
    """Rows by place, kind and failure as sums by place and kind."""
    out: dict[tuple[int, str], Sums] = {}
    for place, kind, failure, began, ended, count, scored, reward, squares, turns, tokens, longest in rows:
        failures = {} if failure is None else {failure: count}
        one = Sums(
            place, kind, began, ended, count, scored, reward, squares, int(turns), int(tokens), longest, failures
        )
        before = out.get((place, kind))
        out[place, kind] = one if before is None else _added(before, one)
    return list(out.values())


def _added(one: Sums, other: Sums) -> Sums:
    return Sums(
        one.place,
        one.kind,
        min(one.began, other.began),
        max(one.ended, other.ended),
        one.episodes + other.episodes,
        one.scored + other.scored,
        one.reward + other.reward,
        one.squares + other.squares,
        one.turns + other.turns,
        one.tokens + other.tokens,
        max(one.longest, other.longest),
        one.failures | {kind: one.failures.get(kind, 0) + count for kind, count in other.failures.items()},
    )
