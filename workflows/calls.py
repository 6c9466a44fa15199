"""How workflows call activities: scheduled, or local with a scheduled fallback.

Invariant: a quick call never decides an episode's fate by being slow. It is tried at most three times as a local
activity; if that fails for any reason but a verdict (a failure kind, cancellation), the same call is scheduled and
retried without limit, since a store that restarts must not fail an episode. Activities are keyed, so the second way
finds what the first may have written.
"""

from datetime import timedelta
from typing import TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, is_cancelled_exception

from ..contracts.activities import NEVER_RETRIED, Activity
from ..contracts.messages import preview
from ..contracts.reasons import FailureKind

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")

_LOCAL_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=50), maximum_attempts=3, non_retryable_error_types=list(NEVER_RETRIED)
)

_LEFT_BEHIND = workflow.ActivityCancellationType.TRY_CANCEL
_WAITED_FOR = workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
_NOTICED = timedelta(seconds=5)
"""Every scheduled try heartbeats: a worker that died over quick work is noticed after this, not at the timeout."""


async def scheduled(
    activity: Activity[InputT, ResultT],
    argument: InputT,
    *,
    summary: str | None = None,
    queue: str | None = None,
    timeout_s: float | None = None,
    outlived: bool = True,
) -> ResultT:
    """Run `activity` on its queue (or `queue`), retried until it succeeds or fails with a verdict.

    `outlived`: a cancelled workflow goes on while the activity may still be at work; else it waits for its end.
    """
    result: ResultT = await workflow.execute_activity(
        activity.name,
        argument,
        result_type=activity.result,
        task_queue=queue or activity.queue,
        start_to_close_timeout=activity.timeout if timeout_s is None else timedelta(seconds=timeout_s),
        heartbeat_timeout=activity.heartbeat or _NOTICED,
        retry_policy=RetryPolicy(
            initial_interval=timedelta(milliseconds=200),
            maximum_interval=activity.max_interval,
            non_retryable_error_types=list(NEVER_RETRIED),
        ),
        cancellation_type=_LEFT_BEHIND if outlived else _WAITED_FOR,
        summary=summary,
    )
    return result


async def quick(activity: Activity[InputT, ResultT], argument: InputT, *, summary: str | None = None) -> ResultT:
    """Run `activity` as a local one, falling back to `scheduled`."""
    try:
        result: ResultT = await workflow.execute_local_activity(
            activity.name,
            argument,
            result_type=activity.result,
            start_to_close_timeout=activity.local,
            retry_policy=_LOCAL_RETRY,
            summary=summary,
        )
    except FailureError as error:
        if is_cancelled_exception(error) or verdict(error) is not None:
            raise
        return await scheduled(activity, argument, summary=summary)
    return result


def verdict(error: BaseException) -> tuple[FailureKind, str] | None:
    """The failure kind an activity reported and its sentence; None where it failed without a verdict.

    A scheduled activity's own error is the cause of an ActivityError; a local one's arrives bare.
    """
    cause = error.cause if isinstance(error, ActivityError) else error
    if isinstance(cause, ApplicationError) and cause.type in frozenset(FailureKind):
        return FailureKind(cause.type), preview(cause.message)
    return None


def root_cause(error: BaseException) -> str:
    """What went wrong at the bottom, in words (preview): the layers above only say where."""
    while error.__cause__ is not None:
        error = error.__cause__
    return preview(str(error))
