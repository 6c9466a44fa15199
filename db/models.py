"""Every table of the store, in one list. Its columns and promises are in `models_run` and `models_episode`."""

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

__all__ = [
    "Base",
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
    "Run",
    "ScoreRow",
    "SegmentRow",
    "TaskRow",
    "ToolCallRow",
    "TurnRow",
]
