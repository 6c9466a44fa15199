"""What activities write to the store and read back: plain records, no SQL and no ORM.

Invariant: a record is complete when it is built (arrays of equal length, finite numbers), so the store either keeps
all of it under its key or refuses it whole. Token arrays are Python lists here; the store packs them.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from .engines import HostedOptions
from .ids import EpisodeKey
from .messages import Message, ToolCall
from .numbers import LARGEST
from .reasons import FailureKind, FinishReason, StopReason
from .states import EpisodeState, RunState


class BadRecord(ValueError):
    """A record that contradicts itself; nothing of it is stored."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled by weights that the engine calls `label`.

    `engine_id` and `incarnation`: by which life of which engine, since a completion that broke off may have been
    continued elsewhere. None in rows older than these fields; then the turn's own hold.
    """

    label: str
    version: int
    start: int
    end: int
    engine_id: str | None = None
    incarnation: str | None = None

    def moved(self, by: int) -> "VersionSpan":
        return replace(self, start=self.start + by, end=self.end + by)


def joined(first: tuple[VersionSpan, ...], second: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Spans of a prefix and of its continuation (counted from its own first token) as spans of the whole."""
    if not first or not second:
        return first or second
    last, head, *rest = first[-1], *(span.moved(first[-1].end) for span in second)
    if replace(head, start=last.start) == replace(last, end=head.end):
        return (*first[:-1], replace(last, end=head.end), *rest)
    return (*first, head, *rest)


def check_sampled(what: str, sampled: list[int], logprobs: list[float], spans: tuple[VersionSpan, ...]) -> None:
    """Raise BadRecord unless every sampled token has one finite logprob and lies in exactly one span."""
    if len(sampled) != len(logprobs):
        raise BadRecord(f"{what}: {len(sampled)} sampled ids and {len(logprobs)} logprobs; they must be equally many")
    if not all(map(math.isfinite, logprobs)):
        raise BadRecord(f"{what}: a logprob is not finite")
    if logprobs and max(-min(logprobs), max(logprobs)) > LARGEST:
        raise BadRecord(f"{what}: a logprob is beyond {LARGEST:g} and no float32")
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise BadRecord(f"{what}: version spans do not tile the sampled tokens")
        position = span.end
    if position != len(sampled):
        raise BadRecord(f"{what}: version spans cover {position} of {len(sampled)} sampled tokens")


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One model call, as stored. Keyed by (episode, attempt, turn).

    `prompt_delta`: int32 ids that this turn appended to its segment before sampling: the whole prompt where it opens
    a segment, else the rendered tool results and replies. `sampled`, `logprobs` (float32, of the sampling
    distribution at `temperature`) and `mask` (0/1, 1 = trains) are equally long.
    """

    turn: int
    segment: int
    opens_segment: bool
    message: Message
    prompt_delta: list[int]
    sampled: list[int]
    logprobs: list[float]
    mask: list[int]
    finish: FinishReason
    spans: tuple[VersionSpan, ...]
    temperature: float
    engine_id: str
    incarnation: str
    request_id: str
    agent: str | None = None
    provisional: bool = False
    told_prompt: int | None = None
    told_sampled: int | None = None
    """Tokens of an answer that came without ids, as the provider counts them; None where it does not, or gave ids."""

    def __post_init__(self) -> None:
        if not len(self.sampled) == len(self.logprobs) == len(self.mask):
            raise BadRecord(
                f"turn {self.turn}: {len(self.sampled)} sampled ids, {len(self.logprobs)} logprobs and "
                f"{len(self.mask)} mask entries; they must be equally many"
            )
        check_sampled(f"turn {self.turn}", self.sampled, self.logprobs, self.spans)

    @property
    def tokens(self) -> int:
        """Sampled tokens, as far as anybody knows."""
        return len(self.sampled) or self.told_sampled or 0

    @property
    def policy_version(self) -> int | None:
        """The oldest version that sampled a token of this turn; None where nothing was sampled."""
        return min((span.version for span in self.spans), default=None)


@dataclass(frozen=True, slots=True)
class Sampled:
    """At least one token with where it came from: a completion, or as much of one as there is.

    `engine_id`, `incarnation`: of the last token.
    """

    sampled: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    engine_id: str
    incarnation: str

    def __post_init__(self) -> None:
        if not self.sampled:
            raise BadRecord("a completion has at least one token")
        check_sampled("a completion", self.sampled, self.logprobs, self.spans)


@dataclass(frozen=True, slots=True)
class PartialTurn:
    """What there is of a turn that is not whole yet. `prompt_digest` names the ids that it continues, and no others."""

    prompt_digest: str
    so_far: Sampled


STEP_INDEX = -1
"""The `call_index` under which the environment's `step` of a turn is stored, beside its tool calls (0, 1, …)."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What answered a turn: one tool call, or (index STEP_INDEX) the environment's `step`.

    `state`: the environment's state after it as plain JSON data, None where it did not change.
    For `step`, `replies`, `reward`, `done`, `truncated` and `info` are its result.
    """

    turn: int
    index: int
    call: ToolCall | None
    content: str = ""
    error: str | None = None
    state: dict[str, Any] | None = None
    replies: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """What an episode begins with: written once, before the first model call."""

    key: EpisodeKey
    prompt: tuple[Message, ...]
    state: dict[str, Any]
    environment_version: str


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """Everything of an episode that the next activity needs, read in one round trip.

    `state`: the environment's state after the last recorded call. `turns` and `calls` are in order.
    """

    key: EpisodeKey
    kind: str
    """`train` or `eval`."""
    environment: str
    task_key: str
    task_data: Any
    task_info: dict[str, Any]
    evaluation: str | None
    prompt: tuple[Message, ...]
    state: dict[str, Any]
    environment_version: str
    status: EpisodeState
    turns: tuple[TurnRecord, ...]
    calls: tuple[CallRecord, ...]
    stop: StopReason | None = None
    failure: FailureKind | None = None
    reward: float | None = None
    run_state: RunState = RunState.RUNNING
    """Asked before every model call: an ended run buys no more tokens."""
    pinned: int | None = None
    """The version its evaluation is pinned to; None: any version of the run will do."""


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """An engine of a run as admission and the pool see it."""

    engine_id: str
    kind: str
    url: str
    concurrency: int
    api_key_env: str | None
    state: str
    reason: str | None
    weight_label: str | None
    incarnation: str | None
    hosted: HostedOptions | None = None
    """How it is spoken to, where it takes messages."""


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group to admit: which task, for which environment, and how big."""

    environment: str
    split: str
    task_key: str
    task_data: Any
    task_info: dict[str, Any]
    draw: int
    """Position in the environment's seeded order."""
    size: int
    evaluation: str | None = None
