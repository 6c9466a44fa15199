"""Runs that train with a dev engine that samples in earnest, in a process of its own that dies in the middle."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from atropos.contracts.engines import EngineKind
from atropos.contracts.ids import weight_label
from atropos.contracts.states import RunState
from atropos.contracts.training import TrainerConfig
from atropos.db.audit import audit_run
from atropos.db.encoding import unpack_floats, unpack_ids
from atropos.inference.engines import EngineAddress
from atropos.inference.vllm_control import VllmControl
from atropos.settings import child_environment
from atropos.tests.inference.engine.conftest import Running
from atropos.trainer.learner import Learner

from ..support.dev_engine import dev_engine, free_port
from ..support.scripted import make_model
from ..support.weights import add_weights
from ..support.world import ENVIRONMENTS, World, new_namespace

EXAMPLE = Path(__file__).parents[2] / "examples" / "external_trainer.py"
LIMIT_S = 120.0
SAME = 1e-3
"""Nats a token: engine and trainer compute the same weights in float32, differently."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_weights(make_model(tmp_path_factory.mktemp("policy")))


@pytest.fixture
async def world(temporal_address: str, database_url: str, tmp_path: Path) -> World:
    settings = {"shutdown_grace_s": 1.0, "tool_processes": 1, "home": tmp_path / "home"}
    return World(await new_namespace(temporal_address), database_url, None, settings=settings)  # type: ignore[arg-type]


def document(model: Path, url: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": "sampled",
        "model": {"path": str(model)},
        "engines": [{"kind": "dev", "url": url, "concurrency": 4}],
        "environments": [{"id": f"{ENVIRONMENTS}:Letters", "group_size": 2}],
        "sampling": {"max_tokens": 48},
        "batch": {"groups": 2},
        **changes,
    }


