"""What of a run is tried again and again, as Temporal sees it: an engine that answers nonsense, a judge that is away.

Invariant: nothing is guessed and nothing is written. Retries belong to Temporal, so it alone knows which of them fail,
why, and since when. An engine that is up and answers rubbish passes every probe: only this shows it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from ..contracts import search

if TYPE_CHECKING:
    from temporalio.api.failure.v1 import Failure
    from temporalio.api.workflow.v1 import PendingActivityInfo
    from temporalio.client import Client

_LOOKED_AT: Final = 64
"""Running workflows of the run that are asked."""
_SHOWN: Final = 3
_LIMIT: Final = timedelta(seconds=3)


@dataclass(frozen=True)
class _Retry:
    """An activity whose last try failed."""

    workflow_id: str
    run_id: str
    activity_id: str
    name: str
    attempt: int
    problem: str


async def retried(client: "Client", run_id: str) -> list[str]:
    """A sentence for each thing that fails and is tried again, the most frequent first; none where Temporal is away."""
    from temporalio.service import RPCError

    try:
        retries = await _retries(client, run_id)
        kinds: dict[tuple[str, str], list[_Retry]] = {}
        for retry in retries:
            kinds.setdefault((retry.name, retry.problem), []).append(retry)
        shown = sorted(kinds.values(), key=len, reverse=True)[:_SHOWN]
        return [await _sentence(client, alike) for alike in shown]
    except RPCError:
        return []


async def registering(client: "Client", run_id: str) -> str | None:
    """What became so far of a run's registration, its workflow's first activity; None where nobody took it up yet."""
    from temporalio.api.enums.v1 import PendingActivityState
    from temporalio.service import RPCError

    try:
        described = await client.get_workflow_handle(run_id).describe(rpc_timeout=_LIMIT)
        retries = _failing(described.id, described.run_id, described.raw_description.pending_activities)
        if retries:
            return await _sentence(client, retries[:1])
    except RPCError:
        return None
    for pending in described.raw_description.pending_activities:
        if pending.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED:
            return _at_work(pending.last_started_time.ToDatetime(tzinfo=UTC))
    return None


def _at_work(began: datetime) -> str:
    from .run_show import ago

    return f"A worker is registering it, for {ago(began)}: it checks the run file and imports its environments."


async def _retries(client: "Client", run_id: str) -> list[_Retry]:
    value = run_id.replace("\\", "\\\\").replace("'", "\\'")
    query = f"{search.RUN} = '{value}' AND ExecutionStatus = 'Running'"
    found = [one async for one in client.list_workflows(query, limit=_LOOKED_AT, rpc_timeout=_LIMIT)]
    pages = await asyncio.gather(*(_retries_of(client, one.id, one.run_id) for one in found))
    return [retry for page in pages for retry in page]


async def _retries_of(client: "Client", workflow_id: str, run_id: str) -> list[_Retry]:
    from temporalio.service import RPCError

    try:
        described = await client.get_workflow_handle(workflow_id, run_id=run_id).describe(rpc_timeout=_LIMIT)
    except RPCError:  # it has just ended
        return []
    return _failing(workflow_id, run_id, described.raw_description.pending_activities)


def _failing(workflow_id: str, run_id: str, activities: "Iterable[PendingActivityInfo]") -> list[_Retry]:
    return [
        _Retry(
            workflow_id,
            run_id,
            pending.activity_id,
            pending.activity_type.name,
            pending.attempt,
            _problem(pending.last_failure),
        )
        for pending in activities
        if pending.attempt > 1 and pending.last_failure.message
    ]


def _problem(failure: "Failure") -> str:
    """What a try failed with; where nobody came back from it, what that means."""
    from temporalio.api.enums.v1 import TimeoutType

    if failure.timeout_failure_info.timeout_type == TimeoutType.TIMEOUT_TYPE_HEARTBEAT:
        return "its worker gives no sign of life (it died, hangs, or cannot reach Temporal)"
    return str(failure.message.rstrip("."))


async def _sentence(client: "Client", alike: Sequence[_Retry]) -> str:
    from .run_show import ago

    most = max(alike, key=lambda retry: retry.attempt)
    began = await _began(client, most)
    since = "" if began is None else f", for {ago(began)}"
    times = "" if len(alike) == 1 else f", {len(alike)} times side by side"
    return f"It tries {most.name} again and again{since} (try {most.attempt}{times}): {most.problem}."


async def _began(client: "Client", retry: _Retry) -> datetime | None:
    """When the activity was first asked for: an event of the workflow's history, looked for from its end."""
    from temporalio.api.common.v1 import WorkflowExecution
    from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryReverseRequest

    request = GetWorkflowExecutionHistoryReverseRequest(
        namespace=client.namespace,
        execution=WorkflowExecution(workflow_id=retry.workflow_id, run_id=retry.run_id),
        maximum_page_size=100,
    )
    answer: Any = await client.workflow_service.get_workflow_execution_history_reverse(request, timeout=_LIMIT)
    for event in answer.history.events:
        if event.activity_task_scheduled_event_attributes.activity_id == retry.activity_id:
            began: datetime = event.event_time.ToDatetime(tzinfo=UTC)
            return began
    return None
