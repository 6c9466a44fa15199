"""Register, admit, reconcile and end a run: the control plane over the rows.

Invariant: a run file is accepted whole (environments load, the tokenizer loads, judges exist) or refused with
sentences, before a row is written. What is admitted, started or closed is decided by rows under the run row's lock.
"""

import asyncio

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from ..contracts.activities import (
    ADMIT_GROUPS,
    CANCEL_GROUPS,
    RECONCILE,
    REGISTER_RUN,
    SET_RUN_STATE,
    TUNE_RUN,
    Admission,
    GroupStart,
    Reconcile,
    Reconciled,
    RegisterRun,
    RunPlan,
    RunRef,
    SetRunState,
    TuneRun,
)
from ..contracts.reasons import FailureKind
from ..contracts.runfile import EnvironmentConfig, RunConfig, RunFileError, parse_run
from ..contracts.states import LONGEST_REASON, GroupState, RunState, is_live
from ..contracts.text import shortened
from ..db.errors import RunExists
from ..db.events import add_event
from ..db.groups import GroupRow, close_group, fail_orphans, failing_streak, open_groups
from ..db.registration import register_run
from ..db.runs import NewEnvironment, RunRow, get_run, set_run_state, set_waiting, tune_run
from ..environments.faults import EnvironmentProblem
from ..environments.loaded import LoadedEnvironment
from ..environments.splits import check_disjoint, require_size
from ..inference.engines import why_not_sampled
from ..inference.tokens import TokensError, load_renderer
from .admission import PAGE, admit_some, engine_outage
from .entry import entered
from .failures import bad_run_file, final
from .services import Services

OUTAGE_AGAIN_S = 2.0
"""An engine that returned is found within this."""
_LOOK_AGAIN_S = 60.0
_FULL_AGAIN_S = 15.0
"""While all that may run is in flight: an outage that keeps it there is told within this."""
_STREAK = 8
"""As many failed groups in a row (or as many as are in flight, where those are more) pause a run."""
_NO_TASKS = "the tasks drawn last are in quarantine or held out for evaluation; later ones are being drawn"
_PACE_S = 0.2
"""Between two pages, while there is room for more."""