def rows(world: World, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(world.database) as connection:
        return connection.execute(query.encode(), values).fetchall()


async def until(true: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - rows and other processes have no event
            await asyncio.sleep(0.02)


@asynccontextmanager
async def aside(block: AbstractContextManager[Running]) -> AsyncIterator[Running]:
    """The same, without holding up the workers of this process while it begins and ends."""
    running = await asyncio.to_thread(block.__enter__)
    try:
        yield running
    finally:
        await asyncio.to_thread(block.__exit__, None, None, None)


async def label_of(url: str) -> str:
    control = VllmControl(EngineAddress("dev", EngineKind.DEV, url))
    try:
        return (await control.weight_info()).label
    finally:
        await control.close()


def off(world: World, run_id: str) -> list[tuple[float, float]]:
    """Of every span of a confirmed turn: how far its logprobs are from those of the version it names, and how near to
    those of any other. Computed anew from the checkpoints."""
    found = rows(world, "SELECT version, path FROM policy_versions WHERE run_id = %s ORDER BY version", run_id)
    config = TrainerConfig()
    learners = {
        version: Learner.restore(Path(path), config) if version else Learner.fresh(Path(path), config, 0)
        for version, path in found
    }
    query = (
        "SELECT prompt_delta, sampled, logprobs, spans FROM turns"
        " WHERE run_id = %s AND NOT provisional AND turn = 0 AND sampled <> ''"
    )
    distances = []
    for delta, sampled, logprobs, spans in rows(world, query, run_id):
        prompt, said, drawn = unpack_ids(delta), unpack_ids(sampled), unpack_floats(logprobs)
        computed = {v: learner.logprobs([prompt + said])[0][len(prompt) - 1 :] for v, learner in learners.items()}
        for span in spans:
            _, version, start, end = span[:4]
            apart = {v: max(abs(drawn[at] - row[at]) for at in range(start, end)) for v, row in computed.items()}
            distances.append((apart.pop(version), min(apart.values())))
    return distances


async def test_an_engine_killed_while_it_samples_comes_back_with_old_weights_and_no_token_has_the_wrong_version(
    world: World, model: Path, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    trainer = {"kind": "builtin", "steps": 4, "optim": {"lr": 1e-2, "warmup": 0}, "checkpoint": {"keep": 100}}
    journal = tmp_path / "journal"
    async with world.workers() as services:
        async with aside(dev_engine(model, journal, port)) as engine:
            handle = await world.start(document(model, url, trainer=trainer))
            later = "SELECT FROM turns WHERE run_id = %s AND policy_version >= 1"
            await until(lambda: rows(world, later, handle.id))
            seen = len(engine.lines())
            await until(lambda: len(engine.lines()) > seen)  # it is in the middle of an answer
            engine.process.kill()
            engine.process.wait()
        async with aside(dev_engine(model, journal, port)):
            result = await asyncio.wait_for(handle.result(), LIMIT_S)
            assert await label_of(url) == weight_label(handle.id, 4)
        audit = await audit_run(services.store, handle.id)
    assert result.state is RunState.COMPLETED
    assert audit.violations == ()
    lives = rows(world, "SELECT count(DISTINCT incarnation) FROM publications WHERE run_id = %s", handle.id)
    assert lives == [(2,)]
    spans = off(world, handle.id)
    assert len(spans) >= 16
    assert max(distance for distance, _ in spans) < SAME
    assert sum(other > 2 * SAME for _, other in spans) > len(spans) / 2  # or no wrong version could be seen


async def example(world: World, run_id: str, folder: Path) -> Process:
    """The example as a user starts it."""
    variables = {"DATABASE_URL": world.database, "ATROPOS_HOME": str(folder / "home")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLE), run_id, "--checkpoints", str(folder / "external")),
        env=child_environment(variables, inherit=True),
        stdout=PIPE,
        stderr=STDOUT,
    )


async def kill_in_a_step(world: World, run_id: str, process: Process) -> None:
    """When it holds a batch that it has not committed, and not its first one."""
    held = "SELECT FROM batches WHERE run_id = %s AND state = 'leased' AND step > 0 AND fence > 0"
    while process.returncode is None:
        await until(lambda: rows(world, held, run_id))
        process.send_signal(signal.SIGSTOP)
        if rows(world, held, run_id):
            break
        process.send_signal(signal.SIGCONT)
    process.kill()
    await process.wait()


async def test_the_example_of_an_external_trainer_trains_a_run_and_may_die_in_a_step(
    world: World, model: Path, tmp_path: Path
) -> None:
    async with world.workers() as services, aside(dev_engine(model, tmp_path / "journal")) as engine:
        url = f"{engine.url}/v1"
        handle = await world.start(document(model, url, trainer={"kind": "external", "steps": 3}))
        await kill_in_a_step(world, handle.id, await example(world, handle.id, tmp_path))
        again = await example(world, handle.id, tmp_path)
        result = await asyncio.wait_for(handle.result(), LIMIT_S)
        said, _ = await asyncio.wait_for(again.communicate(), LIMIT_S)
        assert await label_of(url) == weight_label(handle.id, 3)
        audit = await audit_run(services.store, handle.id)
    assert (result.state, again.returncode) == (RunState.COMPLETED, 0), said.decode()
    assert "version 3: loss" in said.decode()
    assert audit.violations == ()
    steps = rows(world, "SELECT step, version, groups FROM train_steps WHERE run_id = %s ORDER BY step", handle.id)
    assert steps == [(number, number + 1, 2) for number in range(3)]
    [(fence,)] = rows(world, "SELECT max(fence) FROM train_steps WHERE run_id = %s", handle.id)
    assert fence == 2
    proved = "SELECT state FROM publications WHERE run_id = %s AND version = 3"
    assert rows(world, proved, handle.id) == [("verified",)]
    kept = {folder.name for folder in (tmp_path / "external").glob("*/version-*")}
    needed = rows(world, "SELECT path FROM policy_versions WHERE run_id = %s AND version >= 2", handle.id)
    assert kept == {Path(path).name for (path,) in needed}
