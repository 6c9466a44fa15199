"""A Temporal and a Postgres of the fault bench's own, started through the dev stack's parts, that may be away a while.

Invariant: a server that died is started again at its address and with its data, once its `rest` is over; so whoever
kills one need not start it. Their processes are named among the points, so that a fault can strike them.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from atropos.cli.stack.child import Child
from atropos.cli.stack.files import StackHome
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.plan import Plan, make_plan
from atropos.cli.stack.state import Kept, PartStatus
from atropos.db.migrate import upgrade

from ..support.armed import Armed

POSTGRES: Final = "postgres"
TEMPORAL: Final = "temporal"
_LOOK_S: Final = 0.05
_STARTS_WITHIN_S: Final = 60.0


@dataclass
class Servers:
    """Both, kept up. `rest`: seconds that a server stays away once it died."""

    plan: Plan
    children: list[Child]
    points: Armed
    rest: dict[str, float] = field(default_factory=dict)
    _away: dict[str, float] = field(default_factory=dict)

    @property
    def database(self) -> str:
        assert self.plan.database_url is not None
        return self.plan.database_url.get_secret_value()

    @property
    def temporal(self) -> str:
        assert self.plan.temporal_address is not None
        return self.plan.temporal_address

    def up(self, name: str) -> bool:
        return next(child for child in self.children if child.part.name == name).status is PartStatus.READY

    def look(self) -> None:
        """Start what is to be started, and name what was."""
        now = time.monotonic()
        for child in self.children:
            name, before = child.part.name, child.process
            child.look(now)
            if child.status is PartStatus.BACKOFF and name not in self._away:
                self._away[name] = now + self.rest.get(name, 0.0)
            if child.wants_start(now, set()) and now >= self._away.get(name, 0.0):
                child.start()
            if child.process is not None and child.process != before:
                self._away.pop(name, None)
                child.failures = 0  # a bench kills often, and each time it is the first
                self.points.name(name, child.process.pid)

    async def keep(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)

    async def all_up(self) -> None:
        async with asyncio.timeout(_STARTS_WITHIN_S):
            while not all(self.up(child.part.name) for child in self.children):  # noqa: ASYNC110 - looked at
                await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def servers(home: Path, points: Armed) -> AsyncIterator[Servers]:
    """Both in `home`, which others must be able to enter where we are root, for the block."""
    place = StackHome(home)
    place.prepare()
    plan = make_plan(place, StackOptions(workers=False, migrate=False), Kept())
    place.temporal_profile.write_text(plan.temporal_profile or "")
    made = Servers(plan, [Child(part, place.log(part.name)) for part in plan.parts], points)
    keeping = asyncio.create_task(made.keep())
    try:
        await made.all_up()
        upgrade(made.database)
        yield made
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})
        for child in made.children:  # a Postgres that is killed leaves shared memory; a Temporal takes its time
            child.signal(signal.SIGKILL if child.part.name == TEMPORAL else child.part.stop_signal)
        for child in made.children:
            while child.running():
                child.look(time.monotonic())
                await asyncio.sleep(_LOOK_S)
