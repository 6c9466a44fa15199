"""Which component dies when: a function of the seed and of how many steps there are.

Invariant: every cell is killed exactly once, in an order and at train steps that the seed alone decides, and no two at
the same step where there are steps enough; so what a kill does can be told from what the one before it did.
"""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Component(StrEnum):
    """What can be killed."""

    ACTIVITY_WORKER = "activity worker"
    WORKFLOW_WORKER = "workflow worker"
    TRAINER_WORKER = "trainer worker"
    ENGINE = "engine"
    TEMPORAL = "temporal"
    POSTGRES = "postgres"


class Moment(StrEnum):
    """What it must be in the middle of."""

    SAMPLING = "sampling"
    """Tokens are sampled and not stored."""
    TASK = "workflow task"
    BETWEEN = "local activity done, its workflow task not"
    STEP = "train step"
    PENDING = "activities pending"
    TRANSACTION = "transaction"


@dataclass(frozen=True)
class Cell:
    """A component at a moment. `part`: its name in the dev stack."""

    component: Component
    moment: Moment
    part: str


CELLS: Final = (
    Cell(Component.ACTIVITY_WORKER, Moment.SAMPLING, "worker-activities"),
    Cell(Component.WORKFLOW_WORKER, Moment.TASK, "worker-workflows"),
    Cell(Component.WORKFLOW_WORKER, Moment.BETWEEN, "worker-workflows"),
    Cell(Component.TRAINER_WORKER, Moment.STEP, "worker-trainer"),
    Cell(Component.ENGINE, Moment.SAMPLING, "engine"),
    Cell(Component.TEMPORAL, Moment.PENDING, "temporal"),
    Cell(Component.POSTGRES, Moment.TRANSACTION, "postgres"),
)
_QUIET: Final = 6
"""Steps at the end without a new kill, so that the last one is recovered from while there is work to do."""


@dataclass(frozen=True)
class Planned:
    """A cell, to be killed at the first chance once `step` steps are committed."""

    cell: Cell
    step: int
    delay: float
    """Of how long the component usually is at it, the part to wait before the first try; 0 to 1."""


def plan(seed: int, steps: int) -> list[Planned]:
    """The kills of a run of `steps` train steps, in order."""
    chance = random.Random(f"kills of {seed}")
    cells = list(CELLS)
    chance.shuffle(cells)
    first, last = min(1, steps - 1), max(1, steps - _QUIET)
    starts = [first + (last - first) * number // len(cells) for number in range(len(cells) + 1)]
    return [
        Planned(cell, chance.randrange(start, max(end, start + 1)), chance.random())
        for cell, start, end in zip(cells, starts, starts[1:], strict=False)
    ]
