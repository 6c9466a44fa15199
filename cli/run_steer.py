"""Asking a run why it waits, and steering it while it runs.

Invariant: the row is asked first, since rows decide; workflows are asked only for what no row says, with a short
limit, and whoever does not answer is named (Temporal away, no worker, a workflow that is gone). A cancel works without
any of them: it moves the row, and everything that still runs finds that out before it buys another token.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..contracts.ids import rollout_workflow_id, trainer_workflow_id
from ..contracts.queues import QUEUE_OF
from ..contracts.states import EngineState, RunState, is_live
from ..contracts.workflows import RUN_WORKFLOW, RunProgress
from .errors import CommandError
from .run_retries import retried

if TYPE_CHECKING:
    from datetime import timedelta

    from temporalio.client import Client, WorkflowHandle

    from ..contracts.records import EngineRecord
    from ..db.runs import RunRow
    from ..db.store import Store

_ANSWERS_S: Final = 3.0
"""A worker with nothing else to do answers a query within milliseconds."""
_UPDATE_S: Final = 20.0
AnswerT = TypeVar("AnswerT")


async def why(row: "RunRow", client: "Client | None") -> list[str]:
    """Why a run does not go on, or what it is doing: one sentence a line, the decisive one first.

    Without a client only the row is asked.
    """
    if not is_live(row.state):
        return [f"It is {row.state}{f': {row.reason}' if row.reason else ''}."]
    told = []
    if row.state is RunState.PAUSED:
        told.append(f"It is paused: {row.reason or 'by a person'}. `atropos run resume` goes on.")
    elif row.waiting_for is not None:
        told.append(f"It waits: {row.waiting_for}.")
    if client is None:
        return told
    trouble = await workflow_trouble(client, row.run_id)
    if trouble is not None:
        return [*told, trouble]
    idle = await no_worker(client)
    if idle is not None:
        return [*told, idle]
    if row.state is RunState.RUNNING and told:
        return told
    tried = await retried(client, row.run_id)
    if told:
        return [*told, *tried]
    progress = await query(client.get_workflow_handle(row.run_id), "progress", RunProgress)
    rollout = await query(client.get_workflow_handle(rollout_workflow_id(row.run_id)), "why", str)
    if progress is None:
        return [
            f"Its workflow has not answered within {_ANSWERS_S:.0f} s: its workers are gone, busy or stuck; "
            "see their logs, or start one with `atropos-worker`."
        ]
    told += [*tried, f"It is at: {progress.phase}." if tried else f"It does not wait; it is at: {progress.phase}."]
    if rollout is not None and progress.phase in ("rollouts", "training"):
        told.append(f"Rollouts: {rollout}.")
    if row.config.trains:
        trainer = await query(client.get_workflow_handle(trainer_workflow_id(row.run_id)), "why", str)
        told += [f"Trainer: {trainer}."] if trainer is not None else []
    return told


def why_engines(records: "Sequence[EngineRecord]") -> list[str]:
    """What is wrong with engines, one sentence each: also while others do their work."""
    troubled = (EngineState.DOWN, EngineState.QUARANTINED)
    return [
        f"The engine {record.url} is {record.state}{f': {record.reason}' if record.reason else ''}."
        for record in records
        if record.state in troubled
    ]


async def unregistered(client: "Client", text: str) -> str | None:
    """The id of a run that Temporal has in hand and the store does not know yet; None where there is none such."""
    from temporalio.client import WorkflowExecutionStatus
    from temporalio.service import RPCError

    for run_id in (text, f"run/{text}"):
        try:
            found = await client.get_workflow_handle(run_id).describe(rpc_timeout=_limit())
        except RPCError:
            continue
        if found.workflow_type == RUN_WORKFLOW and found.status is WorkflowExecutionStatus.RUNNING:
            return run_id
    return None


async def why_unregistered(client: "Client", run_id: str) -> list[str]:
    """Why a run that was started has no row yet."""
    idle = await workflow_trouble(client, run_id) or await no_worker(client)
    return ["It was started and no worker has taken it up yet.", *([idle] if idle is not None else [])]


async def workflow_trouble(client: "Client", run_id: str) -> str | None:
    """What is wrong with a live run's workflow as Temporal sees it; None where nothing is."""
    from temporalio.client import WorkflowExecutionStatus
    from temporalio.service import RPCError, RPCStatusCode

    try:
        found = await client.get_workflow_handle(run_id).describe(rpc_timeout=_limit())
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return "Temporal does not know its workflow (any more); a worker that starts takes the run up again."
        return f"Temporal does not answer: {error.message}."
    if found.status is not WorkflowExecutionStatus.RUNNING:
        status = found.status.name.lower() if found.status is not None else "unknown"
        status = status.replace("_", " ")
        return f"Its workflow is {status}; a worker that starts ends the run, as `atropos run cancel` does now."
    task = found.raw_description.pending_workflow_task
    if task.attempt > 1:
        return f"Its workflow code fails (try {task.attempt}); see the log of a worker, and deploy a build that works."
    return None


