"""What came of the demo, read from rows, and whether that is what it should be.

Invariant: every number is a query over what is stored, none is remembered from the way there. An episode counts as
finished where some attempt of it is done, and as sampled where each of that attempt's turns has tokens. A mean reward
is one over episodes, all that were scored, those of groups without signal included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..contracts.ids import EpisodeKey
from ..contracts.runfile import RunConfig
from ..db.audit import Audit
from ..db.store import Store

FIRST_STEPS: Final = 3
LAST_STEPS: Final = 5

_COUNTS: Final = """
WITH members AS (
  SELECT g.group_no, g.kind, m.member FROM groups g, generate_series(0, g.size - 1) AS m(member)
  WHERE g.run_id = %(run)s AND NOT (g.kind = 'train' AND g.state = 'failed')
), finished AS (
  SELECT DISTINCT ON (e.group_no, e.member) e.group_no, e.member, e.attempt, e.reward
  FROM episodes e WHERE e.run_id = %(run)s AND e.state = 'done'
  ORDER BY e.group_no, e.member, e.attempt DESC
), sampled AS (
  SELECT t.group_no, t.member, t.attempt, min(octet_length(t.sampled)) AS least
  FROM turns t WHERE t.run_id = %(run)s GROUP BY t.group_no, t.member, t.attempt
), doubted AS (
  SELECT DISTINCT e.group_no, e.member FROM episodes e JOIN turns t USING (run_id, group_no, member, attempt)
  WHERE e.run_id = %(run)s AND e.state = 'failed' AND e.failure = 'engine' AND t.provisional
)
SELECT m.kind, count(*), count(f.member), count(*) FILTER (WHERE s.least > 0), count(f.reward), avg(f.reward),
  count(d.member) FILTER (WHERE f.member IS NULL)
FROM members m
LEFT JOIN finished f USING (group_no, member)
LEFT JOIN sampled s USING (group_no, member, attempt)
LEFT JOIN doubted d USING (group_no, member)
GROUP BY m.kind
"""

_RUN: Final = """
SELECT r.state, extract(epoch FROM r.ended_at - r.created_at)::float8,
  (SELECT count(*) FROM turns t WHERE t.run_id = r.run_id),
  (SELECT count(*) FROM episodes e WHERE e.run_id = r.run_id AND e.state = 'running'),
  (SELECT max(version) FROM policy_versions v WHERE v.run_id = r.run_id),
  (SELECT avg(v.mean_reward) FROM evaluations v WHERE v.run_id = r.run_id AND v.state = 'completed'),
  (SELECT array_agg(DISTINCT (s.span->>1)::int) FROM groups g JOIN turns t USING (run_id, group_no),
     jsonb_array_elements(t.spans) AS s(span) WHERE g.run_id = r.run_id AND g.kind = 'eval')
FROM runs r WHERE r.run_id = %(run)s
"""

_STEPS: Final = """
SELECT s.step, counted.n, counted.total, (s.metrics->>'loss')::float8, s.staleness, b.filtered,
  extract(epoch FROM s.committed_at - coalesce(lag(s.committed_at) OVER (ORDER BY s.step), r.created_at))::float8
