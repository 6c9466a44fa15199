"""The fault bench: a small run that trains, one fault in it, and what must be so when it has ended.

The run is whole: two steps over groups of its own, tools with effects outside, an engine that is given each version.
What is said and earned depends on the task alone, and a step waits for the version before, so its weights are those of
the same run undisturbed, to the bit.

Servers, engine and workers are processes of the bench's own and serve one cell after another.
"""

import asyncio
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
from atropos.contracts.queues import WORKFLOWS
from atropos.contracts.workflows import RUN_WORKFLOW
from atropos.db.audit import audit_run
from atropos.db.errors import StoreError
from atropos.db.store import Store, open_store
from atropos.environments.registry import load
from atropos.settings import child_environment
from temporalio.client import Client
from temporalio.service import RPCError

from ..support.armed import Armed, strike
from ..support.lives import supervised
from ..support.scripted import make_model
from ..support.weights import add_weights
from ..support.world import ENVIRONMENTS, new_namespace
from .cells import GROUPS, MEMBERS, STEPS, TURNS, Cell, Fault
from .parts import MODULE
from .servers import Servers, servers

ENDS_WITHIN_S: Final = 150.0
_LOOK_S: Final = 0.05
_ENVIRONMENT: Final = f"{ENVIRONMENTS}:Points"


@dataclass(frozen=True)
class Verdict:
    """What became of a cell. `problems`: what is not as it must be, in words."""

    cell: str
    seed: int
    seconds: float
    problems: tuple[str, ...]

    def __str__(self) -> str:
        told = "; ".join(self.problems) or "whole: every step, effect and weight as undisturbed"
        return f"{'FAILED' if self.problems else 'ok    '} {self.cell} seed {self.seed} ({self.seconds:.1f} s): {told}"


