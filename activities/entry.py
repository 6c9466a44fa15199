"""How every activity is entered and left.

Invariants: heartbeats are kept from before any I/O, so a dead worker is noticed and a cancel arrives (set-up that took
a minute before its first heartbeat has killed every retry of an activity elsewhere); local activities have none. The
first one is sent after a moment only: each is a call to the server, and most activities are over by then. What author
code or the store refuse for good leaves as a verdict; everything else is retried. A try that was cut short is no
failure worth a traceback.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from temporalio import activity

from ..contracts.context import JudgeUnavailable
from ..contracts.reasons import FailureKind
from ..contracts.records import BadRecord
from ..contracts.states import IllegalTransition
from ..db.errors import Refused, Unknown
from ..environments.faults import EnvironmentProblem
from ..inference.tokens import TokensError
from .failures import final, waited_out

_FIRST_S = 2.0
_FIRST, _EVERY = 0.5, 0.2
"""Of the heartbeat timeout; the first beat comes after `_FIRST_S`, where that is sooner. The SDK holds back what is
more than its worker may send (`cli.worker`)."""

P = ParamSpec("P")
R = TypeVar("R")


def entered(body: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Heartbeat while `body` runs, several times per heartbeat timeout; turn refusals into verdicts."""

    @functools.wraps(body)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        timeout = activity.info().heartbeat_timeout
        beating = None if timeout is None else asyncio.create_task(_beat(timeout.total_seconds()))
        try:
            return await body(*args, **kwargs)
        except asyncio.CancelledError:
            if _asked_for(activity.cancellation_details()):
                raise
            raise waited_out("CutShort", "this try was cut short: out of time, or its worker stopped") from None
        except JudgeUnavailable as problem:  # a tool or `step` needs it: waited out, as an engine is
            raise waited_out("JudgeUnavailable", str(problem)) from problem
        except (EnvironmentProblem, TokensError) as problem:
            raise final(FailureKind.ENVIRONMENT, str(problem)) from problem
        except (Unknown, Refused, BadRecord, IllegalTransition) as problem:
            raise final(FailureKind.INFRASTRUCTURE, str(problem)) from problem
        finally:
            if beating is not None:
                beating.cancel()

    return wrapped


def _asked_for(details: activity.ActivityCancellationDetails | None) -> bool:
    """Whether somebody wanted this activity to end, which the SDK then passes on without alarm.

    Otherwise only this try is over (it took too long, its worker stops, its workflow is gone), and the SDK would log
    that as a failure of ours, with a traceback.
    """
    return details is not None and (
        details.cancel_requested or details.worker_shutdown or details.paused or details.reset
    )


async def _beat(timeout_s: float) -> None:
    await asyncio.sleep(min(_FIRST_S, timeout_s * _FIRST))
    while True:
        activity.heartbeat()
        await asyncio.sleep(timeout_s * _EVERY)
