"""Runs that the store calls live while no workflow works on them: taken up again, or ended.

Invariant: a Temporal server may be lost with all its histories; rows are enough to go on, so a run that Temporal does
not know is started again, under its own id, and two workers that look at once start it once. A workflow that Temporal
knows and that is over was ended by somebody or something (a person terminated it, it timed out): that is never undone
here. The row, which nobody could tell, then says how it ended, and nothing of the run buys another token.
"""

import logging

from temporalio.client import WorkflowExecutionStatus
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError

from ..activities.runs import cancel_open_groups, workflow_status
from ..activities.services import Services
from ..contracts.queues import WORKFLOWS
from ..contracts.states import EvaluationState, IllegalTransition, RunState, is_live
from ..contracts.workflows import RUN_WORKFLOW
from ..db.evaluations import finish_evaluation, list_evaluations
from ..db.runs import RunRow, UnreadableRun, list_runs, set_run_state

_LOOKED_AT = 1000
_log = logging.getLogger("atropos.worker")


async def resume_runs(services: Services) -> list[str]:
    """Start the workflow of every live run that Temporal does not know; returns their ids.

    A live run whose workflow is over becomes failed, or cancelled where it was cancelled.
    """
    started = []
    for row in await list_runs(services.store, limit=_LOOKED_AT):
        if not is_live(row.state):
            continue
        if isinstance(row, UnreadableRun):
            _log.warning("run %s is left as it is: %s", row.run_id, row.reason)
            continue
        status = await workflow_status(services.client, row.run_id)
        if status is None:
            started += await _start(services, row)
        elif status is not WorkflowExecutionStatus.RUNNING:
            await _end(services, row, status)
    return started


async def _start(services: Services, row: RunRow) -> list[str]:
    document = row.config.model_dump(mode="json", exclude_unset=True)
    try:
        await services.client.start_workflow(
            RUN_WORKFLOW,
            document,
            id=row.run_id,
            task_queue=WORKFLOWS,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
        )
    except WorkflowAlreadyStartedError:
        return []
    return [row.run_id]


async def _end(services: Services, row: RunRow, status: WorkflowExecutionStatus) -> None:
    """Write down how a run ended whose workflow could not."""
    store, run_id = services.store, row.run_id
    cancelled = status is WorkflowExecutionStatus.CANCELED
    reason = f"its workflow is over ({status.name.lower().replace('_', ' ')}) and could not say so itself"
    try:
        await set_run_state(store, run_id, RunState.CANCELLED if cancelled else RunState.FAILED, reason)
    except IllegalTransition:  # it was just ending by itself
        return
    _log.warning("run %s has ended: %s", run_id, reason)
    for evaluation in await list_evaluations(store, run_id):
        if evaluation.state is EvaluationState.RUNNING:
            await finish_evaluation(store, run_id, evaluation.name, EvaluationState.CANCELLED, reason)
    await cancel_open_groups(services, run_id)
