"""A completion that is streamed: read to its end, and told of while it grows.

Invariant: whoever waits hears of every token that may be kept, also of those before a stream broke off, and of none
of an answer that contradicts itself.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from .engines import Completion, Progress
from .errors import EngineFailure, EngineFailureKind

Whole = TypeVar("Whole", covariant=True)


class Growth(Protocol[Whole]):
    """What a wire makes of its events."""

    @property
    def size(self) -> int: ...

    def add(self, event: dict[str, Any]) -> None: ...

    def partial(self) -> Completion: ...

    def whole(self) -> Whole: ...


async def grown(
    growing: Growth[Whole], events: AsyncGenerator[dict[str, Any], None], progress: Progress, *, every_s: float
) -> Whole:
    """The whole of a stream. `progress` hears of what is there at most every `every_s`, and of what came before the
    stream broke off. Raises EngineFailure."""
    told, told_at = 0, time.monotonic()
    try:
        async with aclosing(events) as stream:
            async for event in stream:
                growing.add(event)
                if time.monotonic() - told_at >= every_s and growing.size > told:
                    told, told_at = growing.size, time.monotonic()
                    await progress(growing.partial())
        return growing.whole()
    except EngineFailure as failure:
        if failure.kind is not EngineFailureKind.MALFORMED and growing.size > told:
            await progress(growing.partial())
        raise
