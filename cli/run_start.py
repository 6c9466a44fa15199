"""`atropos run start`: give the run file to Temporal, and see that the run has really begun.

Invariant: a run has one id and one workflow. The id is refused where a run or a workflow has it already; the file is
handed over as raw JSON, so that starting here and starting by `temporal workflow start` are the same thing.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel

from ..contracts.queues import WORKFLOWS
from ..contracts.runfile import RunConfig, why_no_run_id
from ..contracts.states import RunState
from ..contracts.workflows import RUN_WORKFLOW, RunProgress, RunResult
from .errors import CommandError

if TYPE_CHECKING:
    from temporalio.client import Client, WorkflowHandle

ResultT = TypeVar("ResultT", bound=BaseModel)

_LETTERS: Final = "abcdefghijkmnpqrstuvwxyz23456789"
_BEGINS_S: Final = 15.0
"""A free worker registers a run within a second or two; loading environments and a tokenizer may take longer."""
_VALIDATING: Final = "validating the run file"
"""Phase of a run's workflow before its row exists."""


@dataclass(frozen=True)
class Started:
    """A run that was handed to Temporal. `note`: why it has not begun yet, None where it has."""

    run_id: str
    note: str | None


def new_run_id(name: str, wanted: str | None) -> str:
    """`run/NAME-xxxx`, or what the person asked for. Raises CommandError for an id that pages could not show."""
    if wanted is None:
        return f"run/{name}-{''.join(secrets.choice(_LETTERS) for _ in range(4))}"
    run_id = wanted if wanted.startswith("run/") else f"run/{wanted}"
    problem = why_no_run_id(run_id)
    if problem is not None:
        raise CommandError(f"{problem[:1].upper()}{problem[1:]}.")
    return run_id


_AGAIN_S = 1.0
"""Between two looks for a Temporal that is away."""


def document_of(config: RunConfig) -> dict[str, Any]:
    """The run file as `RunWorkflow` takes it: plain JSON, without the fields nobody set."""
    return config.model_dump(mode="json", exclude_unset=True)


async def start_run(
    client: "Client", config: RunConfig, run_id: str, handed_over: Callable[[], None] | None = None
) -> Started:
    """Start the run's workflow and wait until it is registered, or for a quarter of a minute.

    `handed_over` is called once Temporal has it: from then on it goes on without us.
    Raises CommandError where the id is taken or the run is refused.
    """
    from temporalio.common import WorkflowIDReusePolicy
    from temporalio.exceptions import WorkflowAlreadyStartedError

    try:
        handle = await client.start_workflow(
            RUN_WORKFLOW,
            document_of(config),
            id=run_id,
            task_queue=WORKFLOWS,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            static_summary=f"run {config.name}",
        )
    except WorkflowAlreadyStartedError:
        raise id_taken(run_id) from None
    if handed_over is not None:
        handed_over()
    return Started(run_id, await _begins(client, handle))


def id_taken(run_id: str) -> CommandError:
    return CommandError(f"There is a run called {run_id} already; choose another --id, or watch that one.")


async def run_ends(client: "Client", run_id: str) -> RunState:
    """Wait for the end of a run. Raises CommandError with its reason where its workflow failed."""
    return (await outcome_of(client.get_workflow_handle(run_id, result_type=RunResult), RunResult)).state


async def _begins(client: "Client", handle: "WorkflowHandle[Any, Any]") -> str | None:
    """None as soon as the run is registered; a note where that takes too long. Raises what refused it."""
    from .run_steer import no_worker, query

    ended = asyncio.create_task(outcome_of(handle, RunResult))
    try:
        async with asyncio.timeout(_BEGINS_S):
            while not ended.done():
                progress = await query(handle, "progress", RunProgress)
                if progress is not None and progress.phase != _VALIDATING:
                    return None
                await asyncio.wait([ended], timeout=0.2)
            await ended
    except TimeoutError:
        return await no_worker(client) or "It is still being checked by a worker."
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
    return None


async def outcome_of(handle: "WorkflowHandle[Any, Any]", kind: type[ResultT]) -> ResultT:
    """A workflow's result, waited for also while Temporal is away. Raises CommandError with why it failed."""
    from temporalio.client import WorkflowFailureError
    from temporalio.exceptions import ApplicationError, CancelledError, is_cancelled_exception

    try:
        result = await _outlasting(handle)
    except WorkflowFailureError as failure:
        cause: BaseException | None = failure.cause
        if isinstance(cause, CancelledError) or (cause is not None and is_cancelled_exception(cause)):
            raise CommandError(f"{handle.id} was cancelled.") from None
        while cause is not None and not isinstance(cause, ApplicationError) and cause.__cause__ is not None:
            cause = cause.__cause__
        words = cause.message if isinstance(cause, ApplicationError) else str(cause)
        raise CommandError(f"{handle.id} failed: {words}") from None
    return result if isinstance(result, kind) else kind.model_validate(result)


async def _outlasting(handle: "WorkflowHandle[Any, Any]") -> Any:
    """The result of a workflow, however often Temporal is away meanwhile: the run goes on without us, too."""
    from temporalio.service import RPCError, RPCStatusCode

    # A server that dies while it answers shows as UNKNOWN or INTERNAL ("transport error") as well as UNAVAILABLE.
    refusals = (
        RPCStatusCode.NOT_FOUND,
        RPCStatusCode.INVALID_ARGUMENT,
        RPCStatusCode.FAILED_PRECONDITION,
        RPCStatusCode.PERMISSION_DENIED,
        RPCStatusCode.UNAUTHENTICATED,
        RPCStatusCode.UNIMPLEMENTED,
    )
    while True:
        try:
            return await handle.result()
        except RPCError as error:
            if error.status in refusals:
                raise
            await asyncio.sleep(_AGAIN_S)
