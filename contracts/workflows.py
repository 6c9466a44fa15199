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

GROUP_CLOSED: Final = "group_closed"
"""Signal of a group to whoever admitted it, with the group's number. It only wakes: rows decide."""
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
