"""Draw an evaluation's tasks, hand out its groups, sum it up.

Invariant: the tasks of an evaluation are the first n of its split, whatever the seed, and are rows before the first is
sampled: two evaluations of one set compare the same tasks, and an interrupted one resumes with what is missing.
"""

from temporalio import activity

from ..contracts.activities import (
    FINISH_EVALUATION,
    NEXT_EVALUATION_GROUPS,
    START_EVALUATION,
    EvaluationOutcome,
    EvaluationPage,
    EvaluationRef,
    GroupStart,
    NextEvaluationGroups,
)
from ..contracts.reasons import FailureKind
from ..contracts.records import NewGroup
from ..contracts.runfile import EvalSet, RunConfig, evaluated_version
from ..contracts.states import EvaluationState, RunState, is_live
from ..db.admission import insert_evaluation_groups
from ..db.engines import versions
from ..db.evaluations import evaluation_groups, finish_evaluation, get_evaluation, start_evaluation
from ..db.groups import GroupRow
from ..db.publishing import wanted
from ..db.runs import RunRow, get_run, set_waiting
from ..environments.loaded import LoadedEnvironment
from .admission import engine_outage
from .entry import entered
from .failures import final, waited_out
from .runs import OUTAGE_AGAIN_S, group_start
from .services import Services

EVALUATION_PAGE = 16
"""Groups handed out at once; they are small."""


class EvaluationActivities:
    """Activities of the `control` role."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=START_EVALUATION.name)
    @entered
    async def start_evaluation(self, request: EvaluationRef) -> EvaluationOutcome:
        run = await self._services.run(request.run_id)
        chosen = _set(run.config, request.name)
        label = run.config.environment(chosen.id).label
        environment = await self._services.environment(request.run_id, label)
        groups = await draw(environment, label, chosen, request.name)
        row = await start_evaluation(
            self._services.store,
            request.run_id,
            request.name,
            environment=label,
            split=chosen.split,
            tasks=len(groups),
            samples=chosen.samples,
            sampling=run.config.sampling_for(request.name),
            policy_version=await self._version(run.config, request),
        )
        if row.state is EvaluationState.RUNNING:
            await insert_evaluation_groups(self._services.store, request.run_id, request.name, groups)
        return row.outcome

    async def _version(self, config: RunConfig, request: EvaluationRef) -> int | None:
        """The version to pin it to: what its name says, else the newest. None where nobody trains."""
        if not config.trains:
            return None
        named = evaluated_version(request.name)
        if named is not None:
            return named
        newest = max((await versions(self._services.store, request.run_id)).values(), default=None)
        if newest is None and config.trains:
            raise waited_out("NoVersion", "the trainer has not loaded the first weights yet")
        return newest

    @activity.defn(name=NEXT_EVALUATION_GROUPS.name)
    @entered
    async def next_evaluation_groups(self, request: NextEvaluationGroups) -> EvaluationPage:
        store = self._services.store
        row = await get_run(store, request.run_id)
        if row is None or not is_live(row.state):
            return EvaluationPage()
        waiting = await evaluation_groups(store, request.run_id, request.name)
        fresh = [group for group in waiting if group.key.group_no not in set(request.running)]
        if row.state is RunState.PAUSED:
            return EvaluationPage(open=len(waiting))
        outage = await self._outage(request) if fresh else None
        await set_waiting(store, request.run_id, outage)
        if outage is not None:
            return EvaluationPage(open=len(waiting), again_s=OUTAGE_AGAIN_S)
        room = max(0, at_once(row, fresh[0].size if fresh else 1) - len(request.running))
        starts = [await self._start(row.config, group) for group in fresh[: min(room, EVALUATION_PAGE)]]
        return EvaluationPage(groups=tuple(starts), open=len(waiting))

    async def _outage(self, request: NextEvaluationGroups) -> str | None:
        """Why no episode of the evaluation can be sampled now, in words."""
        store = self._services.store
        pinned = (await get_evaluation(store, request.run_id, request.name)).policy_version
        if pinned is not None:
            held = await wanted(store, request.run_id)
            if held is None or held.version != pinned or not held.published:
                return f"version {pinned} is on its way to the engines"
        return await engine_outage(self._services, request.run_id)

    async def _start(self, config: RunConfig, group: GroupRow) -> GroupStart:
        environment = await self._services.environment(group.key.run_id, group.environment)
        return group_start(config, group, environment)

    @activity.defn(name=FINISH_EVALUATION.name)
    @entered
    async def finish_evaluation(self, request: EvaluationRef) -> EvaluationOutcome:
        row = await get_run(self._services.store, request.run_id)
        over = row is None or not is_live(row.state)
        state = EvaluationState.CANCELLED if over else EvaluationState.COMPLETED
        return await finish_evaluation(self._services.store, request.run_id, request.name, state)


def at_once(row: RunRow, samples: int) -> int:
    """Groups of an evaluation in flight at once: as many episodes as training has, in smaller groups."""
    largest = max(environment.group_size for environment in row.config.environments)
    return max(1, row.concurrency * largest // samples)


def _set(config: RunConfig, name: str) -> EvalSet:
    chosen = config.evaluation_set(name)
    if chosen is None:
        raise final(FailureKind.INFRASTRUCTURE, f"the run has no evaluation {name!r}")
    return chosen


async def draw(environment: LoadedEnvironment, label: str, chosen: EvalSet, name: str) -> list[NewGroup]:
    """The first tasks of the split, one group each; fewer where the split has fewer."""
    size = await environment.size(chosen.split)
    tasks = [
        await environment.make_task(chosen.split, index) for index in range(min(chosen.tasks, size or chosen.tasks))
    ]
    return [
        NewGroup(
            environment=label,
            split=chosen.split,
            task_key=task.key,
            task_data=task.plain_data(),
            task_info=dict(task.info),
            draw=position,
            size=chosen.samples,
            evaluation=name,
        )
        for position, task in enumerate(tasks)
    ]
