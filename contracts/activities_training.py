"""The activities of training and publishing, in the same typed table as the others.

Invariant: as in `activities`. A trainer is told a batch by its number; what is in it, and which weights to begin from,
it reads from rows.
"""

from datetime import timedelta
from typing import Final

from . import queues
from .activities import Activity, RunRef
from .base import Wire


class TrainingPlan(Wire):
    """What the trainer's workflow needs to know."""

    version: int
    """The newest version there is."""
    evaluations: tuple[str, ...] = ()
    """Evaluations between steps that run; their workflows may have been lost."""


class Lease(Wire):
    """The next batch, or why there is none."""

    batch_no: int | None = None
    step: int = 0
    groups: int = 0
    waiting_for: str | None = None
    """In words for people."""
    done: bool = False
    """No further step is to be taken."""


class BatchRef(Wire):
    run_id: str
    batch_no: int


class StepResult(Wire):
    """A committed train step, or that there is none: somebody abandoned its batch."""

    step: int
    version: int | None
    """None: the batch was abandoned and its groups are free for the next one."""
    loss: float | None = None
    reward: float | None = None
    """Mean over the scored episodes that were closed since the step before, filtered groups included."""
    evaluations: tuple[str, ...] = ()
    """Names of the evaluations that are due at this version."""


class Publish(Wire):
    """Bring the run's engines to the version they should hold, and keep them there for a while."""

    run_id: str
    known: int = -1
    """The version last heard of as published: the call returns early where another one is."""


class Published(Wire):
    version: int | None = None
    """Held by every engine that could be reached; None: by none of them yet."""
    problem: str | None = None
    """What is wrong with an engine, in words; None: nothing."""
    ended: bool = False
    """The run has ended: nothing is left to keep."""


PREPARE_TRAINING: Final = Activity(
    "prepare_training",
    RunRef,
    TrainingPlan,
    queues.TRAINER,
    timeout=timedelta(hours=2),
    heartbeat=timedelta(seconds=4),
)
"""Loads the weights that the run begins with and writes version 0, unless it is there."""
LEASE_BATCH: Final = Activity(
    "lease_batch", RunRef, Lease, queues.CONTROL, timeout=timedelta(minutes=2), heartbeat=timedelta(seconds=5)
)
"""Waits up to half a minute for a batch."""
TRAIN_STEP: Final = Activity(
    "train_step", BatchRef, StepResult, queues.TRAINER, timeout=timedelta(hours=12), heartbeat=timedelta(seconds=4)
)
"""A trainer that dies is noticed within its heartbeat; one that only seems dead is fenced off and commits nothing."""
PUBLISH: Final = Activity(
    "publish", Publish, Published, queues.CONTROL, timeout=timedelta(hours=1), heartbeat=timedelta(seconds=5)
)
"""Returns where something changed, else after half a minute."""
