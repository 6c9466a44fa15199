"""Scoring stored episodes again: what is asked for, and the two activities that do it.

Invariant: a rescoring is a walk over closed groups in the order of their numbers. All that it needs to go on after a
restart is in its input: which scorers, as which version, and behind which group.
"""

from datetime import timedelta
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from . import queues
from .activities import Activity
from .base import Wire
from .ids import GroupKey

RESCORE_WORKFLOW: Final = "RescoreWorkflow"
LONGEST_VERSION: Final = 100
"""Characters of a scorer's version."""

BY_ORDER: Final = ("first", "latest")
"""Words for the order in which versions were written, where a version is to be chosen."""


def _is_a_name(version: str) -> str:
    if version in BY_ORDER:
        raise ValueError("it says which version was written when")
    return version


Version = Annotated[
    str,
    Field(min_length=1, max_length=LONGEST_VERSION, pattern=r"^[^\s\x00-\x1f\x7f]+$"),
    AfterValidator(_is_a_name),
]


class Rescoring(Wire):
    """Which scorers of which environment, over which episodes of a run."""

    run_id: str
    environment: str
    """The run's label of it."""
    code: str | None = None
    """Another environment whose scorers are applied, as in a run file (`id`); None: the run's own."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `code`."""
    scorers: tuple[str, ...] = ()
    """Names of rewards, metrics and group rewards; empty: all of them."""
    version: Version | None = None
    """What the scores are written under; None: the environment's version."""
    unscored: bool = False
    """Only episodes that have no reward."""


class Rescored(Wire):
    """What came of episodes so far; each is counted once for each scorer."""

    written: int = 0
    """Scores that were stored."""
    known: int = 0
    """Scores that this version had given already."""
    unscored: int = 0
    """No value: a judge is away, or a group is too small."""
    failed: int = 0
    """The scorer raised, or cannot read the stored task."""
    leased: int = 0
    """Groups that are being trained on, whose scores may not change now."""
    groups: int = 0
    reason: str | None = None
    """Why the first one failed (preview)."""

    def __add__(self, other: "Rescored") -> "Rescored":
        return Rescored(
            written=self.written + other.written,
            known=self.known + other.known,
            unscored=self.unscored + other.unscored,
            failed=self.failed + other.failed,
            leased=self.leased + other.leased,
            groups=self.groups + other.groups,
            reason=self.reason or other.reason,
        )


class RescoreInput(Wire):
    """The workflow's input. `after` and `so_far`: what an earlier part of its history did."""

    rescoring: Rescoring
    after: int = -1
    so_far: Rescored = Rescored()


class RescorePage(Wire):
    """Asks for the next groups behind `after`; `begin`: check and note down first what is about to happen."""

    rescoring: Rescoring
    after: int
    begin: bool = False


class GroupNumbers(Wire):
    """`total`: groups of the whole rescoring, counted where it begins."""

    groups: tuple[int, ...]
    version: str
    total: int | None = None


class RescoreGroup(Wire):
    key: GroupKey
    rescoring: Rescoring
    version: str


class RescoreEnd(Wire):
    rescoring: Rescoring
    version: str
    outcome: Rescored


class RescoreProgress(Wire):
    """Answer of the query `progress`."""

    version: str | None
    total: int | None
    so_far: Rescored


NEXT_GROUPS: Final = Activity(
    "next_rescored_groups",
    RescorePage,
    GroupNumbers,
    queues.TOOLS,
    timeout=timedelta(minutes=10),
    heartbeat=timedelta(seconds=5),
)
RESCORE_GROUP: Final = Activity(
    "rescore_group",
    RescoreGroup,
    Rescored,
    queues.TOOLS,
    timeout=timedelta(hours=1),
    heartbeat=timedelta(seconds=5),
)
END_RESCORING: Final = Activity("end_rescoring", RescoreEnd, Rescored, queues.TOOLS)
