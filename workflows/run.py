"""A run: validate its file, write its row, supervise evaluations and rollout, end it.

Invariant: the run file is validated by the first activity, so a bad one fails this workflow at once with sentences for
people. Pause, resume and cancel change the run's row first and wake others after, since rows decide.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, is_cancelled_exception

from ..contracts import activities as act
from ..contracts import search
from ..contracts.activities import BAD_RUN_FILE, EvaluationOutcome, RunPlan
from ..contracts.ids import evaluation_workflow_id, rollout_workflow_id, trainer_workflow_id
from ..contracts.queues import WORKFLOWS
from ..contracts.states import RunState
from ..contracts.training import TrainerKind
from ..contracts.workflows import (
    EVALUATION_WORKFLOW,
    ROLLOUT_WORKFLOW,
    RUN_WORKFLOW,
    TRAINED,
    TRAINER_WORKFLOW,
    WAKE,
    EvaluationInput,
    RolloutInput,
    RunProgress,
    RunResult,
    TrainerInput,
)
from .calls import root_cause, scheduled
from .group import search_attributes


@workflow.defn(name=RUN_WORKFLOW)
class RunWorkflow:
    @workflow.init
    def __init__(self, *documents: Any) -> None:
        self._id = workflow.info().workflow_id
        self._phase = "validating the run file"
        self._children: list[str] = []
        self._trained = False

    @workflow.run
    async def run(self, *documents: Any) -> RunResult:
        if len(documents) > 1:  # a signature of one would fail to decode, for ever
            raise ApplicationError(
                f"a run has one input, its run file; {len(documents)} were given", type=BAD_RUN_FILE, non_retryable=True
            )
        plan = await self._register(documents[0] if documents else None)
        workflow.upsert_search_attributes([SearchAttributeKey.for_keyword(search.RUN).value_set(self._id)])
        trains = plan.trainer is not TrainerKind.NONE
        trainer = asyncio.create_task(self._train(plan)) if trains else None
        try:
            outcomes = await self._until_failure(self._play(plan), trainer)
        except BaseException as error:
            if is_cancelled_exception(error):
                await self._end(RunState.CANCELLED, "its workflow was cancelled")
            elif isinstance(error, FailureError):
                await self._end(RunState.FAILED, root_cause(error))
            raise
        state = await self._end(RunState.COMPLETED, None)
        if trainer is not None:
            await trainer
        return RunResult(run_id=self._id, state=state, evaluations=tuple(outcomes))

    async def _register(self, document: Any) -> RunPlan:
        argument = act.RegisterRun(run_id=self._id, document=document)
        try:
            plan = await scheduled(act.REGISTER_RUN, argument, summary="validate", outlived=False)
            if workflow.cancellation_reason() is not None:  # it came when the row was as good as written
                raise asyncio.CancelledError
        except BaseException as error:
            if is_cancelled_exception(error):
                await self._leave_no_open_row()
            cause = error.cause if isinstance(error, ActivityError) else None
            if isinstance(cause, ApplicationError) and cause.type == BAD_RUN_FILE:
                raise ApplicationError(cause.message, type=BAD_RUN_FILE, non_retryable=True) from None
            raise
        return plan

    async def _leave_no_open_row(self) -> None:
        """The row may have been written while the cancel was on its way."""
        try:
            await self._set(RunState.CANCELLED, "its workflow was cancelled")
        except FailureError:
            workflow.logger.info("%s was cancelled before it was registered", self._id)

    async def _play(self, plan: RunPlan) -> list[EvaluationOutcome]:
        """Everything that a run consists of, beside its training."""
        outcomes = await self._evaluate(plan.evaluations_at_start)
        self._phase = "rollouts" if plan.trainer is TrainerKind.NONE else "training"
        await self._child(ROLLOUT_WORKFLOW, RolloutInput(run_id=self._id), rollout_workflow_id(self._id), None)
        if plan.trainer is not TrainerKind.NONE:
            await workflow.wait_condition(lambda: self._trained)
        return outcomes + await self._evaluate(plan.evaluations_at_end)

    async def _train(self, plan: RunPlan) -> None:
        builtin = plan.trainer is TrainerKind.BUILTIN
        trainer = TrainerInput(run_id=self._id, builtin=builtin)
        await self._child(TRAINER_WORKFLOW, trainer, trainer_workflow_id(self._id), None)

    async def _until_failure(
        self, play: Coroutine[Any, Any, list[EvaluationOutcome]], trainer: asyncio.Task[None] | None
    ) -> list[EvaluationOutcome]:
        """The result of `play`, unless the trainer fails before."""
        playing = asyncio.create_task(play)
        try:
            if trainer is not None:
                await workflow.wait([playing, trainer], return_when=asyncio.FIRST_COMPLETED)
                if trainer.done():
                    await trainer
            return await playing
        finally:
            playing.cancel()

    async def _evaluate(self, names: tuple[str, ...]) -> list[EvaluationOutcome]:
        outcomes = []
        for name in names:
            self._phase = f"evaluation {name}"
            outcome = await self._child(
                EVALUATION_WORKFLOW,
                EvaluationInput(run_id=self._id, name=name),
                evaluation_workflow_id(self._id, name),
                EvaluationOutcome,
            )
            outcomes.append(outcome)
        return outcomes

    async def _child(self, name: str, argument: Any, child_id: str, result_type: Any) -> Any:
        self._children.append(child_id)
        try:
            return await workflow.execute_child_workflow(
                name,
                argument,
                id=child_id,
                task_queue=WORKFLOWS,
                result_type=result_type,
                search_attributes=search_attributes(self._id),
            )
        finally:
            self._children.remove(child_id)

    async def _end(self, state: RunState, reason: str | None) -> RunState:
        """Move the row to an end state; what is in flight is cancelled unless the run completed."""
        self._phase = f"ending: {state}"
        reached = await self._set(state, reason)
        if reached is not RunState.COMPLETED:
            await scheduled(act.CANCEL_GROUPS, act.RunRef(run_id=self._id), summary="cancel groups")
        self._phase = str(reached)
        return reached

    async def _set(self, state: RunState, reason: str | None) -> RunState:
        reached = await scheduled(
            act.SET_RUN_STATE, act.SetRunState(run_id=self._id, state=state, reason=reason), summary=f"set {state}"
        )
        await self._wake()
        return reached

    async def _wake(self) -> None:
        for child in list(self._children):
            try:
                await workflow.get_external_workflow_handle(child).signal(WAKE)
            except ApplicationError:
                workflow.logger.info("%s has ended already", child)

    @workflow.signal(name=TRAINED)
    def trained(self) -> None:
        self._trained = True

    @workflow.update
    async def pause(self, reason: str = "paused by a person") -> RunState:
        """Stop admitting; what is in flight finishes."""
        return await self._set(RunState.PAUSED, reason)

    @workflow.update
    async def resume(self) -> RunState:
        return await self._set(RunState.RUNNING, None)

    @workflow.update
    async def cancel(self, reason: str = "cancelled by a person") -> RunState:
        """End the run now: nothing is admitted, every open group is cancelled."""
        return await self._end(RunState.CANCELLED, reason)

    @workflow.update
    async def set_concurrency(self, groups: int) -> RunState:
        """Groups in flight at once, from now on."""
        return await self._tune(act.TuneRun(run_id=self._id, concurrency=groups))

    @workflow.update
    async def set_weights(self, weights: dict[str, float]) -> RunState:
        """Shares of the environments, by label, from now on."""
        return await self._tune(act.TuneRun(run_id=self._id, weights=weights))

    async def _tune(self, change: act.TuneRun) -> RunState:
        state = await scheduled(act.TUNE_RUN, change, summary="tune")
        await self._wake()
        return state

    @set_concurrency.validator
    def _check_concurrency(self, groups: int) -> None:
        if not 1 <= groups <= 2000:
            raise ApplicationError(f"concurrency is between 1 and 2000 groups, not {groups}")

    @set_weights.validator
    def _check_weights(self, weights: dict[str, float]) -> None:
        if not weights or any(not weight > 0 for weight in weights.values()):
            raise ApplicationError("weights are given by environment and greater than 0")

    @workflow.query
    def progress(self) -> RunProgress:
        return RunProgress(phase=self._phase)
