"""The table of the fault bench: what is struck, when, and how.

A cell is component/moment. The moment is a point of the run that some process passes (`Point`); whoever passes it
strikes the component, which may be itself. How often a run passes a point at least is known, so a seed can choose one
of these times. Moments without a suffix are deaths; `~hang` stops the component for longer than its heartbeats and lets
it go on; `~away` keeps a server from coming back for a while.
"""

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final

from ..support.armed import KILL, STOP

STEPS, GROUPS, MEMBERS, TURNS = 2, 2, 2, 3
"""Of the run that every cell disturbs: steps, groups a step, episodes a group, turns an episode."""
_GROUPS: Final = STEPS * GROUPS
_EPISODES: Final = _GROUPS * MEMBERS


class Fault(StrEnum):
    KILL = "kill"
    HANG = "hang"
    AWAY = "away"


HANGS_S: Final = {"trainer": 6.0, "temporal": 6.0, "postgres": 6.0, "engine": 6.0, "workflows": 8.0, "activities": 8.0}
"""Longer than a heartbeat or the timeout of a workflow task: who stops is believed dead before it goes on."""
AWAY_S: Final = {"postgres": 10.0, "temporal": 15.0, "engine": 8.0}
LONG_AWAY_S: Final = 60.0


@dataclass(frozen=True)
class Point:
    """A place that every run passes at least `passes` times, in the process `passed_by`."""

    passed_by: str
    passes: int


def _around(name: str, passed_by: str, passes: int) -> dict[str, Point]:
    return {f"{name}.{when}": Point(passed_by, passes) for when in ("before", "after")}


POINTS: Final[dict[str, Point]] = {
    **_around("register_run", "activities", 1),
    **_around("reconcile", "activities", 1),
    **_around("admit_groups", "activities", STEPS),
    **_around("set_run_state", "activities", 1),
    **_around("start_episode", "workflows", _EPISODES),
    **_around("answer_turn", "workflows", _EPISODES),
    **_around("finish_episode", "workflows", _EPISODES),
    **_around("close_group", "workflows", _GROUPS),
    **_around("sample_turn", "activities", _EPISODES * TURNS),
    "sample_turn.paid": Point("activities", _EPISODES * TURNS),
    "generating": Point("engine", _EPISODES * TURNS),
    **_around("run_tool", "activities", _EPISODES),
    "effect": Point("workflows", 2 * _EPISODES),
    **_around("score_episode", "activities", _EPISODES),
    **_around("prepare_training", "trainer", 1),
    "leased": Point("activities", STEPS),
    "gradient": Point("trainer", STEPS),
    "optimised": Point("trainer", STEPS),
    "half-written": Point("trainer", STEPS),
    "written": Point("trainer", STEPS),
    "before-commit": Point("trainer", STEPS),
    "committed": Point("trainer", STEPS),
    "loading": Point("activities", STEPS),
    "reloading": Point("engine", STEPS),
    "loaded": Point("activities", STEPS),
    "probing": Point("activities", STEPS),
}
"""In the order that a run comes by. `effect` is passed by whoever runs the tool: the inline one by `workflows`."""
SERVED: Final = ("sample_turn.before", "sample_turn.paid", "leased", "half-written", "committed", "loading", "probing")
"""While sampling, while storing, while a batch is leased, while a checkpoint is written, when its step was committed,
while weights are published and while they are proved: when servers and engines are struck."""


@dataclass(frozen=True)
class Cell:
    """`component` is struck when `point` is passed."""

    component: str
    point: str
    fault: Fault = Fault.KILL
    for_s: float = 0.0

    @property
    def moment(self) -> str:
        if self.fault is Fault.KILL:
            return self.point
        long = f"-{self.for_s:.0f}s" if self.for_s == LONG_AWAY_S else ""
        return f"{self.point}~{self.fault}{long}"

    @property
    def name(self) -> str:
        return f"{self.component}/{self.moment}"

    @property
    def action(self) -> str:
        """What is armed: whoever passes strikes the component."""
        what = STOP if self.fault is Fault.HANG else KILL
        return f"{what}:{self.component}"

    def passes(self, seed: int) -> int:
        """How often the point is passed before, by seed."""
        return Random(f"{self.name}/{seed}").randrange(POINTS[self.point].passes)


HANGS: Final = {
    "workflows": ("answer_turn.before", "answer_turn.after", "close_group.after"),
    "activities": ("sample_turn.paid", "run_tool.before", "leased", "loaded"),
    "trainer": ("gradient", "half-written", "committed"),
    "engine": ("generating", "reloading"),
    "postgres": ("sample_turn.paid", "half-written"),
    "temporal": ("sample_turn.paid", "half-written"),
}
QUICK: Final = {
    "activities/sample_turn.paid",
    "trainer/half-written",
    "engine/reloading",
    "postgres/sample_turn.paid",
}
"""The few that the ordinary suite plays."""


def _cells() -> dict[str, Cell]:
    deaths = [Cell(point.passed_by, name) for name, point in POINTS.items()]
    deaths += [Cell(who, name) for who in ("engine", "temporal", "postgres") for name in SERVED]
    hangs = [Cell(who, name, Fault.HANG, HANGS_S[who]) for who, names in HANGS.items() for name in names]
    away = [
        Cell(who, name, Fault.AWAY, AWAY_S[who])
        for who in ("engine", "temporal", "postgres")
        for name in ("sample_turn.paid", "half-written", "loading")
    ]
    away += [Cell("temporal", "sample_turn.paid", Fault.AWAY, LONG_AWAY_S)]
    return {cell.name: cell for cell in (*deaths, *hangs, *away)}


CELLS: Final = _cells()
