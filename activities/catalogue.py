"""Which activities a worker of each role serves.

Invariant: every activity of `contracts` is served on its queue, and those that may run locally also beside
the workflows; a test checks both.
"""

from collections.abc import Callable
from typing import Any

from ..contracts.queues import WorkerRole
from .episodes import EpisodeActivities
from .evaluations import EvaluationActivities
from .groups import GroupActivities
from .publishing import PublishingActivities
from .rescoring import RescoringActivities
from .runs import RunActivities
from .sampling import ModelActivities
from .services import Services
from .training import LeaseActivities, TrainingActivities


def activities_of(role: WorkerRole, services: Services) -> list[Callable[..., Any]]:
    """The activities to register for `role`."""
    episodes, groups = EpisodeActivities(services), GroupActivities(services)
    training, rescoring = TrainingActivities(services), RescoringActivities(services)
    runs, evaluations = RunActivities(services), EvaluationActivities(services)
    served: dict[WorkerRole, list[Callable[..., Any]]] = {
        WorkerRole.WORKFLOWS: [
            episodes.start_episode,
            episodes.answer_turn,
            episodes.finish_episode,
            groups.score_group,
            groups.close_group,
        ],
        WorkerRole.MODEL: [ModelActivities(services).sample_turn],
        WorkerRole.TOOLS: [
            episodes.start_episode,
            episodes.answer_turn,
            episodes.run_tool,
            episodes.score_episode,
            episodes.finish_episode,
            groups.score_group,
            rescoring.next_rescored_groups,
            rescoring.rescore_group,
            rescoring.end_rescoring,
        ],
        WorkerRole.CONTROL: [
            runs.register_run,
            runs.admit_groups,
            runs.reconcile,
            runs.set_run_state,
            runs.tune_run,
            runs.cancel_groups,
            groups.close_group,
            evaluations.start_evaluation,
            evaluations.next_evaluation_groups,
            evaluations.finish_evaluation,
            LeaseActivities(services).lease_batch,
            PublishingActivities(services).publish,
        ],
        WorkerRole.TRAINER: [training.prepare_training, training.train_step],
    }
    return served[role]
