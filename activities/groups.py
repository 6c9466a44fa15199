"""Score a group together, and seal it in one transaction.

Invariant: group rewards see valid members only and are written under the same keys as a member's own scores, so
scoring twice is scoring once. A judge that does not answer leaves its part unscored; it never becomes 0.
"""

from functools import partial

from temporalio import activity

from ..contracts.activities import CLOSE_GROUP, SCORE_GROUP, CloseGroup, GroupResult, ScoreGroup
from ..contracts.episode import Score
from ..contracts.reasons import FailureKind, RunAt
from ..contracts.states import GroupState
from ..contracts.workflows import GROUP_CLOSED
from ..db.deaths import InlineCall
from ..db.episodes import episode_scores, episode_view, load_episode, save_scores
from ..db.groups import close_group, load_group, open_groups
from ..db.tasks import load_task
from ..trainer.advantages import has_signal
from .entry import entered
from .failures import final
from .services import Services
from .waking import wake


class GroupActivities:
    """Activities of the `workflows` role (as local ones), of `tools` and of `control`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=SCORE_GROUP.name)
    @entered
    async def score_group(self, request: ScoreGroup) -> int:
        store = self._services.store
        group = (await load_group(store, request.key)).group
        stored = await load_task(store, request.key.run_id, group.environment, group.task_key)
        run = await self._services.run(request.key.run_id)
        environment = await self._services.environment(request.key.run_id, group.environment)
        episodes = []
        for key in request.members:
            facts = await load_episode(store, key)
            if facts is None:
                raise final(FailureKind.INFRASTRUCTURE, f"the store has no episode {key.workflow_id}")
            episodes.append(episode_view(facts, tuple(await episode_scores(store, key))))
        task = await environment.task_from_data(stored.data, stored.info)
        scorers, pool = environment.spec.group_scorers, self._services.processes
        names = " and ".join(scorer.name for scorer in scorers)
        code = InlineCall(request.key.run_id, request.key.workflow_id, "score", f"{group.environment}.{names}")
        inline = any(scorer.plan.run is RunAt.INLINE for scorer in scorers)
        async with self._services.inline.running(code, RunAt.INLINE if inline else None) as apart:
            parts = await environment.score_group(task, episodes, run.judge, pool=pool, apart=apart)
        weights = {scorer.name: scorer.weight for scorer in scorers}
        for position, key in enumerate(request.members):
            scores = [Score(name=name, value=values[position], weight=weights[name]) for name, values in parts.items()]
            await save_scores(store, key, scores, environment.spec.version)
        return len(parts) * len(episodes)

    @activity.defn(name=CLOSE_GROUP.name)
    @entered
    async def close_group(self, request: CloseGroup) -> GroupResult:
        config = (await self._services.run(request.key.run_id)).config
        trains = config.trains and not request.evaluation
        result = await close_group(
            self._services.store,
            request.key,
            list(request.members),
            GroupState.SEALED if request.failure is None else GroupState.FAILED,
            request.failure,
            request.reason,
            min_valid=min(config.group.min_valid, len(request.members)) if trains else 1,
            has_signal=partial(has_signal, config.trainer.preset) if trains else None,
        )
        if request.tell is not None and (trains or request.evaluation or await self._concerns_all(request)):
            await wake(self._services, request.tell, GROUP_CLOSED, request.key.group_no)
        return result

    async def _concerns_all(self, request: CloseGroup) -> bool:
        """Whether a group without trainer is to be replaced, or was the last; of the rest its episodes have told."""
        return request.failure is not None or not await open_groups(self._services.store, request.key.run_id)