async def no_worker(client: "Client") -> str | None:
    """A sentence where nobody polls one of our queues; None where all are served."""
    from .stack.probes import check_temporal

    problem, pollers = await asyncio.to_thread(check_temporal, client.service_client.config.target_host)
    if problem is not None:
        return f"Temporal does not answer: {problem}."
    idle = [role.value for role, queue in QUEUE_OF.items() if not pollers.get(queue)]
    if not idle:
        return None
    roles = "" if len(idle) == len(QUEUE_OF) else f" --roles {','.join(idle)}"
    return f"No worker serves {', '.join(idle)}; start one with `atropos-worker{roles}`."


async def query(handle: "WorkflowHandle[Any, Any]", name: str, answer: type[AnswerT]) -> AnswerT | None:
    """What a workflow answers; None where it is gone or nobody answers in time."""
    from temporalio.client import WorkflowQueryFailedError, WorkflowQueryRejectedError
    from temporalio.service import RPCError

    try:
        found: AnswerT = await handle.query(name, result_type=answer, rpc_timeout=_limit())
    except (RPCError, WorkflowQueryFailedError, WorkflowQueryRejectedError):
        return None
    return found


async def abandon(store: "Store", row: "RunRow") -> str:
    """Give the run's leased batch up; what was done, in words. Raises CommandError where there is none."""
    from ..db.batches import abandon_batch, leased_batch

    leased = await leased_batch(store, row.run_id)
    if leased is None or not await abandon_batch(store, row.run_id, leased.batch_no):
        raise CommandError(f"{row.run_id} has no batch to abandon: none is being trained on.")
    return (
        f"{row.run_id}: batch {leased.batch_no} of step {leased.step} is abandoned: its trainer cannot commit it any "
        f"more, and its {leased.groups} groups are free for the next batch."
    )


async def update(client: "Client", row: "RunRow", name: str, arguments: Sequence[Any]) -> RunState:
    """Run an update of the run's workflow. Raises CommandError saying who is missing or why it was refused."""
    from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
    from temporalio.exceptions import ApplicationError
    from temporalio.service import RPCError, RPCStatusCode

    if not is_live(row.state):
        raise CommandError(f"{row.run_id} is {row.state} and cannot be changed any more.")
    missing = await workflow_trouble(client, row.run_id) or await no_worker(client)
    if missing is not None:
        raise CommandError(f"{row.run_id} cannot be reached. {missing}")
    handle = client.get_workflow_handle(row.run_id)
    try:
        async with asyncio.timeout(_UPDATE_S):
            reached = await handle.execute_update(name, args=list(arguments), result_type=RunState)
    except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
        raise CommandError(f"{row.run_id} has not answered within {_UPDATE_S:.0f} s; is a worker running?") from None
    except WorkflowUpdateFailedError as failure:
        cause = failure.cause
        while cause.__cause__ is not None and not isinstance(cause, ApplicationError):
            cause = cause.__cause__
        words = cause.message if isinstance(cause, ApplicationError) else str(cause)
        raise CommandError(f"{row.run_id} refuses: {words}") from None
    except RPCError as error:
        gone = error.status is RPCStatusCode.NOT_FOUND
        words = "its workflow has just ended" if gone else error.message
        raise CommandError(f"{row.run_id} cannot be changed: {words}.") from None
    return RunState(reached)


async def cancel(store: "Store", client: "Client | None", row: "RunRow", reason: str) -> str | None:
    """Cancel a run, by its workflow where somebody runs it, else on its row. Returns a note on what is left to do."""
    from ..db.runs import set_run_state

    if not is_live(row.state):
        raise CommandError(f"{row.run_id} is {row.state} already.")
    trouble: str | None = "Temporal does not answer."
    if client is not None:
        trouble = await workflow_trouble(client, row.run_id)
    if client is not None and trouble is None:
        try:
            await update(client, row, "cancel", [reason])
        except CommandError as error:
            trouble = str(error)
        else:
            return None
    await set_run_state(store, row.run_id, RunState.CANCELLED, reason)
    return f"{trouble} The run's row is cancelled: nothing of it buys another token."


def _limit() -> "timedelta":
    from datetime import timedelta

    return timedelta(seconds=_ANSWERS_S)
