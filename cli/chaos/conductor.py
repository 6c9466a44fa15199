"""Carries out a plan of kills beside a run, one after the other, and measures how each was recovered from.

Invariant: the next kill waits until the one before is recovered from: until work that began after it, and that needed
what was killed, is in rows. So every recovery is measured alone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.text import Text

from . import proofs, traps
from .plan import Cell, Component, Moment, Planned
from .stage import Hit, Stage

_LOOK_S: Final = 0.1
_TRY_AGAIN_S: Final = 0.03
_RECOVERS_WITHIN_S: Final = 120.0
_WHOLE_S: Final = 0.6
"""What a delay of 1 is: about as long as a train step or an answer takes."""

Trap = Callable[[Stage, Cell, int], Awaitable[Hit | None]]
"""Kills the component, if it is in the middle of at least so many things, where it can be in that of several."""
Proof = Callable[[Stage, Hit], Awaitable[bool]]
"""Whether a record of others says that it was."""

_MUCH: Final = 16
"""Things in flight that a kill waits for at first; it hits one as well in the end."""
_PATIENCE_S: Final = 8.0

KNOWN: Final[dict[tuple[Component, Moment], tuple[Trap, Proof]]] = {
    (Component.ACTIVITY_WORKER, Moment.SAMPLING): (traps.while_sampling_worker, proofs.was_tried_again),
    (Component.WORKFLOW_WORKER, Moment.TASK): (traps.in_workflow_task, proofs.was_timed_out),
    (Component.WORKFLOW_WORKER, Moment.BETWEEN): (traps.between, proofs.was_timed_out),
    (Component.TRAINER_WORKER, Moment.STEP): (traps.in_train_step, proofs.was_fenced),
    (Component.ENGINE, Moment.SAMPLING): (traps.while_sampling_engine, proofs.was_sampled_again),
    (Component.TEMPORAL, Moment.PENDING): (traps.while_pending, proofs.was_open_across),
    (Component.POSTGRES, Moment.TRANSACTION): (traps.in_transaction, proofs.was_decided),
}


@dataclass(frozen=True)
class Kill:
    """A kill that landed and what came of it. Seconds are from the kill; None: not within two minutes."""

    cell: Cell
    step: int
    """Train steps committed before it."""
    hit: Hit
    start_s: float | None
    """Until the component was ready again."""
    recovery_s: float | None
    """Until work that began after the kill was in rows."""


class Conductor:
    """Kills by a plan; `kills` are those that landed so far."""

    def __init__(self, stage: Stage, planned: Sequence[Planned], console: Console) -> None:
        self._stage, self._planned, self._console = stage, planned, console
        self.kills: list[Kill] = []

    async def conduct(self) -> None:
        """The whole plan. Cancel it when the run is over."""
        for one in self._planned:
            step = await self._until(one.step)
            hit = await self._land(one)
            self._say(f"killed: {one.cell.component}, {one.cell.moment} ({len(hit.items)} seen, {hit.tokens} tokens)")
            start_s, recovery_s = await asyncio.gather(self._started(one.cell, hit), self._recovered(one.cell, hit))
            self.kills.append(Kill(one.cell, step, hit, start_s, recovery_s))
            ready, on = _seconds(start_s), _seconds(recovery_s)
            self._say(f"{one.cell.component}: ready after {ready}, work went on after {on}")

    async def _until(self, step: int) -> int:
        while (committed := await self._stage.rows.committed()) < step:  # noqa: ASYNC110 - rows have no event
            await asyncio.sleep(_LOOK_S)
        return committed

    async def _land(self, planned: Planned) -> Hit:
        trap, _ = KNOWN[planned.cell.component, planned.cell.moment]
        await asyncio.sleep(planned.delay * _WHOLE_S)
        began = time.monotonic()
        while True:
            tried_s = time.monotonic() - began
            hit = await trap(self._stage, planned.cell, max(1, int(_MUCH * (1 - tried_s / _PATIENCE_S))))
            if hit is not None:
                return hit
            await asyncio.sleep(_TRY_AGAIN_S)

    async def _started(self, cell: Cell, hit: Hit) -> float | None:
        async def ready() -> datetime | None:
            process = self._stage.ready(cell.part)
            return None if process is None or process == hit.process else datetime.now(UTC)

        return await _seconds_until(ready, hit)

    async def _recovered(self, cell: Cell, hit: Hit) -> float | None:
        rows = self._stage.rows
        seen = rows.stepped if cell.moment is Moment.STEP else rows.went_round
        return await _seconds_until(lambda: seen(hit.at), hit)

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


async def _seconds_until(happened: Callable[[], Awaitable[datetime | None]], hit: Hit) -> float | None:
    """From the kill until what `happened` says; None where it does not within two minutes."""
    began = time.monotonic()
    while time.monotonic() - began < _RECOVERS_WITHIN_S:
        found = await happened()
        if found is not None:
            return (found - hit.at).total_seconds()
        await asyncio.sleep(_LOOK_S)
    return None


def _seconds(value: float | None) -> str:
    return "more than two minutes" if value is None else f"{value:.1f} s"
