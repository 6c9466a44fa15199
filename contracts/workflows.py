"""Inputs, results and names of workflows. `RunWorkflow` takes the run file itself, as raw JSON."""

from typing import Final

from .activities import EvaluationOutcome, GroupStart
from .base import Wire
from .ids import EpisodeKey
from .reasons import RunAt
from .states import RunState

RUN_WORKFLOW: Final = "RunWorkflow"
ROLLOUT_WORKFLOW: Final = "RolloutWorkflow"
GROUP_WORKFLOW: Final = "GroupWorkflow"
EPISODE_WORKFLOW: Final = "EpisodeWorkflow"
EVALUATION_WORKFLOW: Final = "EvaluationWorkflow"
TRAINER_WORKFLOW: Final = "TrainerWorkflow"

GROUP_CLOSED: Final = "group_closed"
"""Signal of a group to whoever admitted it, with the group's number. It only wakes: rows decide."""
TRAINED: Final = "trained"
"""Signal of a trainer to its run: no step is left to take, and every evaluation between steps has ended."""
WAKE: Final = "wake"
"""Signal: something changed in the rows, look again."""


class EpisodeInput(Wire):
    key: EpisodeKey
    environment: str
    task_key: str
    start_at: RunAt = RunAt.INLINE


class GroupInput(Wire):
    start: GroupStart
    parent: str | None = None
    """Workflow to tell when the group has closed."""


class RolloutInput(Wire):
    run_id: str


class TrainerInput(Wire):
    """`published` and `finished`: what an earlier part of this workflow's history knew."""

    run_id: str
    builtin: bool = True
    """Whether this run's own trainer takes the steps; else they are only published."""
    published: int = -1
    finished: bool = False


class EvaluationInput(Wire):
    run_id: str
    name: str


class RunResult(Wire):
    run_id: str
    state: RunState
    evaluations: tuple[EvaluationOutcome, ...] = ()


class RunProgress(Wire):
    """Answer of the query `progress`."""

    phase: str
    """What the run does or waits for, in words."""
