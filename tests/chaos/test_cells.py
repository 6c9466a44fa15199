"""The cells of the fault bench, and what a person is told meanwhile: a run that trains ends as undisturbed, whatever is
struck and when."""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.states import RunState
from atropos.db.audit import audit_run

from ..support.armed import STOP, strike
from ..support.scripted import scripted_engine
from ..support.world import World, new_namespace
from .bench import Bench, bench
from .cells import CELLS, POINTS, QUICK
from .conftest import Why, until_said
from .parts import says

SEED = 0
EVERY: list[Any] = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CELLS]


@pytest.fixture(scope="module")
async def made() -> AsyncIterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="atropos-chaos-", dir="/tmp"))
    folder.chmod(0o755)
    async with bench(folder) as found:
        yield found
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", EVERY)
async def test_a_fault_changes_no_step_no_effect_and_no_weight(made: Bench, name: str) -> None:
    verdict = await made.play(CELLS[name], SEED)
    assert verdict.problems == ()


def test_seeds_reach_every_pass_of_a_point_and_no_other() -> None:
    cell = CELLS["trainer/half-written"]
    assert {cell.passes(seed) for seed in range(50)} == set(range(POINTS[cell.point].passes))


SILENT = "its worker gives no sign of life"


@pytest.mark.parametrize(
    ("worker", "point", "words"),
    [
        pytest.param("workflows", "effect", "Its workflow has not answered within 3 s", id="workflows"),
        pytest.param(
            "activities",
            "sample_turn.paid",
            "its worker gives no sign of life",
            id="activities",
            marks=pytest.mark.slow,
        ),
        pytest.param("trainer", "gradient", "its worker gives no sign of life", id="trainer", marks=pytest.mark.slow),
    ],
)
async def test_a_worker_that_hangs_is_told_and_goes_on(
    made: Bench, why: Why, worker: str, point: str, words: str
) -> None:
    made.points.arm(point, f"{STOP}:{worker}", passes=0)
    run_id = await made.start(SEED)
    try:
        await made.until(lambda: made.points.stopped(point))
        await until_said(why, words, run_id, made.client, made.servers.database)
    finally:
        strike(made.points.pid(worker), signal.SIGCONT)
    made.points.forget(point)
    assert await made.judge(run_id, made.undisturbed.get(SEED)) == []


@pytest.mark.parametrize(
    ("server", "words"), [("temporal", "Temporal does not answer at"), ("postgres", "cannot be reached")]
)
async def test_a_server_that_is_away_is_told_and_what_was_paid_for_is_not_bought_again(
    made: Bench, why: Why, server: str, words: str
) -> None:
    """The engine is held while it answers the first turn; the server is gone before it may go on."""
    database = made.servers.database
    async with scripted_engine(made.model, says) as engine:
        world = World(await new_namespace(made.servers.temporal), database, engine)
        engine.hold(0)
        async with world.workers() as services:
            handle = await world.start(world.document("Points", environment={"group_size": 1}, budget={"groups": 1}))
            await asyncio.wait_for(engine.waiting.wait(), 60)
            made.servers.rest[server] = 6.0
            strike(made.points.pid(server), signal.SIGKILL)
            await made.until(lambda: not made.servers.up(server))
            engine.release()
            assert words in await why(handle.id, world.client, database)
            assert await made.ended(handle.id) == RunState.COMPLETED
            await made.servers.all_up()
            assert (await audit_run(services.store, handle.id)).violations == ()
    del made.servers.rest[server]
    episode = EpisodeKey(run_id=handle.id, group_no=0, member=0).workflow_id
    asked = engine.asked(episode)
    assert asked == [0, 1, 2]
    assert made.rows("SELECT state, failure, reward FROM episodes WHERE run_id = %s", handle.id) == [
        ("done", None, 1.0)
    ]
