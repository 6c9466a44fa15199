"""Training survives twins and broken engines: each step once, with the very same weights. Deaths at any point are cells
of the fault bench (`tests/chaos`).

The trainer and the publisher are worker processes that are killed or stopped in earnest, and the engine is a process
that holds what it was told to load.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from atropos.cli.errors import CommandError
from atropos.cli.run_steer import abandon, why_engines
from atropos.contracts import activities_training
from atropos.contracts.engines import EngineKind
from atropos.contracts.ids import weight_label
from atropos.contracts.queues import WorkerRole
from atropos.contracts.states import RunState
from atropos.db.engines import engines_of
from atropos.db.runs import get_run
from atropos.inference.control import UNVERSIONED
from atropos.inference.engines import EngineAddress
from atropos.inference.vllm_control import VllmControl
from atropos.tests.inference.engine.conftest import Running
from transformers import AutoTokenizer

from ..support.armed import STOP
from ..support.dev_engine import dev_engine, free_port
from ..support.prefilled import Prefilled, prefilled
from ..support.scripted import make_model
from ..support.weights import add_weights
from ..support.world import World, new_namespace

STEPS = 3
SOON_S = 60.0
NOBODY = "http://127.0.0.1:9/v1"
"""A second engine of every run, which was dead from the start."""


@pytest.fixture(scope="module")
def quick_to_notice() -> Iterator[None]:
    """A dead worker is noticed within seconds. Workflows, which say so, run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PREPARE_TRAINING", "LEASE_BATCH", "TRAIN_STEP", "PUBLISH"):
            known = getattr(activities_training, name)
            patch.setattr(activities_training, name, replace(known, heartbeat=timedelta(seconds=3)))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_weights(make_model(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with dev_engine(model, tmp_path_factory.mktemp("engine") / "journal", free_port()) as running:
        yield running


@pytest.fixture(scope="module")
async def bench(
    temporal_address: str,
    database_url: str,
    model: Path,
    engine: Running,
    tmp_path_factory: pytest.TempPathFactory,
    quick_to_notice: None,
) -> AsyncIterator[Prefilled]:
    """A world a module, with workers for workflows; those that train and publish are the tests' own."""
    folder = tmp_path_factory.mktemp("training")
    client = await new_namespace(temporal_address)
    vocabulary = len(AutoTokenizer.from_pretrained(str(model)))
    engines = [f"{engine.url}/v1", NOBODY]
    async with prefilled(client, database_url, model, engines, folder, vocabulary) as made:
        world = World(client, database_url, engine=None)  # type: ignore[arg-type]
        async with world.workers([WorkerRole.WORKFLOWS]):
            yield made


@pytest.fixture(scope="module")
async def worker(bench: Prefilled) -> AsyncIterator[Prefilled]:
    """With a process that publishes and one that trains."""
    async with bench.worker("publisher", [WorkerRole.CONTROL]), bench.worker("trainer", [WorkerRole.TRAINER]):
        yield bench


@pytest.fixture(scope="module")
async def undisturbed(worker: Prefilled) -> list[str]:
    """The checkpoints of a run to which nothing happens."""
    handle = await worker.start(STEPS)
    within_s = 3 * SOON_S  # both workers have only begun to load what they need
    assert (await asyncio.wait_for(handle.result(), within_s)).state is RunState.COMPLETED
    return worker.digests(handle.id)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not true():  # noqa: ASYNC110 - rows and other processes have no event
            await asyncio.sleep(0.05)


async def label_of(url: str) -> str:
    control = VllmControl(EngineAddress("dev", EngineKind.DEV, url))
    try:
        return (await control.weight_info()).label
    finally:
        await control.close()


async def ended_well(bench: Prefilled, run_id: str, checkpoints: list[str]) -> None:
    """Every step once, with these weights; nothing left behind; the engine at the last version, proved."""
    result = await asyncio.wait_for(bench.client.get_workflow_handle(run_id).result(), SOON_S)
    assert result["state"] == RunState.COMPLETED
    assert bench.digests(run_id) == checkpoints
    last = len(checkpoints)
    steps = bench.rows("SELECT step, version, groups FROM train_steps WHERE run_id = %s ORDER BY step", run_id)
    assert steps == [(number, number + 1, 2) for number in range(last)]
    trained = bench.rows(
        "SELECT g.state, count(*), count(DISTINCT b.group_no) FROM groups g"
        " JOIN batch_groups b USING (run_id, group_no) WHERE run_id = %s AND b.live GROUP BY g.state",
        run_id,
    )
    assert trained == [("trained", 2 * last, 2 * last)]
    assert bench.files(run_id) == bench.kept(run_id)
    assert await label_of(bench.engines[0]) == weight_label(run_id, last)
    proved = bench.rows(
        "SELECT state FROM publications WHERE run_id = %s AND version = %s ORDER BY seq DESC LIMIT 1", run_id, last
    )
    assert proved == [("verified",)]
    engines = bench.rows("SELECT url, state FROM engines WHERE run_id = %s", run_id)
    assert dict(engines) == {bench.engines[0]: "ready", NOBODY: "down"}
    assert bench.rows("SELECT FROM publications WHERE run_id = %s AND state = 'loading'", run_id) == []


async def test_a_dead_engine_holds_nothing_up(worker: Prefilled, undisturbed: list[str]) -> None:
    handle = await worker.start(STEPS)
    await ended_well(worker, handle.id, undisturbed)


@contextmanager
def held(bench: Prefilled, *points: str) -> Iterator[None]:
    """Processes that stop themselves at these points go on at the end of the block, whatever happens in it."""
    try:
        yield
    finally:
        for point in points:
            go_on(bench, point)


def go_on(bench: Prefilled, point: str) -> None:
    process = bench.points.stopped(point)
    if process is not None:
        os.kill(process, signal.SIGCONT)
        bench.points.forget(point)


def owner_of(bench: Prefilled, run_id: str, step: int) -> int:
    """The process that took a batch last."""
    [(owner,)] = bench.rows("SELECT owner FROM batches WHERE run_id = %s AND step = %s", run_id, step)
    return int(owner.rpartition("/")[2])


async def abandoned(worker: Prefilled, until_go_on: Callable[[str], Awaitable[None]], undisturbed: list[str]) -> None:
    """Give a batch up while its trainer, with the checkpoint written, is about to commit it, and let that one go on."""
    worker.points.arm("before-commit", STOP)
    handle = await worker.start(STEPS)
    with held(worker, "before-commit"):
        await until(lambda: worker.points.stopped("before-commit"))
        row = await get_run(worker.store, handle.id)
        assert row is not None
        assert await abandon(worker.store, row) == (
            f"{handle.id}: batch 1 of step 1 is abandoned: its trainer cannot commit it any more, and its 2 groups "
            "are free for the next batch."
        )
        await until_go_on(handle.id)
        go_on(worker, "before-commit")
        await ended_well(worker, handle.id, undisturbed)
    with pytest.raises(CommandError, match="has no batch to abandon"):
        await abandon(worker.store, row)
    batches = worker.rows("SELECT batch_no, step, state FROM batches WHERE run_id = %s ORDER BY 1", handle.id)
    assert batches == [(0, 0, "committed"), (1, 1, "abandoned"), (2, 1, "committed"), (3, 2, "committed")]


async def test_an_abandoned_batch_is_refused_and_its_groups_are_trained_once(
    worker: Prefilled, undisturbed: list[str]
) -> None:
    async def at_once(run_id: str) -> None:
        assert worker.committed(run_id) == 1

    await abandoned(worker, at_once, undisturbed)


async def test_wrong_weights_under_the_right_name_are_told_and_the_next_version_heals(
    worker: Prefilled, undisturbed: list[str], model: Path
) -> None:
    """The trainer is held back twice, so that versions 0 and 1 are published before the next one is there."""
    points, store = worker.points, worker.store
    points.arm("gradient", STOP, passes=0)
    handle = await worker.start(STEPS)
    with held(worker, "gradient"):
        proved = "SELECT FROM publications WHERE run_id = %s AND version = 0 AND state = 'verified'"
        await until(lambda: points.stopped("gradient") and worker.rows(proved, handle.id))
        points.arm("wrong", str(model), passes=0)
    points.arm("gradient", STOP, passes=0)
    with held(worker, "gradient"):
        broken = "SELECT reason FROM engines WHERE run_id = %s AND state = 'quarantined'"
        await until(lambda: points.stopped("gradient") and worker.rows(broken, handle.id))
        [(reason,)] = worker.rows(broken, handle.id)
        assert reason.startswith("version 1: the engine is ")
        assert await label_of(worker.engines[0]) == UNVERSIONED
        told = why_engines(await engines_of(store, handle.id))
        assert f"The engine {worker.engines[0]} is quarantined: {reason}." in told
        events = worker.rows("SELECT text FROM events WHERE run_id = %s AND kind = 'quarantined'", handle.id)
        assert events == [(f"{worker.engines[0]}: {reason}",)]
    await ended_well(worker, handle.id, undisturbed)
    states = dict(worker.rows("SELECT version, state FROM publications WHERE run_id = %s", handle.id))
    assert (states[0], states[1], states[STEPS]) == ("verified", "failed", "verified")


@pytest.fixture(scope="module")
async def pair(worker: Prefilled) -> AsyncIterator[Prefilled]:
    """With a second trainer from here on: it is started once, since that takes longer than what it is needed for."""
    async with worker.worker("twin", [WorkerRole.TRAINER]):
        yield worker


async def test_of_two_living_trainers_one_commits_and_the_other_starts_from_its_step(
    pair: Prefilled, undisturbed: list[str]
) -> None:
    """One stops in the middle of step 1; the other takes it over and commits, then stops itself before it can say
    so. The first wakes up with weights that nobody committed, and has to take the last step."""
    points = pair.points
    points.arm("optimised", STOP)
    handle = await pair.start(STEPS)
    with held(pair, "optimised", "committed"):
        await until(lambda: points.stopped("optimised"))
        first = points.stopped("optimised")
        points.arm("committed", STOP, passes=0)
        await until(lambda: points.stopped("committed"))
        twin = points.stopped("committed")
        assert pair.committed(handle.id) == 2
        assert owner_of(pair, handle.id, 1) == twin != first
        go_on(pair, "optimised")
        await ended_well(pair, handle.id, undisturbed)
        assert owner_of(pair, handle.id, 2) == first
    fences = pair.rows("SELECT fence FROM train_steps WHERE run_id = %s ORDER BY step", handle.id)
    assert fences == [(1,), (2,), (1,)]
    assert pair.files(handle.id) == pair.kept(handle.id)


async def test_groups_of_an_abandoned_batch_are_trained_by_the_other(pair: Prefilled, undisturbed: list[str]) -> None:
    async def once_it_has(run_id: str) -> None:
        await until(lambda: pair.committed(run_id) >= 2)

    await abandoned(pair, once_it_has, undisturbed)


async def test_an_engine_killed_while_it_loads_is_loaded_again_when_it_is_back(
    worker: Prefilled, engine: Running, undisturbed: list[str], model: Path, tmp_path: Path
) -> None:
    """The last one: the engine of all tests is gone after it."""
    port = urlsplit(worker.engines[0]).port or 0
    worker.points.arm("loaded", STOP, passes=0)
    with held(worker, "loaded"):
        handle = await worker.start(STEPS)
        await until(lambda: worker.points.stopped("loaded"))
        engine.process.kill()
        engine.process.wait()
        with dev_engine(model, tmp_path / "journal", port):
            go_on(worker, "loaded")
            await ended_well(worker, handle.id, undisturbed)
    lives = worker.rows(
        "SELECT state FROM publications p WHERE run_id = %s AND seq = (SELECT max(seq) FROM publications"
        " WHERE run_id = p.run_id AND incarnation = p.incarnation) ORDER BY seq",
        handle.id,
    )
    assert lives == [("failed",), ("verified",)]
