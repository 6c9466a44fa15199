"""Starting groups from a long loop: children that outlive the loop's own continue-as-new.

Invariant: a group is started under its own id, so starting it twice starts it once. It is abandoned on purpose: the
loop may continue as new or be restarted, and the group reports by rows, with a signal to wake.
"""

from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import WorkflowAlreadyStartedError

from ..contracts.activities import GroupStart
from ..contracts.queues import WORKFLOWS
from ..contracts.workflows import GROUP_WORKFLOW, GroupInput
from .group import search_attributes

_TASK_TIMEOUT = timedelta(seconds=5)


async def start_group(start: GroupStart) -> None:
    """Start the workflow of an admitted group, with this workflow as the one to wake."""
    try:
        await workflow.start_child_workflow(
            GROUP_WORKFLOW,
            GroupInput(start=start, parent=workflow.info().workflow_id),
            id=start.key.workflow_id,
            task_queue=WORKFLOWS,
            task_timeout=_TASK_TIMEOUT,
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            search_attributes=search_attributes(start.key.run_id, start.environment, start.task_key),
            static_summary=f"{start.environment}: {start.size} episodes of task {start.task_key[:12]}",
        )
    except WorkflowAlreadyStartedError:
        workflow.logger.info("group %s runs already", start.key.workflow_id)
