"""The loop that keeps a run's groups in flight.

Invariant: this workflow knows nothing that is not in rows. It asks for admission when it is woken or when time is up,
starts what it is given, and may be lost and started anew at any moment without a group lost or admitted twice.
"""

from datetime import timedelta

from temporalio import workflow

from ..contracts import activities as act
from ..contracts.activities import Admission
from ..contracts.workflows import GROUP_CLOSED, ROLLOUT_WORKFLOW, WAKE, RolloutInput
from .calls import scheduled
from .children import start_group

RECONCILE_EVERY = timedelta(seconds=60)


@workflow.defn(name=ROLLOUT_WORKFLOW)
class RolloutWorkflow:
    @workflow.init
    def __init__(self, rollout: RolloutInput) -> None:
        self._run_id = rollout.run_id
        self._awake = False
        self._reconciled = workflow.time() - RECONCILE_EVERY.total_seconds()
        self._why = "starting"

    @workflow.run
    async def run(self, rollout: RolloutInput) -> None:
        while True:
            if workflow.time() - self._reconciled >= RECONCILE_EVERY.total_seconds():
                await self._reconcile()
            self._awake = False
            admission = await scheduled(act.ADMIT_GROUPS, act.RunRef(run_id=self._run_id), summary="admit")
            if admission.done:
                return
            for group in admission.groups:
                await start_group(group)
            self._say(admission)
            await self._wait(admission.again_s)
            if workflow.info().is_continue_as_new_suggested():
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(RolloutInput(run_id=self._run_id))

    async def _reconcile(self) -> None:
        found = await scheduled(act.RECONCILE, act.Reconcile(run_id=self._run_id), summary="reconcile")
        for group in found.started:
            await start_group(group)
        self._reconciled = workflow.time()

    async def _wait(self, seconds: float) -> None:
        """Until something changed, at most `seconds` and at most until the next reconciliation."""
        left = self._reconciled + RECONCILE_EVERY.total_seconds() - workflow.time()
        try:
            await workflow.wait_condition(
                lambda: self._awake, timeout=timedelta(seconds=max(0.1, min(seconds, left))), timeout_summary=self._why
            )
        except TimeoutError:
            return

    def _say(self, admission: Admission) -> None:
        self._why = admission.waiting_for or f"{admission.open} groups in flight"
        workflow.set_current_details(self._why)

    @workflow.signal(name=GROUP_CLOSED)
    def group_closed(self, group_no: int) -> None:
        self._awake = True

    @workflow.signal(name=WAKE)
    def wake(self) -> None:
        self._awake = True

    @workflow.query
    def why(self) -> str:
        """What it waits for, in words."""
        return self._why
