"""Heartbeats from the moment an activity is entered, so that a dead worker is noticed and a cancel arrives.

Invariant: the heartbeat starts before any I/O. Set-up that took a minute before the first one has killed every retry
of an activity elsewhere. Local activities have no heartbeat, and none is sent for them.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from temporalio import activity

P = ParamSpec("P")
R = TypeVar("R")


def heartbeating(body: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Send a heartbeat at once and then twice per heartbeat timeout while `body` runs."""

    @functools.wraps(body)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        timeout = activity.info().heartbeat_timeout
        if timeout is None:
            return await body(*args, **kwargs)
        beating = asyncio.create_task(_beat(timeout.total_seconds() / 2))
        try:
            return await body(*args, **kwargs)
        finally:
            beating.cancel()

    return wrapped


async def _beat(every_s: float) -> None:
    while True:
        activity.heartbeat()
        await asyncio.sleep(every_s)
