"""Every table of the store, in one list. Its columns and promises are in `models_run`,
`models_episode` and `models_train`."""

from .base import Base
from .models_episode import (
    Blob,
    EpisodeRow,
    EvaluationSample,
    LateResult,
    PartialTurnRow,
    ScoreRow,
    SegmentRow,
    ToolCallRow,
    TurnRow,
)
from .models_run import Engine, EnvironmentRow, Evaluation, Event, Group, PolicyVersion, Run, TaskRow
from .models_train import Batch, BatchGroup, Publication, TrainStep

__all__ = [
    "Base",
    "Batch",
    "BatchGroup",
    "Blob",
    "Engine",
    "EnvironmentRow",
    "EpisodeRow",
    "Evaluation",
    "EvaluationSample",
    "Event",
    "Group",
    "LateResult",
    "PartialTurnRow",
    "PolicyVersion",
    "Publication",
    "Run",
    "ScoreRow",
    "SegmentRow",
    "TaskRow",
    "ToolCallRow",
    "TrainStep",
    "TurnRow",
]
