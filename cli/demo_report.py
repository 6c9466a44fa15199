"""What came of the demo, read from rows.

Invariant: every number is a query over what is stored, none is remembered from the way there. An episode counts as
finished where some attempt of it is done, and as sampled where each of that attempt's turns has tokens.
"""

from dataclasses import dataclass
from typing import Any, Final

from ..contracts.ids import EpisodeKey
from ..contracts.runfile import RunConfig
from ..db.store import Store

_FIRST_GROUPS: Final = 8
"""Groups whose mean is `reward_first`: enough for a stable figure, few enough to be a beginning."""

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
)
SELECT m.kind, count(*), count(f.member), count(*) FILTER (WHERE s.least > 0), count(f.reward)
FROM members m
LEFT JOIN finished f USING (group_no, member)
LEFT JOIN sampled s USING (group_no, member, attempt)
GROUP BY m.kind
"""

_RUN: Final = """
SELECT r.state, extract(epoch FROM r.ended_at - r.created_at)::float8,
  (SELECT count(*) FROM turns t WHERE t.run_id = r.run_id),
  (SELECT avg(e.reward) FROM episodes e JOIN groups g USING (run_id, group_no)
   WHERE e.run_id = r.run_id AND g.kind = 'train' AND e.state = 'done' AND g.group_no IN (
     SELECT group_no FROM groups WHERE run_id = r.run_id AND kind = 'train' AND state <> 'failed'
     ORDER BY group_no LIMIT %(first)s)),
  (SELECT avg(v.mean_reward) FROM evaluations v WHERE v.run_id = r.run_id AND v.state = 'completed'),
  (SELECT count(*) FROM episodes e WHERE e.run_id = r.run_id AND e.state = 'running')
FROM runs r WHERE r.run_id = %(run)s
"""

_SAMPLE: Final = """
SELECT e.group_no, e.member, e.attempt FROM episodes e JOIN groups g USING (run_id, group_no)
WHERE e.run_id = %(run)s AND g.kind = 'train' AND e.state = 'done'
ORDER BY e.reward DESC NULLS LAST, e.turns DESC, e.group_no, e.member LIMIT 1
"""


@dataclass(frozen=True)
class Report:
    """The demo in figures. `problems`: what must not be, in words."""

    run: str
    episodes: int
    turns: int
    reward_first: float | None
    eval_reward: float | None
    run_s: float
    """Seconds from the run's start to its end, as rows say."""
    sample: EpisodeKey | None
    problems: tuple[str, ...]

    def line(self, wall_s: float) -> dict[str, Any]:
        """The JSON object of the last line. `wall_s`: seconds of the whole demo, the making of the policy included."""
        return {
            "run": self.run,
            "episodes": self.episodes,
            "turns": self.turns,
            "reward_first": _rounded(self.reward_first),
            "eval_reward": _rounded(self.eval_reward),
            "wall_s": round(wall_s, 2),
            "turns_per_s": round(self.turns / self.run_s, 2) if self.run_s > 0 else None,
            "problems": list(self.problems),
        }


async def read_report(store: Store, run_id: str, config: RunConfig) -> Report:
    """Read the figures of a run that has ended."""
    values = {"run": run_id, "first": _FIRST_GROUPS}
    async with store.direct() as connection:
        counts = {row[0]: row[1:] for row in await (await connection.execute(_COUNTS, values)).fetchall()}
        row = await (await connection.execute(_RUN, values)).fetchone()
        sample = await (await connection.execute(_SAMPLE, values)).fetchone()
    if row is None:
        raise LookupError(f"the store has no run {run_id}")
    state, wall, turns, first, evaluated, running = row
    problems = [f"the run is {state}"] if state != "completed" else []
    if running:
        problems.append(f"{running} episodes still run")
    for kind, expected in _expected(config).items():
        members, finished, sampled, scored = counts.get(kind, (0, 0, 0, 0))
        name = "training" if kind == "train" else "evaluation"
        for what, number in (("exist", members), ("finished", finished), ("have tokens", sampled), ("scored", scored)):
            if number != expected:
                problems.append(f"{number} of {expected} {name} episodes {what}")
                break
    return Report(
        run=run_id,
        episodes=sum(finished for _, finished, _, _ in counts.values()),
        turns=turns,
        reward_first=first,
        eval_reward=evaluated,
        run_s=wall or 0.0,
        sample=None
        if sample is None
        else EpisodeKey(run_id=run_id, group_no=sample[0], member=sample[1], attempt=sample[2]),
        problems=tuple(problems),
    )


def _expected(config: RunConfig) -> dict[str, int]:
    """Episodes there must be, by kind."""
    evaluations = config.evaluations("end").values()
    return {
        "train": (config.budget.groups or 0) * config.environments[0].group_size,
        "eval": sum(chosen.tasks * chosen.samples for chosen in evaluations),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
