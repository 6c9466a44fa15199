"""Lists for people: runs with a few figures each, and the groups of a run page by page.

Invariant: a page costs what is on it. Runs are figured one at a time and on request, since an ended run's figures do
not change; groups are paged by their number, never counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from ..contracts.ids import EpisodeKey, GroupKey
from ..contracts.messages import Message
from ..contracts.states import EpisodeState, GroupState, RunState
from .encoding import decode, decode_message, decode_messages
from .store import Store

SPARKS: Final = 40
"""Points of a run's reward line."""

_HEADS: Final = """
SELECT run_id, name, state, reason, waiting_for, created_at, changed_at, ended_at,
  CASE config->'trainer'->>'kind' WHEN 'none' THEN NULL ELSE (config->'trainer'->>'steps')::int END
FROM runs ORDER BY created_at DESC, run_id LIMIT %(limit)s OFFSET %(offset)s
"""

_FIGURES: Final = """
SELECT r.run_id,
  (SELECT count(*) FROM train_steps s WHERE s.run_id = r.run_id),
  played.episodes, played.scored, played.mean,
  (SELECT coalesce(array_agg(mean ORDER BY place), '{}') FROM (
    SELECT g.group_no::bigint * %(sparks)s / greatest(r.next_group_no, 1) AS place, avg(g.mean_reward) AS mean
    FROM groups g WHERE g.run_id = r.run_id AND g.kind = 'train' AND g.mean_reward IS NOT NULL GROUP BY 1
  ) AS line)
FROM runs r CROSS JOIN LATERAL (
  SELECT count(*) AS episodes, count(e.reward) FILTER (WHERE g.kind = 'train') AS scored,
    avg(e.reward) FILTER (WHERE g.kind = 'train') AS mean
  FROM episodes e JOIN groups g ON g.run_id = e.run_id AND g.group_no = e.group_no WHERE e.run_id = r.run_id
) AS played
WHERE r.run_id = ANY(%(runs)s)
"""

_GROUPS: Final = """
SELECT g.group_no, g.kind, g.environment, g.evaluation, g.state, g.failure, g.reason, g.size, g.mean_reward,
  g.admitted_at, g.closed_at, (
    SELECT coalesce(jsonb_agg(jsonb_build_array(e.member, e.attempt, e.state, e.reward) ORDER BY e.member), '[]')
    FROM (
      SELECT DISTINCT ON (member) member, attempt, state, reward FROM episodes
      WHERE run_id = g.run_id AND group_no = g.group_no ORDER BY member, attempt DESC
    ) AS e)
FROM groups g
WHERE g.run_id = %(run)s AND (%(environment)s::text IS NULL OR g.environment = %(environment)s)
  AND (%(state)s::text IS NULL OR g.state = %(state)s) AND (%(before)s::int IS NULL OR g.group_no < %(before)s)
ORDER BY g.group_no DESC LIMIT %(limit)s
"""

_ANSWERS: Final = """
SELECT e.member, e.prompt::text, e.prompt_exact, t.turn, t.message::text, t.message_exact
FROM (
  SELECT DISTINCT ON (member) * FROM episodes
  WHERE run_id = %(run)s AND group_no = %(group)s ORDER BY member, attempt DESC
) AS e
LEFT JOIN LATERAL (
  SELECT turn, message, message_exact FROM turns
  WHERE run_id = e.run_id AND group_no = e.group_no AND member = e.member AND attempt = e.attempt
  ORDER BY turn DESC LIMIT 1
) AS t ON true
ORDER BY e.member
"""


@dataclass(frozen=True)
class RunHead:
    """A run without its figures."""

    run_id: str
    name: str
    state: RunState
    reason: str | None
    waiting_for: str | None
    created_at: datetime
    changed_at: datetime
    ended_at: datetime | None
    wanted_steps: int | None
    """None: it has no trainer."""


@dataclass(frozen=True)
class RunFigures:
    steps: int
    episodes: int
    """Attempts that were started, evaluations included."""
    scored: int
    """Training attempts that have a reward."""
    mean_reward: float | None
    """Over those: the same number as in a `RunSummary`."""
    rewards: tuple[float, ...]
    """Mean reward of training groups over the life of the run, at most `SPARKS` points."""


@dataclass(frozen=True)
class MemberLine:
    """The newest attempt of a member."""

    member: int
    attempt: int
    state: EpisodeState
    reward: float | None


@dataclass(frozen=True)
class GroupLine:
    key: GroupKey
    kind: str
    environment: str
    evaluation: str | None
    state: GroupState
    failure: str | None
    reason: str | None
    size: int
    mean_reward: float | None
    admitted_at: datetime
    closed_at: datetime | None
    members: tuple[MemberLine, ...]

    def episode(self, member: MemberLine) -> EpisodeKey:
        return self.key.episode(member.member, member.attempt)


@dataclass(frozen=True)
class Answer:
    """What a member was asked first, and what it said last."""

    prompt: tuple[Message, ...]
    turns: int
    last: Message | None


async def run_heads(store: Store, limit: int, offset: int = 0) -> list[RunHead]:
    """The newest runs first."""
    async with store.direct() as connection:
        rows = await (await connection.execute(_HEADS, {"limit": limit, "offset": offset})).fetchall()
    return [RunHead(run_id, name, RunState(state), *rest) for run_id, name, state, *rest in rows]


async def run_figures(store: Store, runs: Sequence[str]) -> dict[str, RunFigures]:
    """What these runs have done so far."""
    if not runs:
        return {}
    async with store.direct() as connection:
        rows = await (await connection.execute(_FIGURES, {"runs": list(runs), "sparks": SPARKS})).fetchall()
    return {
        run_id: RunFigures(steps, episodes, scored, mean, tuple(line))
        for run_id, steps, episodes, scored, mean, line in rows
    }


async def group_lines(
    store: Store,
    run_id: str,
    limit: int,
    *,
    environment: str | None = None,
    state: GroupState | None = None,
    before: int | None = None,
) -> list[GroupLine]:
    """Groups with a number below `before`, the newest first."""
    values = {"run": run_id, "environment": environment, "state": state, "before": before, "limit": limit}
    async with store.direct() as connection:
        rows = await (await connection.execute(_GROUPS, values)).fetchall()
    return [_line(run_id, row) for row in rows]


async def group_answers(store: Store, key: GroupKey) -> dict[int, Answer]:
    """Of the newest attempt of each member that started."""
    async with store.direct() as connection:
        cursor = await connection.execute(_ANSWERS, {"run": key.run_id, "group": key.group_no})
        rows = await cursor.fetchall()
    return {
        member: Answer(
            decode_messages(decode(prompt, prompt_exact)),
            0 if turn is None else turn + 1,
            None if turn is None else decode_message(message, exact),
        )
        for member, prompt, prompt_exact, turn, message, exact in rows
    }


def _line(run_id: str, row: tuple[Any, ...]) -> GroupLine:
    group_no, kind, environment, evaluation, state, failure, reason, size, mean, admitted_at, closed_at, members = row
    return GroupLine(
        key=GroupKey(run_id=run_id, group_no=group_no),
        kind=kind,
        environment=environment,
        evaluation=evaluation,
        state=GroupState(state),
        failure=failure,
        reason=reason,
        size=size,
        mean_reward=mean,
        admitted_at=admitted_at,
        closed_at=closed_at,
        members=tuple(
            MemberLine(member, attempt, EpisodeState(now), reward) for member, attempt, now, reward in members
        ),
    )