class RunActivities:
    """Activities of the `control` role."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=REGISTER_RUN.name)
    @entered
    async def register_run(self, request: RegisterRun) -> RunPlan:
        try:
            config = parse_run(request.document)
            problems = why_not_sampled(config)
            if problems:
                raise RunFileError(problems)
            chosen = [await self._environment(request.run_id, config, one) for one in config.environments]
            if config.tokens:
                await asyncio.to_thread(load_renderer, config.model)
            row = await register_run(self._services.store, request.run_id, config, chosen)
        except (RunFileError, EnvironmentProblem, TokensError, RunExists) as error:
            raise bad_run_file(str(error)) from error
        return RunPlan(
            name=config.name,
            state=row.state,
            trainer=config.trainer.kind,
            evaluations_at_start=tuple(config.evaluations("start")),
            evaluations_at_end=tuple(config.evaluations("end")),
        )

    async def _environment(self, run_id: str, config: RunConfig, chosen: EnvironmentConfig) -> NewEnvironment:
        """Load it, and prove that what is evaluated on is never trained on, before a row is written."""
        loaded = await self._services.load(run_id, config, chosen.label)
        loaded.check_judges(config.judges)
        await check_disjoint(loaded)
        await require_size(loaded, "train", 1)
        for wanted in config.eval.sets:
            if config.environment(wanted.id) is chosen:
                await require_size(loaded, wanted.split, wanted.tasks)
        return NewEnvironment(
            label=chosen.label,
            ref=chosen.id,
            version=loaded.spec.version,
            args=dict(chosen.args),
            group_size=chosen.group_size,
            weight=chosen.weight,
            limits=loaded.spec.limits.tightened(chosen.limits),
        )

    @activity.defn(name=ADMIT_GROUPS.name)
    @entered
    async def admit_groups(self, request: RunRef) -> Admission:
        services = self._services
        row = await get_run(services.store, request.run_id)
        if row is None or not is_live(row.state):
            return Admission(done=True)
        if row.state is RunState.PAUSED:
            reason = row.reason or "paused"
            await set_waiting(services.store, request.run_id, reason, RunState.PAUSED)
            open_now = await open_groups(services.store, request.run_id)
            return Admission(open=len(open_now), waiting_for=reason, again_s=_LOOK_AGAIN_S)
        outage = await engine_outage(services, request.run_id)
        if outage is not None:
            await set_waiting(services.store, request.run_id, outage)
            return Admission(waiting_for=outage, again_s=OUTAGE_AGAIN_S)
        streak = await failing_streak(services.store, row.run_id, max(_STREAK, row.concurrency), row.changed_at)
        if streak is not None:
            return await self._pause(row, streak)
        try:
            admitted = await admit_some(services, row)
        except EnvironmentProblem as problem:
            return await self._pause(row, str(problem))
        waiting_for = _NO_TASKS if admitted.fruitless else admitted.waiting_for
        await set_waiting(services.store, request.run_id, waiting_for)
        groups = admitted.groups
        if activity.info().attempt > 1:  # an earlier try may have admitted some and died before it could say so
            found = await open_groups(services.store, request.run_id)
            waiting = [group for group in found if group.state is GroupState.ADMITTED and group.evaluation is None]
            groups = waiting[-2 * PAGE :]
        starts = [await self._start(row.config, group) for group in groups]
        again_s = OUTAGE_AGAIN_S if admitted.fruitless else _PACE_S if admitted.more else _FULL_AGAIN_S
        return Admission(
            groups=tuple(starts),
            open=admitted.open,
            done=admitted.done,
            waiting_for=admitted.waiting_for,
            again_s=again_s,
        )

    async def _pause(self, row: RunRow, reason: str) -> Admission:
        """A run that cannot go on by itself waits for a person, and says so, instead of burning tokens for ever."""
        store = self._services.store
        await set_run_state(store, row.run_id, RunState.PAUSED, reason)
        await set_waiting(store, row.run_id, reason, RunState.PAUSED)
        await add_event(store, row.run_id, "paused", reason)
        return Admission(open=len(await open_groups(store, row.run_id)), waiting_for=reason, again_s=_LOOK_AGAIN_S)

    async def _start(self, config: RunConfig, group: GroupRow) -> GroupStart:
        environment = await self._services.environment(group.key.run_id, group.environment)
        return group_start(config, group, environment)

    @activity.defn(name=RECONCILE.name)
    @entered
    async def reconcile(self, request: Reconcile) -> Reconciled:
        """Hold every open group against Temporal: start what nobody works on, close what ended without a word."""
        services = self._services
        row = await get_run(services.store, request.run_id)
        if row is None:
            return Reconciled()
        starts: list[GroupStart] = []
        closed = 0
        for group in await open_groups(services.store, request.run_id):
            if group.evaluation != request.evaluation:
                continue
            status = await workflow_status(services.client, group.key.workflow_id)
            if status is None and is_live(row.state):
                starts.append(await self._start(row.config, group))
            elif status is not WorkflowExecutionStatus.RUNNING:
                await self._close_orphan(row.state, group, status)
                closed += 1
        return Reconciled(started=tuple(starts), closed=closed)

    async def _close_orphan(self, run: RunState, group: GroupRow, status: WorkflowExecutionStatus | None) -> None:
        """Close a group that no workflow will close. The task is not to blame and stays in the draw."""
        store = self._services.store
        if not is_live(run):
            await close_group(store, group.key, [], GroupState.FAILED, FailureKind.CANCELLED, f"the run is {run}")
        else:
            word = "was lost" if status is None else f"ended as {status.name.lower()} without closing it"
            await fail_orphans(store, [group.key], f"its workflow {word}")

    @activity.defn(name=SET_RUN_STATE.name)
    @entered
    async def set_run_state(self, request: SetRunState) -> RunState:
        row = await get_run(self._services.store, request.run_id)
        if row is None:
            raise final(FailureKind.INFRASTRUCTURE, f"the store has no run {request.run_id}")
        if not is_live(row.state):
            return row.state
        reason = request.reason
        if reason is not None and request.state in (RunState.PAUSED, RunState.CANCELLED):
            reason = shortened(reason, LONGEST_REASON)  # a person's, and whoever updates a workflow can say any length
        state = await set_run_state(self._services.store, request.run_id, request.state, reason)
        await set_waiting(self._services.store, request.run_id, reason if state is RunState.PAUSED else None, state)
        return state

    @activity.defn(name=TUNE_RUN.name)
    @entered
    async def tune_run(self, request: TuneRun) -> RunState:
        row = await get_run(self._services.store, request.run_id)
        if row is None:
            raise final(FailureKind.INFRASTRUCTURE, f"the store has no run {request.run_id}")
        unknown = sorted(set(request.weights) - set(row.weights))
        if unknown:
            raise bad_run_file(f"no environment {unknown[0]!r} in this run; known: {', '.join(row.weights)}")
        await tune_run(self._services.store, request.run_id, concurrency=request.concurrency, weights=request.weights)
        return row.state

    @activity.defn(name=CANCEL_GROUPS.name)
    @entered
    async def cancel_groups(self, request: RunRef) -> int:
        return await cancel_open_groups(self._services, request.run_id)


async def cancel_open_groups(services: Services, run_id: str) -> int:
    """Cancel the workflow of every open group by id, and close those that have none. Returns how many were open."""
    groups = await open_groups(services.store, run_id)
    for group in groups:
        try:
            await services.client.get_workflow_handle(group.key.workflow_id).cancel()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            await close_group(services.store, group.key, [], GroupState.FAILED, FailureKind.CANCELLED, "cancelled")
    return len(groups)


async def workflow_status(client: Client, workflow_id: str) -> WorkflowExecutionStatus | None:
    """What Temporal says of a workflow; None where it does not know it."""
    try:
        description = await client.get_workflow_handle(workflow_id).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise
    return description.status


def group_start(config: RunConfig, group: GroupRow, environment: LoadedEnvironment) -> GroupStart:
    """How an admitted group is to be started."""
    spec = environment.spec
    return GroupStart(
        key=group.key,
        environment=group.environment,
        task_key=group.task_key,
        size=group.size,
        min_valid=1 if group.evaluation is not None else min(config.group.min_valid, group.size),
        top_up=config.group.top_up,
        group_scorer_at=spec.group_scorer_at,
        start_at=spec.start_at,
        evaluation=group.evaluation is not None,
    )