FROM train_steps s JOIN batches b USING (run_id, batch_no) JOIN runs r USING (run_id)
CROSS JOIN LATERAL (
  SELECT count(newest.reward) AS n, coalesce(sum(newest.reward), 0) AS total FROM (
    SELECT DISTINCT ON (e.group_no, e.member) e.reward FROM groups g JOIN episodes e USING (run_id, group_no)
    WHERE g.run_id = s.run_id AND g.kind = 'train' AND g.reported_in = s.batch_no AND e.state = 'done'
    ORDER BY e.group_no, e.member, e.attempt DESC
  ) AS newest
) AS counted
WHERE s.run_id = %(run)s ORDER BY s.step
"""

_SAMPLE: Final = """
SELECT e.group_no, e.member, e.attempt FROM episodes e JOIN groups g USING (run_id, group_no)
WHERE e.run_id = %(run)s AND g.kind = 'train' AND e.state = 'done'
ORDER BY e.reward DESC NULLS LAST, e.turns DESC, e.group_no DESC, e.member LIMIT 1
"""
"""A successful one where there is one, and of those the newest: what it does after it has learnt."""


@dataclass(frozen=True)
class StepFigures:
    """A train step and the episodes that were closed since the one before."""

    step: int
    scored: int
    rewards: float
    """Sum over them."""
    loss: float | None
    staleness: int
    filtered: int
    """Groups without signal among them."""
    seconds: float
    """Since the commit before."""


@dataclass(frozen=True)
class RunReport:
    """A run that has ended, in figures. `problems`: what must not be, in words."""

    run: str
    episodes: int
    turns: int
    steps: tuple[StepFigures, ...]
    reward: float | None
    """Mean over all its scored training episodes."""
    eval_reward: float | None
    run_s: float
    """Seconds from the run's start to its end, as rows say."""
    sample: EpisodeKey | None
    audit: Audit
    problems: tuple[str, ...]
    in_doubt: int = 0
    """Training episodes that failed since their engine was gone before it had proved the weights it sampled with."""

    @property
    def reward_first(self) -> float | None:
        return mean_reward(self.steps[:FIRST_STEPS])

    @property
    def reward_last(self) -> float | None:
        return mean_reward(self.steps[-LAST_STEPS:])


def mean_reward(steps: Sequence[StepFigures]) -> float | None:
    """Over the scored episodes of these steps."""
    scored = sum(one.scored for one in steps)
    return sum(one.rewards for one in steps) / scored if scored else None


async def read_report(store: Store, run_id: str, config: RunConfig, audit: Audit) -> RunReport:
    """Read the figures of a run that has ended, to go with its audit."""
    values = {"run": run_id}
    async with store.direct() as connection:
        kinds = await (await connection.execute(_COUNTS, values)).fetchall()
        row = await (await connection.execute(_RUN, values)).fetchone()
        steps = tuple(StepFigures(*one) for one in await (await connection.execute(_STEPS, values)).fetchall())
        sample = await (await connection.execute(_SAMPLE, values)).fetchone()
    if row is None:
        raise LookupError(f"the store has no run {run_id}")
    counts: dict[str, Sequence[Any]] = {kind: numbers for kind, *numbers in kinds}
    state, wall, turns, running, newest, evaluated, pinned = row
    problems = [f"the run is {state}"] if state != "completed" else []
    if running:
        problems.append(f"{running} episodes still run")
    if config.trains and len(steps) != config.trainer.steps:
        problems.append(f"{len(steps)} of {config.trainer.steps} train steps are committed")
    if config.trains and pinned is not None and pinned != [newest]:
        problems.append(f"the evaluation was sampled by versions {pinned}, not by the last one, {newest}")
    problems += _missing(counts, config)
    return RunReport(
        run=run_id,
        episodes=sum(finished for _, finished, *_ in counts.values()),
        turns=turns,
        steps=steps,
        reward=counts["train"][4] if "train" in counts else None,
        eval_reward=evaluated,
        run_s=wall or 0.0,
        sample=None
        if sample is None
        else EpisodeKey(run_id=run_id, group_no=sample[0], member=sample[1], attempt=sample[2]),
        audit=audit,
        problems=tuple(problems),
        in_doubt=counts["train"][5] if "train" in counts else 0,
    )


def _missing(counts: dict[str, Sequence[Any]], config: RunConfig) -> list[str]:
    """Episodes that should be there, by kind: of a run that trains, those of every group that did not fail."""
    expected = {"eval": sum(chosen.tasks * chosen.samples for chosen in config.evaluations("end").values())}
    size = config.environments[0].group_size
    if config.trains:
        expected["train"] = counts["train"][0] if "train" in counts else config.trainer.steps * size
    else:
        expected["train"] = (config.budget.groups or 0) * size
    problems = []
    for kind, name in (("train", "training"), ("eval", "evaluation")):
        members, finished, sampled, scored, _, doubted = counts.get(kind, (0, 0, 0, 0, None, 0))
        for what, number in (
            ("exist", members),
            ("finished", finished + doubted),
            ("have tokens", sampled + doubted),
            ("scored", scored + doubted),
        ):
            if number != expected[kind]:
                problems.append(f"{number} of {expected[kind]} {name} episodes {what}")
                break
    return problems
