"""States of everything that has one, and the one table of legal transitions.

Invariant: a state changes only along an arrow of `TRANSITIONS`; `db` applies each change with a guard on the old
state, so two writers that race cannot both move a row. Terminal states have no arrows out.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class RunState(StrEnum):
    """Life of a run."""

    RUNNING = "running"
    """Admits groups, or waits for a reason that `run why` shows."""
    PAUSED = "paused"
    """A person paused it: what is in flight finishes, nothing is admitted."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


LONGEST_REASON: Final = 500
"""Characters of a person's reason for a pause or a cancel: it is read on a line, and goes through histories."""


class GroupState(StrEnum):
    """Life of a group. Open: admitted, running, waiting, sealed, leased."""

    ADMITTED = "admitted"
    """Counted against the budget; its workflow may not have started yet."""
    RUNNING = "running"
    WAITING = "waiting"
    """Waits for people (human scores); frees its place in the budget."""
    SEALED = "sealed"
    """All members ended and scored; for an evaluation or a run without trainer this is the end."""
    LEASED = "leased"
    TRAINED = "trained"
    FILTERED = "filtered"
    """Sealed but without signal (equal advantages): counted, never trained."""
    FAILED = "failed"
    """Too few valid members, with a failure kind."""
    STALE = "stale"


class EpisodeState(StrEnum):
    """Life of one attempt of an episode."""

    RUNNING = "running"
    DONE = "done"
    """Ended with a stop reason; scored, or unscored because a judge failed. It fails after all where weights that
    sampled for it turn out to be wrong before its group is closed."""
    FAILED = "failed"
    """Invalid: never votes in a baseline; carries a failure kind."""


class EngineState(StrEnum):
    """Whether an engine may be given work."""

    READY = "ready"
    DOWN = "down"
    """Does not answer: asked again until it does."""
    DRAINING = "draining"
    """New weights are being loaded into it; what is in flight goes on."""
    DRAINED = "drained"
    """A person took it out: what is in flight ends, and it gets nothing until they put it back."""
    QUARANTINED = "quarantined"
    """Answers, but not what it should (wrong weights, wrong version); needs a person or a verified reload."""
    REMOVED = "removed"


class EvaluationState(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class BatchState(StrEnum):
    """Life of a batch: the groups of one train step."""

    LEASED = "leased"
    """Its groups are fixed; whoever holds the newest fence may commit it."""
    COMMITTED = "committed"
    ABANDONED = "abandoned"
    """Its groups are free again, all of them."""


class PublicationState(StrEnum):
    """A version on one life of an engine."""

    LOADING = "loading"
    """Turns it samples are provisional."""
    VERIFIED = "verified"
    UNVERIFIED = "unverified"
    """Nothing contradicts it, and nothing could prove it."""
    FAILED = "failed"
    """The engine holds something else: what it sampled under this name does not count."""


OPEN_GROUPS: Final = frozenset({GroupState.ADMITTED, GroupState.RUNNING, GroupState.WAITING})
"""Groups whose workflow still has work to do."""

_ENDED_RUN: Final[frozenset[StrEnum]] = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED})
_ENDED_GROUP: Final[frozenset[StrEnum]] = frozenset({GroupState.SEALED, GroupState.FILTERED, GroupState.FAILED})

TRANSITIONS: Final[Mapping[type[StrEnum], Mapping[StrEnum, frozenset[StrEnum]]]] = {
    RunState: {
        RunState.RUNNING: frozenset({RunState.PAUSED}) | _ENDED_RUN,
        RunState.PAUSED: frozenset({RunState.RUNNING}) | _ENDED_RUN,
        RunState.COMPLETED: frozenset(),
        RunState.FAILED: frozenset(),
        RunState.CANCELLED: frozenset(),
    },
    GroupState: {
        GroupState.ADMITTED: frozenset({GroupState.RUNNING, GroupState.WAITING}) | _ENDED_GROUP,
        GroupState.RUNNING: frozenset({GroupState.WAITING}) | _ENDED_GROUP,
        GroupState.WAITING: _ENDED_GROUP,
        GroupState.SEALED: frozenset({GroupState.LEASED, GroupState.FILTERED, GroupState.STALE}),
        GroupState.LEASED: frozenset({GroupState.TRAINED, GroupState.SEALED, GroupState.STALE}),
        GroupState.TRAINED: frozenset(),
        GroupState.FILTERED: frozenset(),
        GroupState.FAILED: frozenset(),
        GroupState.STALE: frozenset(),
    },
    EpisodeState: {
        EpisodeState.RUNNING: frozenset({EpisodeState.DONE, EpisodeState.FAILED}),
        EpisodeState.DONE: frozenset({EpisodeState.FAILED}),
        EpisodeState.FAILED: frozenset(),
    },
    EngineState: {
        EngineState.READY: frozenset(
            {EngineState.DOWN, EngineState.DRAINING, EngineState.DRAINED, EngineState.QUARANTINED, EngineState.REMOVED}
        ),
        EngineState.DOWN: frozenset(
            {EngineState.READY, EngineState.DRAINED, EngineState.QUARANTINED, EngineState.REMOVED}
        ),
        EngineState.DRAINING: frozenset(
            {EngineState.READY, EngineState.DOWN, EngineState.DRAINED, EngineState.QUARANTINED, EngineState.REMOVED}
        ),
        EngineState.DRAINED: frozenset({EngineState.DOWN, EngineState.REMOVED}),
        EngineState.QUARANTINED: frozenset({EngineState.READY, EngineState.DRAINED, EngineState.REMOVED}),
        EngineState.REMOVED: frozenset({EngineState.DOWN}),
    },
    EvaluationState: {
        EvaluationState.RUNNING: frozenset(
            {EvaluationState.COMPLETED, EvaluationState.FAILED, EvaluationState.CANCELLED}
        ),
        EvaluationState.COMPLETED: frozenset(),
        EvaluationState.FAILED: frozenset(),
        EvaluationState.CANCELLED: frozenset(),
    },
    BatchState: {
        BatchState.LEASED: frozenset({BatchState.COMMITTED, BatchState.ABANDONED}),
        BatchState.COMMITTED: frozenset(),
        BatchState.ABANDONED: frozenset(),
    },
    PublicationState: {
        PublicationState.LOADING: frozenset(
            {PublicationState.VERIFIED, PublicationState.UNVERIFIED, PublicationState.FAILED}
        ),
        PublicationState.VERIFIED: frozenset({PublicationState.LOADING}),
        PublicationState.UNVERIFIED: frozenset({PublicationState.LOADING}),
        PublicationState.FAILED: frozenset({PublicationState.LOADING}),
    },
}
"""Kind → state → where it may go. By kind, since states of two kinds that are spelt alike are equal strings."""


class IllegalTransition(ValueError):
    """A state change that no arrow of the table allows."""


LIVE_RUNS: Final = tuple(state for state in RunState if TRANSITIONS[RunState][state])
"""States that an arrow leads out of: the run has not ended."""


def is_live(state: RunState) -> bool:
    return state in LIVE_RUNS


def sources(new: StrEnum) -> frozenset[StrEnum]:
    """The states of the same kind from which `new` may be reached."""
    return frozenset(old for old, targets in TRANSITIONS[type(new)].items() if new in targets)


def check_transition(old: StrEnum, new: StrEnum) -> None:
    """Raise IllegalTransition unless `old` → `new` is an arrow. Staying where one is is not a change."""
    if type(old) is not type(new) or new not in TRANSITIONS[type(old)][old]:
        raise IllegalTransition(f"{type(old).__name__} cannot go from {old} to {new}")
