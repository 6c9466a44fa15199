"""Why an episode stopped, and whose fault a failure is.

Invariant: an episode that is done has exactly one StopReason; one that failed has exactly one FailureKind besides.
Reward 0, no reward and invalid are three different things, so a failure never turns into a number.
"""

from enum import StrEnum


class StopReason(StrEnum):
    """Why an episode ended. The value doubles as a metric's name."""

    ANSWERED = "answered"
    """The model answered without calling a tool, and the environment does not answer back."""
    DONE = "done"
    """The environment's `step` said it is over."""
    TRUNCATED = "truncated"
    """The environment's `step` cut it short."""
    CONDITION = "condition"
    """A `@stop` condition of the environment held."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The episode's budget of sampled tokens is spent."""
    LENGTH = "length"
    """One completion hit its own token limit: the message is cut, so its meaning is unknown."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next prompt would not fit the model's context; what exists is scored."""
    FAILED = "failed"
    """It did not end by itself; the failure kind says whose fault."""


class FailureKind(StrEnum):
    """Whose fault an invalid episode or group is (design: every one visible, none a reward)."""

    POLICY = "policy"
    """Malformed call or over length. Data: scored, not invalid."""
    ENVIRONMENT = "environment"
    """The environment's own code raised."""
    TOOL = "tool"
    """A tool could not be run at all (its own errors are its result)."""
    ENGINE = "engine"
    """An inference server failed for good; an outage pauses admission instead."""
    JUDGE = "judge"
    INFRASTRUCTURE = "infrastructure"
    """Lost workers, wall-clock expiry, orphans."""
    CANCELLED = "cancelled"
    STALE = "stale"


class FinishReason(StrEnum):
    """Why the engine stopped sampling, as its wire says it."""

    STOP = "stop"
    LENGTH = "length"


class RunAt(StrEnum):
    """Where a tool, step or scorer runs (`run=`)."""

    INLINE = "inline"
    """A local activity: quick work, well under a second."""
    PROCESS = "process"
    """A scheduled activity in a pool whose worker is killed at the timeout."""
    ACTIVITY = "activity"
    """A scheduled activity on a queue of the author's choice."""
