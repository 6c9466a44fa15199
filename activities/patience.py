"""Storing what is paid for, for as long as the store is away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, ParamSpec, TypeVar

from temporalio import activity

from ..db.errors import StoreUnreachable

P = ParamSpec("P")
T = TypeVar("T")
_STORE_AGAIN_S: Final = 0.5


async def patiently(work: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T:
    """What `work` gives once the store is there: it is asked for tokens that are paid for."""
    while True:
        try:
            return await work(*args, **named)
        except StoreUnreachable:
            activity.logger.warning("the store is away; sampled tokens wait for it")
            await asyncio.sleep(_STORE_AGAIN_S)
