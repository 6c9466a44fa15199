"""One evaluation: fixed tasks, n samples each, scored and summed up.

Invariant: its tasks and samples are rows before the first is sampled, so a restart resumes with what is missing and
the result is the same whether it was interrupted or not.
"""

from datetime import timedelta

from temporalio import workflow

from ..contracts import activities as act
from ..contracts.activities import EvaluationOutcome, EvaluationRef
from ..contracts.states import EvaluationState
from ..contracts.workflows import EVALUATION_WORKFLOW, GROUP_CLOSED, WAKE, EvaluationInput
from .calls import scheduled
from .children import start_group

_LOOK_AGAIN = timedelta(seconds=60)


@workflow.defn(name=EVALUATION_WORKFLOW, failure_exception_types=[Exception])
class EvaluationWorkflow:
    @workflow.init
    def __init__(self, evaluation: EvaluationInput) -> None:
        self._ref = EvaluationRef(run_id=evaluation.run_id, name=evaluation.name)
        self._running: set[int] = set()
        self._awake = False

    @workflow.run
    async def run(self, evaluation: EvaluationInput) -> EvaluationOutcome:
        outcome = await scheduled(act.START_EVALUATION, self._ref, summary="draw tasks")
        if outcome.state is not EvaluationState.RUNNING:
            return outcome
        while True:
            self._awake = False
            page = await scheduled(
                act.NEXT_EVALUATION_GROUPS,
                act.NextEvaluationGroups(
                    run_id=self._ref.run_id, name=self._ref.name, running=tuple(sorted(self._running))
                ),
                summary="next tasks",
            )
            if not page.open:
                break
            for group in page.groups:
                self._running.add(group.key.group_no)  # before it can say that it closed
                await start_group(group)
            workflow.set_current_details(f"{page.open} tasks to go, {len(self._running)} in flight")
            await self._wait(timedelta(seconds=page.again_s))
            if workflow.info().is_continue_as_new_suggested():
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(evaluation)
        return await scheduled(act.FINISH_EVALUATION, self._ref, summary="sum up")

    async def _wait(self, at_most: timedelta) -> None:
        try:
            await workflow.wait_condition(lambda: self._awake, timeout=at_most)
        except TimeoutError:
            if at_most < _LOOK_AGAIN:
                return
            found = await scheduled(
                act.RECONCILE,
                act.Reconcile(run_id=self._ref.run_id, evaluation=self._ref.name),
                summary="reconcile",
            )
            for group in found.started:
                await start_group(group)

    @workflow.signal(name=GROUP_CLOSED)
    def group_closed(self, group_no: int) -> None:
        self._running.discard(group_no)
        self._awake = True

    @workflow.signal(name=WAKE)
    def wake(self) -> None:
        self._awake = True
