"""Every activity: its name, input, result, queue and options, in one typed table.

Invariant: workflows know activities only through this table, so a name, a queue or a timeout is spelt once. Inputs and
results carry ids and small facts; text in them is a preview of at most 200 UTF-8 bytes. What was said, sampled or
computed is in rows keyed by the same ids.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

from pydantic import Field

from . import queues
from .base import Wire
from .flow import CallPlan
from .ids import EpisodeKey, GroupKey
from .limits import Limits
from .reasons import FailureKind, FinishReason, RunAt, StopReason
from .states import EvaluationState, GroupState, RunState
from .training import TrainerKind

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")

BAD_RUN_FILE: Final = "BadRunFile"
"""Error type of a run file that is refused: its message is for people."""
NEVER_RETRIED: Final = (BAD_RUN_FILE, "PayloadsTooLarge", *(kind.value for kind in FailureKind))
"""Error types that mean the same at every try. A FailureKind as type says whose fault it is."""


@dataclass(frozen=True)
class Activity(Generic[InputT, ResultT]):
    """One activity as workflows call it."""

    name: str
    input: type[InputT]
    result: type[ResultT]
    queue: str
    timeout: timedelta = timedelta(seconds=60)
    """Start to close of one try when scheduled."""
    heartbeat: timedelta | None = None
    """A worker that died over it is noticed after this; None: after 5 s."""
    local: timedelta | None = None
    """Start to close of one try as a local activity; None: always scheduled."""
    max_interval: timedelta = timedelta(seconds=10)
    """Longest pause between two tries."""


# --- runs -------------------------------------------------------------------------------------------------------


class RegisterRun(Wire):
    run_id: str
    document: Any
    """The run file as it came: validated here, so that a bad one fails at once."""


class RunPlan(Wire):
    """What the run's workflow needs to know."""

    name: str
    state: RunState
    trainer: TrainerKind = TrainerKind.NONE
    evaluations_at_start: tuple[str, ...] = ()
    evaluations_at_end: tuple[str, ...] = ()
    """Names of evaluations, one a set."""


class RunRef(Wire):
    run_id: str


class GroupStart(Wire):
    """A group whose workflow is to be started."""

    key: GroupKey
    environment: str
    task_key: str
    size: int
    min_valid: int = 1
    top_up: int = 0
    group_scorer_at: RunAt | None = None
    """Where the group's scorers run; None where it has none."""
    start_at: RunAt = RunAt.INLINE
    """Where an episode's start and end run: scheduled where the environment has a `setup` or `cleanup`."""
    evaluation: bool = False


class Admission(Wire):
    """What admission decided."""

    groups: tuple[GroupStart, ...] = ()
    open: int = 0
    """Groups in flight after it."""
    done: bool = False
    """The budget is spent and nothing is in flight."""
    waiting_for: str | None = None
    """Why nothing (more) is admitted, in words for people; None while groups are in flight or admitted."""
    again_s: float = 60.0
    """Ask again after this, or as soon as a group closes."""


class Reconcile(Wire):
    """Which open groups to hold against what Temporal knows: a run's training groups, or an evaluation's."""

    run_id: str
    evaluation: str | None = None


class Reconciled(Wire):
    started: tuple[GroupStart, ...] = ()
    """Admitted groups that no workflow works on."""
    closed: int = 0
    """Orphans closed as `infrastructure`."""


class SetRunState(Wire):
    run_id: str
    state: RunState
    reason: str | None = None


class TuneRun(Wire):
    """Changes to a live run; None leaves a value as it is."""

    run_id: str
    concurrency: int | None = None
    weights: dict[str, float] = Field(default_factory=dict)
    """Environment's label → weight."""


class EvaluationRef(Wire):
    run_id: str
    name: str


class EvaluationPage(Wire):
    """The next groups of an evaluation to start."""

    groups: tuple[GroupStart, ...] = ()
    open: int = 0
    """Groups that have not ended, those on this page included."""
    again_s: float = 60.0
    """Ask again after this, or as soon as a group closes."""


class NextEvaluationGroups(Wire):
    run_id: str
    name: str
    running: tuple[int, ...] = ()
    """Numbers of groups whose workflow is known to run."""


class EvaluationOutcome(Wire):
    name: str
    state: EvaluationState
    episodes: int = 0
    mean_reward: float | None = None
    """Mean over scored samples."""
    pass_at: dict[str, float] = Field(default_factory=dict)
    """k → unbiased pass@k: 1 - C(n-c, k) / C(n, k), mean over tasks."""


REGISTER_RUN: Final = Activity("register_run", RegisterRun, RunPlan, queues.CONTROL)
ADMIT_GROUPS: Final = Activity("admit_groups", RunRef, Admission, queues.CONTROL)
RECONCILE: Final = Activity("reconcile", Reconcile, Reconciled, queues.CONTROL)
SET_RUN_STATE: Final = Activity("set_run_state", SetRunState, RunState, queues.CONTROL)
TUNE_RUN: Final = Activity("tune_run", TuneRun, RunState, queues.CONTROL)
CANCEL_GROUPS: Final = Activity("cancel_groups", RunRef, int, queues.CONTROL)
"""Cancels the workflow of every open group by id; the result counts them."""
START_EVALUATION: Final = Activity(
    "start_evaluation", EvaluationRef, EvaluationOutcome, queues.CONTROL, timeout=timedelta(minutes=10)
)
NEXT_EVALUATION_GROUPS: Final = Activity("next_evaluation_groups", NextEvaluationGroups, EvaluationPage, queues.CONTROL)
FINISH_EVALUATION: Final = Activity("finish_evaluation", EvaluationRef, EvaluationOutcome, queues.CONTROL)


