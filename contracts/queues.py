"""Task queues, each named once: a typo in a queue's name is a silent wait for a worker that does not exist."""

from enum import StrEnum
from typing import Final

WORKFLOWS: Final = "atropos"
"""Workflows, and the local activities they run. The queue people name when they start a run by hand."""
CONTROL: Final = "atropos-control"
"""Admission, reconciliation, sealing: short database work."""
MODEL: Final = "atropos-model"
"""Model calls: many at once, each waiting for an engine."""
TOOLS: Final = "atropos-tools"
"""Tools and scorers in killable processes, and local activities that fell back."""

TRAINER: Final = "atropos-trainer"
"""Train steps, one at a time in a worker: whoever serves it has torch and the memory."""


class WorkerRole(StrEnum):
    """What a worker process serves (`atropos-worker --roles`)."""

    WORKFLOWS = "workflows"
    CONTROL = "control"
    MODEL = "model"
    TOOLS = "tools"
    TRAINER = "trainer"


QUEUE_OF: Final[dict[WorkerRole, str]] = {
    WorkerRole.WORKFLOWS: WORKFLOWS,
    WorkerRole.CONTROL: CONTROL,
    WorkerRole.MODEL: MODEL,
    WorkerRole.TOOLS: TOOLS,
    WorkerRole.TRAINER: TRAINER,
}
