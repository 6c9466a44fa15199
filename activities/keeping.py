"""What a long model call has sampled so far, kept as it grows and continued by the next try.

Why: a completion drawn again from its beginning costs its tokens twice, and a policy whose long answers break off more
often than its short ones is sampled with a bias towards short answers.

Invariant: keeping never fails or delays a generation. It happens beside it, one write at a time and always of the
newest prefix; a store that is away is logged, and the next prefix is tried in its stead.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Final

from temporalio import activity

from ..contracts.reasons import FinishReason
from ..contracts.records import Sampled, VersionSpan, joined
from ..inference.engines import Completion
from ..inference.errors import EngineFailure

STREAMED_ABOVE: Final = 512
"""Tokens that a completion may have before it is streamed: a shorter one is drawn again in less than streaming,
an event for each token, costs all of them."""
_LAST_WRITE_S: Final = 2.0
"""How long a call that broke off waits for its last prefix to be kept."""


def ended(sampled: list[int], budget: int, stops: Collection[int]) -> FinishReason | None:
    """Why nothing is left to sample after these tokens; None where something is."""
    if sampled[-1] in stops:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sampled) >= budget else None


def continued(begun: Sampled | None, completion: Completion, spans: tuple[VersionSpan, ...], engine_id: str) -> Sampled:
    """What an earlier try had kept and what came after it. `spans`: of the completion alone."""
    return Sampled(
        sampled=(begun.sampled if begun else []) + completion.token_ids,
        logprobs=(begun.logprobs if begun else []) + completion.logprobs,
        spans=joined(begun.spans if begun else (), spans),
        engine_id=engine_id,
        incarnation=completion.incarnation,
    )


class Keeper:
    """Hears of a growing completion and keeps it behind its back; `used`: whether it ever tried to."""

    def __init__(self, save: Callable[[Completion], Awaitable[None]]) -> None:
        self._save = save
        self._newest: Completion | None = None
        self._writing: asyncio.Task[None] | None = None
        self.used = False

    async def __call__(self, partial: Completion) -> None:
        self.used = True
        self._newest = partial
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._newest is not None:
            newest, self._newest = self._newest, None
            try:
                await self._save(newest)
            except Exception as problem:
                activity.logger.warning(
                    "%d tokens of a long model call are not kept: %s", len(newest.token_ids), problem
                )

    async def finish(self, within_s: float) -> None:
        """Let what is known be written, for a while."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=within_s)

    async def stop(self) -> None:
        """Write no more; when this returns, nothing of ours reaches the store any longer."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})


@asynccontextmanager
async def keeping(save: Callable[[Completion], Awaitable[None]]) -> AsyncIterator[Keeper]:
    """A keeper for the block. What came before an engine failed is worth a moment; the whole turn is not waited for,
    since it is stored itself."""
    keeper = Keeper(save)
    try:
        yield keeper
    except EngineFailure:
        await keeper.finish(_LAST_WRITE_S)
        raise
    finally:
        await keeper.stop()