@dataclass
class Bench:
    """Where runs are played."""

    client: Client
    servers: Servers
    points: Armed
    folder: Path
    model: Path
    engine: str
    undisturbed: dict[int, list[str]] = field(default_factory=dict)
    """Seed → what names the content of each checkpoint."""

    async def play(self, cell: Cell, seed: int) -> Verdict:
        """Play the run of `seed` with the fault of `cell` in it."""
        if seed not in self.undisturbed:
            calm = await self.start(seed)
            problems = await self.judge(calm, None)
            if problems:
                return Verdict("undisturbed", seed, 0.0, tuple(problems))
            self.undisturbed[seed] = self.digests(calm)
        began = time.monotonic()
        self.strike_later(cell, cell.passes(seed))
        run_id = await self.start(seed)
        async with asyncio.TaskGroup() as group:
            waking = group.create_task(self._wake(cell))
            problems = await self.judge(run_id, self.undisturbed[seed])
            waking.cancel()
        self._forget(cell)
        if self.points.waiting(cell.point):
            (self.points.folder / cell.point).unlink()
            problems.append(f"{cell.point} was never reached")
        return Verdict(cell.name, seed, time.monotonic() - began, tuple(problems))

    def strike_later(self, cell: Cell, passes: int) -> None:
        if cell.fault is Fault.AWAY:
            self.stay_away(cell.component, cell.for_s)
        self.points.arm(cell.point, cell.action, passes)

    def stay_away(self, component: str, seconds: float) -> None:
        """Whenever it dies from now on, it comes back only after so long."""
        self.servers.rest[component] = seconds
        (self.points.folder / f"{component}.rest").write_text(str(seconds))

    def _forget(self, cell: Cell) -> None:
        self.servers.rest.pop(cell.component, None)
        (self.points.folder / f"{cell.component}.rest").unlink(missing_ok=True)

    async def _wake(self, cell: Cell) -> None:
        """Who was stopped goes on after its time, whatever happens to us."""
        if cell.fault is not Fault.HANG:
            return
        try:
            while self.points.stopped(cell.point) is None:  # noqa: ASYNC110 - another process says so
                await asyncio.sleep(_LOOK_S)
            await asyncio.sleep(cell.for_s)
        finally:
            stopped = self.points.stopped(cell.point)
            if stopped is not None:
                strike(stopped, signal.SIGCONT)
                self.points.forget(cell.point)

    async def start(self, seed: int, **changes: Any) -> str:
        """Start a run; its id."""
        run_id = f"run/chaos-{uuid.uuid4().hex[:6]}"
        effects = self.effects(run_id)
        effects.mkdir(parents=True)
        arguments = {"folder": str(effects), "points": str(self.points.folder), "first": 1000 * seed}
        document = {
            "name": "chaos",
            "seed": seed,
            "model": {"path": str(self.model)},
            "engines": [{"kind": "dev", "url": f"{self.engine}/v1", "concurrency": 8}],
            "environments": [{"id": _ENVIRONMENT, "group_size": MEMBERS, "args": arguments}],
            "batch": {"groups": GROUPS},
            "staleness": {"max": 0},
            "publish": {"verify": "checksum"},
            "trainer": {
                "kind": "builtin",
                "steps": STEPS,
                "optim": {"lr": 1e-2, "warmup": 0},
                "checkpoint": {"dir": str(self.folder / "checkpoints"), "keep": 2},
            },
            **changes,
        }
        async with asyncio.timeout(60):
            while True:
                with suppress(RPCError):
                    await self.client.start_workflow(RUN_WORKFLOW, document, id=run_id, task_queue=WORKFLOWS)
                    return run_id
                await asyncio.sleep(_LOOK_S)

    async def ended(self, run_id: str, within_s: float = ENDS_WITHIN_S) -> str:
        """The state in which a run has ended, or that it is in when the time is up."""
        state, until = "unknown", time.monotonic() + within_s
        while time.monotonic() < until:
            with suppress(psycopg.Error, StopIteration):
                state = next(iter(self.rows("SELECT state FROM runs WHERE run_id = %s", run_id)))[0]
                if state not in ("running", "paused"):
                    break
            await asyncio.sleep(4 * _LOOK_S)
        return str(state)

    async def judge(self, run_id: str, digests: Sequence[str] | None) -> list[str]:
        """What is not as it must be once a run has ended, in words."""
        state = await self.ended(run_id)
        await self.servers.all_up()
        if state != "completed":
            return [f"{run_id} is {state}"]
        store = await self._store()
        try:
            found = [f"audit: {one.check} {one.row}" for one in (await audit_run(store, run_id)).violations]
        finally:
            await store.close()
        found += self._training(run_id) + self._episodes(run_id) + self._effects(run_id)
        if digests is not None and self.digests(run_id) != digests:
            found.append("the weights are others")
        return found

    async def _store(self) -> Store:
        async with asyncio.timeout(30):
            while True:
                with suppress(StoreError):
                    return await open_store(self.servers.database)
                await asyncio.sleep(_LOOK_S)

    def _training(self, run_id: str) -> list[str]:
        steps = self.rows("SELECT step, version, groups FROM train_steps WHERE run_id = %s ORDER BY 1", run_id)
        groups = self.rows(
            "SELECT g.state, count(*), count(DISTINCT group_no) FROM groups g JOIN batch_groups b"
            " USING (run_id, group_no) WHERE run_id = %s AND b.live GROUP BY 1",
            run_id,
        )
        alone = self.rows("SELECT state, count(*) FROM groups WHERE run_id = %s GROUP BY 1", run_id)
        count = STEPS * GROUPS
        wanted = {
            "steps": (steps, [(step, step + 1, GROUPS) for step in range(STEPS)]),
            "groups in batches": (groups, [("trained", count, count)]),
            "groups": (alone, [("trained", count)]),
        }
        return [f"{what}: {seen}" for what, (seen, right) in wanted.items() if seen != right]

    def _episodes(self, run_id: str) -> list[str]:
        """Each member once, at its first try, with its own reward; every turn and call once."""
        episodes = self.rows(
            "SELECT member, attempt, state, failure, reward, count(*) FROM episodes WHERE run_id = %s"
            " GROUP BY 1, 2, 3, 4, 5 ORDER BY 1",
            run_id,
        )
        right = [(member, 0, "done", None, 1.0 + member, STEPS * GROUPS) for member in range(MEMBERS)]
        count = STEPS * GROUPS * MEMBERS
        found = [] if episodes == right else [f"episodes: {episodes}"]
        for table, each in (("turns", TURNS), ("tool_calls", TURNS - 1)):
            [(rows,)] = self.rows(f"SELECT count(*) FROM {table} WHERE run_id = %s", run_id)
            found += [] if rows == each * count else [f"{table}: {rows}"]
        return found

    def _effects(self, run_id: str) -> list[str]:
        """What happened outside is what the states of the episodes say."""
        effects = sorted(path.stem for path in self.effects(run_id).glob("*.effect"))
        calls = self.rows("SELECT state->'seen' FROM tool_calls WHERE run_id = %s AND turn = %s", run_id, TURNS - 2)
        seen = sorted(key for (keys,) in calls for key in keys)
        count = STEPS * GROUPS * MEMBERS * (TURNS - 1)
        found = [] if effects == seen else [f"{len(effects)} effects outside, {len(seen)} in the rows"]
        return found if len(effects) == count else [*found, f"{len(effects)} effects, not {count}"]

    def effects(self, run_id: str) -> Path:
        return self.folder / "effects" / run_id.replace("/", "-")

    def digests(self, run_id: str) -> list[str]:
        query = "SELECT digest FROM policy_versions WHERE run_id = %s AND version > 0 ORDER BY version"
        return [digest for (digest,) in self.rows(query, run_id)]

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.servers.database, connect_timeout=5) as connection:
            return connection.execute(query.encode(), values).fetchall()

    async def until(self, true: Callable[[], object], within_s: float = 60.0) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(within_s):
            while not true():  # noqa: ASYNC110 - rows and other processes have no event
                await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    """The bench in `folder`, which others must be able to enter where we are root, for the block."""
    points = Armed(folder / "points")
    points.folder.mkdir()
    model = add_weights(make_model(folder / "model", load(_ENVIRONMENT).spec.tool_specs()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(servers(folder / "home", points))
        client = await new_namespace(running.temporal)
        env = child_environment(
            {
                "TEMPORAL_ADDRESS": running.temporal,
                "TEMPORAL_NAMESPACE": client.namespace,
                "DATABASE_URL": running.database,
                "ATROPOS_SHUTDOWN_GRACE_S": "1",
                "ATROPOS_TOOL_PROCESSES": "1",
                "ATROPOS_HOME": str(folder / "workers"),
            },
            inherit=True,
        )
        arguments = ["--points", str(points.folder), "--model", str(model), "--engine-port", str(port)]
        await stack.enter_async_context(supervised(MODULE, arguments, folder / "log", env))
        yield Bench(client, running, points, folder, model, f"http://127.0.0.1:{port}")
