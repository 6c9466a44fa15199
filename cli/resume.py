"""Runs that the store calls running and Temporal does not know are started again.

Invariant: a Temporal server may be lost with all its histories; rows are enough to go on. A run is started under its
own id, so two workers that look at once start it once.
"""

from temporalio.client import WorkflowExecutionStatus
from temporalio.exceptions import WorkflowAlreadyStartedError

from ..activities.runs import workflow_status
from ..activities.services import Services
from ..contracts.queues import WORKFLOWS
from ..contracts.states import RunState
from ..contracts.workflows import RUN_WORKFLOW
from ..db.runs import list_runs

_LOOKED_AT = 1000


async def resume_runs(services: Services) -> list[str]:
    """Start the workflow of every open run that Temporal does not know; returns their ids."""
    started = []
    for row in await list_runs(services.store, limit=_LOOKED_AT):
        if row.state not in (RunState.RUNNING, RunState.PAUSED):
            continue
        if await workflow_status(services.client, row.run_id) is WorkflowExecutionStatus.RUNNING:
            continue
        try:
            document = row.config.model_dump(mode="json", exclude_unset=True)
            await services.client.start_workflow(RUN_WORKFLOW, document, id=row.run_id, task_queue=WORKFLOWS)
        except WorkflowAlreadyStartedError:
            continue
        started.append(row.run_id)
    return started
