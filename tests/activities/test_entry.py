"""How activities are left: a try that was cut short is tried again without alarm, a wanted cancel stays one."""

import asyncio

import pytest
from atropos.activities.entry import entered
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.testing import ActivityEnvironment


async def left_by(details: ActivityCancellationDetails) -> BaseException:
    """What an activity ends with that is cancelled so while it waits."""
    environment, waiting = ActivityEnvironment(), asyncio.Event()

    @entered
    async def waits() -> None:
        waiting.set()
        await asyncio.Event().wait()

    running = asyncio.ensure_future(environment.run(waits))
    await waiting.wait()
    environment.cancel(details)
    with pytest.raises((asyncio.CancelledError, ApplicationError)) as left:
        await running
    return left.value


@pytest.mark.parametrize("why", [{"timed_out": True}, {"not_found": True}, {}])
async def test_a_try_that_was_cut_short_is_no_failure_worth_a_traceback(why: dict[str, bool]) -> None:
    left = await left_by(ActivityCancellationDetails(**why))
    assert isinstance(left, ApplicationError)
    assert (left.non_retryable, left.category) == (False, ApplicationErrorCategory.BENIGN)


@pytest.mark.parametrize("why", ["cancel_requested", "worker_shutdown", "paused", "reset"])
async def test_a_cancel_that_somebody_wanted_stays_a_cancel(why: str) -> None:
    assert isinstance(await left_by(ActivityCancellationDetails(**{why: True})), asyncio.CancelledError)
