"""Kills beside a run that somebody else watches."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from rich.console import Console

from ..stack.running import RunningStack
from .conductor import Conductor
from .journal import Journal
from .plan import Planned
from .report import ChaosReport, read_chaos
from .rows import Rows
from .stage import Stage

if TYPE_CHECKING:
    from temporalio.client import Client

    from ...db.store import Store


class Chaos:
    """A plan to be carried out beside a run; `report` is there once that run has ended."""

    def __init__(self, planned: Sequence[Planned], console: Console) -> None:
        self._planned, self._console = planned, console
        self.report: ChaosReport | None = None

    @asynccontextmanager
    async def beside(self, stack: RunningStack, store: "Store", client: "Client", run_id: str) -> AsyncIterator[None]:
        """Kill parts of `stack` for as long as the block lasts, which is to wait for the end of the run."""
        if stack.database_url is None:
            raise LookupError("a stack without Postgres")
        journal = Journal(stack.home.engine_journal, run_id)
        stage = Stage(stack.home, Rows(store, run_id), client, journal, stack.database_url.get_secret_value())
        conductor = Conductor(stage, self._planned, self._console)
        task = asyncio.create_task(conductor.conduct())
        try:
            yield
        finally:
            ended = task.done()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if ended:
            task.result()
        self.report = await read_chaos(stage, conductor, self._planned)
