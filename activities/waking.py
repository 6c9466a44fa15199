"""Telling a workflow that rows have changed.

Invariant: nothing depends on it. The workflow may be gone, or Temporal away: the rows say all, and whoever waits for
them looks by itself after a while.
"""

from temporalio import activity
from temporalio.service import RPCError

from .services import Services


async def wake(services: Services, workflow_id: str, signal: str, *arguments: object) -> None:
    """Send a signal; where that fails, a line in the log says so."""
    try:
        await services.client.get_workflow_handle(workflow_id).signal(signal, args=arguments)
    except RPCError as error:
        activity.logger.info("%s was not woken by %s: %s", workflow_id, signal, error.message)