# --- groups -----------------------------------------------------------------------------------------------------


class ScoreGroup(Wire):
    key: GroupKey
    members: tuple[EpisodeKey, ...]
    """The attempt of each member that counts."""


class CloseGroup(Wire):
    key: GroupKey
    members: tuple[EpisodeKey, ...]
    failure: FailureKind | None = None
    """Set where the group failed: its task is quarantined unless it was cancelled."""
    reason: str | None = None
    tell: str | None = None
    """Workflow to wake once it is closed."""
    evaluation: bool = False
    """Its episodes never train."""


class GroupResult(Wire):
    key: GroupKey
    state: GroupState
    valid: int = 0
    mean_reward: float | None = None


SCORE_GROUP: Final = Activity(
    "score_group",
    ScoreGroup,
    int,
    queues.TOOLS,
    timeout=timedelta(minutes=30),
    heartbeat=timedelta(seconds=5),
    local=timedelta(seconds=2),
)
"""Runs the environment's group rewards over the valid members; the result counts scores written."""
CLOSE_GROUP: Final = Activity("close_group", CloseGroup, GroupResult, queues.CONTROL, local=timedelta(seconds=2))


# --- episodes ---------------------------------------------------------------------------------------------------


class StartEpisode(Wire):
    key: EpisodeKey


class EpisodeResult(Wire):
    key: EpisodeKey
    valid: bool
    stop: StopReason
    failure: FailureKind | None = None
    reason: str | None = None
    """What went wrong, in words (preview)."""
    reward: float | None = None
    turns: int = 0
    sampled_tokens: int = 0
    policy_version: int | None = None
    """The oldest version that sampled a token."""


class ScorerPlan(Wire):
    """Where one reward, metric or stop condition runs."""

    name: str
    run: RunAt
    queue: str | None = None
    timeout_s: float = 2.0


class EpisodePlan(Wire):
    """What an episode's workflow needs to know to run it."""

    environment: str
    task_key: str
    limits: Limits
    opening: str
    """Preview of the prompt's last message."""
    step: ScorerPlan | None = None
    """Where the environment's `step` runs; None where it has none."""
    scorers: tuple[ScorerPlan, ...] = ()
    """Rewards and metrics that do not run inline; inline ones run when the episode is finished."""
    ended: EpisodeResult | None = None
    """Set where this attempt has ended before: there is nothing left to do."""


class SampleTurn(Wire):
    key: EpisodeKey
    turn: int


class TurnResult(Wire):
    """What the model did. `overflow`: the prompt did not fit, nothing was sampled and no row written."""

    finish: FinishReason = FinishReason.STOP
    overflow: bool = False
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    policy_version: int | None = None
    calls: tuple[CallPlan, ...] = ()
    """Its tool calls and where each runs; malformed and unknown ones are answered inline, with an error."""
    said: str = ""
    """Preview of the message."""


class AnswerTurn(Wire):
    """Run inline tool calls, or `step`, and at the end of the turn the stop conditions."""

    key: EpisodeKey
    turn: int
    calls: tuple[int, ...] = ()
    step: bool = False
    last: bool = True
    """No further call of this turn follows: stop conditions are asked."""


class TurnAnswer(Wire):
    said: str = ""
    """Preview of what was answered."""
    done: bool = False
    truncated: bool = False
    condition: str | None = None


class RunTool(Wire):
    """One scheduled tool call."""

    key: EpisodeKey
    turn: int
    index: int


class ScoreEpisode(Wire):
    key: EpisodeKey
    names: tuple[str, ...]
    """The scorers to run; each writes its own row."""


class FinishEpisode(Wire):
    """Run inline scorers and the environment's inline clean-up, add up the reward, close the row."""

    key: EpisodeKey
    stop: StopReason
    failure: FailureKind | None = None
    reason: str | None = None
    """What went wrong, in words (preview)."""


START_EPISODE: Final = Activity(
    "start_episode",
    StartEpisode,
    EpisodePlan,
    queues.TOOLS,
    timeout=timedelta(minutes=10),
    heartbeat=timedelta(seconds=5),
    local=timedelta(seconds=2),
)
SAMPLE_TURN: Final = Activity(
    "sample_turn",
    SampleTurn,
    TurnResult,
    queues.MODEL,
    timeout=timedelta(hours=2),
    heartbeat=timedelta(seconds=4),
    max_interval=timedelta(seconds=3),
)
ANSWER_TURN: Final = Activity(
    "answer_turn",
    AnswerTurn,
    TurnAnswer,
    queues.TOOLS,
    timeout=timedelta(minutes=10),
    heartbeat=timedelta(seconds=5),
    local=timedelta(seconds=2),
)
RUN_TOOL: Final = Activity(
    "run_tool",
    RunTool,
    TurnAnswer,
    queues.TOOLS,
    timeout=timedelta(hours=1),
    heartbeat=timedelta(seconds=5),
)
SCORE_EPISODE: Final = Activity(
    "score_episode",
    ScoreEpisode,
    int,
    queues.TOOLS,
    timeout=timedelta(hours=1),
    heartbeat=timedelta(seconds=5),
)
FINISH_EPISODE: Final = Activity(
    "finish_episode",
    FinishEpisode,
    EpisodeResult,
    queues.TOOLS,
    timeout=timedelta(minutes=10),
    heartbeat=timedelta(seconds=5),
    local=timedelta(seconds=2),
)
