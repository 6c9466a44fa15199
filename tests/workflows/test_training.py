"""Runs that train, end to end: a real trainer, real checkpoints, an engine that holds what it was told to load."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from atropos.activities import publishing
from atropos.cli.audit import audit
from atropos.cli.errors import CommandError
from atropos.cli.run_fork import forked
from atropos.contracts.ids import trainer_workflow_id, weight_label
from atropos.contracts.states import RunState
from atropos.db.batches import train_steps
from atropos.db.engines import version_paths
from atropos.db.evaluations import get_evaluation
from atropos.db.publishing import Wanted
from atropos.db.runs import get_run
from atropos.inference.connection import _LABEL_S
from atropos.inference.control import EngineControl
from atropos.inference.probe import Judgement
from atropos.trainer.tracking import LAST_STEP
from temporalio.client import WorkflowFailureError

from ..support.scripted import make_model, served
from ..support.weights import WeightedEngine, add_weights, every_other
from ..support.world import World, new_namespace


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_weights(make_model(tmp_path_factory.mktemp("policy")))


@pytest.fixture
async def world(temporal_address: str, database_url: str, policy: Path, tmp_path: Path) -> AsyncIterator[World]:
    async with served(WeightedEngine(policy, every_other("nothing", "something"))) as engine:
        yield World(await new_namespace(temporal_address), database_url, engine, tmp_path / "checkpoints")


def rows(world: World, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(world.database) as connection:
        return connection.execute(query, values).fetchall()


def holds(world: World) -> WeightedEngine:
    assert isinstance(world.engine, WeightedEngine)
    return world.engine


async def until(true: Callable[[], object]) -> None:
    """Wait until something is so, for at most a minute."""
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - rows and another process have no event
            await asyncio.sleep(0.05)


async def test_a_run_trains_its_steps_and_every_version_reaches_the_engine(world: World) -> None:
    sets = [{"id": "Effects", "split": "eval", "tasks": 2}]
    document = world.training("Effects", steps=3, eval={"sets": sets, "every": 1, "at_start": True})
    async with world.workers() as services:
        result = await asyncio.wait_for(world.run(document), 90)
        steps = await train_steps(services.store, result.run_id)
        pinned = [(await get_evaluation(services.store, result.run_id, name)) for name in (
            "start-Effects-eval", "step1-Effects-eval", "step2-Effects-eval", "end-Effects-eval"
        )]  # fmt: skip
    run_id = result.run_id
    assert result.state is RunState.COMPLETED
    assert [(step.step, step.version, step.groups) for step in steps] == [(0, 1, 2), (1, 2, 2), (2, 3, 2)]
    assert holds(world).label == weight_label(run_id, 3)
    published = rows(world, "SELECT version, state FROM publications WHERE run_id = %s ORDER BY version", run_id)
    assert published == [(version, "verified") for version in range(4)]
    assert [one.policy_version for one in pinned] == [0, 1, 2, 3]
    wrong = rows(
        world,
        "SELECT DISTINCT e.name, t.policy_version FROM turns t JOIN groups g USING (run_id, group_no)"
        " JOIN evaluations e ON e.run_id = g.run_id AND e.name = g.evaluation"
        " WHERE t.run_id = %s AND t.policy_version <> e.policy_version",
        run_id,
    )
    assert wrong == []
    trained = rows(world, "SELECT count(*) FROM groups WHERE run_id = %s AND state = 'trained'", run_id)
    assert trained == [(6,)]
    assert rows(world, "SELECT count(*) FROM turns WHERE run_id = %s AND provisional", run_id) == [(0,)]
    kept = {folder.name[:14] for folder in (world.checkpoints or Path()).glob("*/version-*")}
    # The first one may stay, where its evaluation had not ended when the last step looked.
    assert kept - {"version-000001"} == {"version-000002", "version-000003"}


async def test_a_last_version_that_an_engine_failed_to_take_is_given_to_it_before_the_run_ends(world: World) -> None:
    engine = holds(world)
    async with world.workers():
        handle = await world.start(world.training("Effects", steps=1))
        last = engine.fails_to_name = weight_label(handle.id, 1)
        assert (await asyncio.wait_for(handle.result(), 60)).state is RunState.COMPLETED
    assert engine.fails_to_name is None
    assert engine.label == last
    assert engine.loaded[-1] == engine.loaded[-2]


async def test_a_run_that_trains_is_sound_at_every_moment(world: World) -> None:
    document = world.training("Effects", steps=3)
    looks = 0
    async with world.workers() as services:
        handle = await world.start(document)
        ended = asyncio.create_task(handle.result())
        while await get_run(services.store, handle.id) is None:  # noqa: ASYNC110 - what is awaited is a row
            await asyncio.sleep(0.1)
        while not ended.done():
            assert (await audit(services.store, world.client, handle.id)).violations == ()
            looks += 1
        assert (await ended).state is RunState.COMPLETED
        found = await audit(services.store, world.client, handle.id)
    assert looks > 2
    assert (found.violations, found.unknown, found.checked["steps"]) == ((), 0, 3)


async def test_rollouts_stay_within_the_staleness_bound(world: World) -> None:
    document = world.training("Effects", steps=4, staleness={"max": 1})
    async with world.workers():
        run_id = (await asyncio.wait_for(world.run(document), 90)).run_id
    stale = rows(world, "SELECT max(staleness), count(*) FROM train_steps WHERE run_id = %s", run_id)
    assert stale[0][1] == 4
    assert stale[0][0] <= 1


async def test_groups_without_signal_are_filtered_counted_and_replaced(world: World) -> None:
    answers = iter(["nothing"] * 4 + ["nothing", "something"] * 1000)
    world.engine.script = lambda prompt, turn: next(answers)
    async with world.workers() as services:
        run_id = (await asyncio.wait_for(world.run(world.training("Effects", steps=1)), 60)).run_id
        (step,) = await train_steps(services.store, run_id)
    filtered = rows(world, "SELECT count(*) FROM groups WHERE run_id = %s AND state = 'filtered'", run_id)[0][0]
    assert filtered >= 1
    assert step.metrics["filtered_groups"] == filtered
    assert step.metrics["rewards"] == 2 * (2 + filtered)


async def test_an_engine_that_was_restarted_is_given_the_version_it_should_hold(world: World) -> None:
    document = world.training("Effects", steps=2)
    async with world.workers():
        handle = await world.start(document)
        await until(lambda: rows(world, "SELECT FROM train_steps WHERE run_id = %s", handle.id))
        holds(world).restart()
        result = await asyncio.wait_for(handle.result(), 90)
    assert result.state is RunState.COMPLETED
    assert holds(world).label == weight_label(handle.id, 2)
    lives = rows(world, "SELECT DISTINCT incarnation FROM publications WHERE run_id = %s ORDER BY 1", handle.id)
    assert lives == [("scripted",), ("scripted+",)]
    unknown = rows(world, "SELECT spans FROM turns WHERE run_id = %s AND spans::text LIKE '%%default%%'", handle.id)
    assert unknown == []


async def test_a_restarted_engine_is_asked_for_nothing_until_weights_of_the_run_are_loaded_into_it(
    world: World,
) -> None:
    engine = holds(world)
    async with world.workers():
        handle = await world.start(world.training("Effects", steps=3))
        await until(lambda: rows(world, "SELECT FROM train_steps WHERE run_id = %s", handle.id))
        asked = len(engine.asked_with)
        engine.loadable.clear()
        try:
            engine.down = True
            await asyncio.sleep(2 * _LABEL_S)  # no process starts anew sooner
            engine.restart()
            engine.down = False
            await asyncio.sleep(3)
        finally:
            engine.loadable.set()
        assert (await asyncio.wait_for(handle.result(), 90)).state is RunState.COMPLETED
    assert (engine.incarnation, engine.label) == ("scripted+", weight_label(handle.id, 3))
    assert len(engine.asked_with) > asked
    assert "default" not in engine.asked_with


async def test_wrong_weights_are_quarantined_with_a_reason_and_healed_by_a_right_load(
    world: World, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atropos.activities.publishing._AGAIN_S", 0.5)
    document = world.training("Effects", steps=2)
    async with world.workers():
        handle = await world.start(document)
        await until(lambda: holds(world).label == weight_label(handle.id, 0))
        holds(world).loads_instead = policy
        quarantined = "SELECT reason FROM engines WHERE run_id = %s AND state = 'quarantined'"
        await until(lambda: rows(world, quarantined, handle.id))
        assert "the engine holds other weights" in rows(world, quarantined, handle.id)[0][0]
        holds(world).loads_instead = None
        result = await asyncio.wait_for(handle.result(), 90)
    assert result.state is RunState.COMPLETED
    assert rows(world, "SELECT state FROM engines WHERE run_id = %s", handle.id) == [("ready",)]
    bad = rows(
        world,
        "SELECT count(*) FROM batch_groups b JOIN episodes e USING (run_id, group_no) JOIN turns t"
        " USING (run_id, group_no, member, attempt) WHERE b.run_id = %s AND e.state = 'done' AND t.provisional",
        handle.id,
    )
    assert bad == [(0,)]


async def test_an_engine_whose_publisher_died_before_the_proof_is_asked_for_it_and_not_loaded_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[str] = []
    proved = publishing.proved

    async def dies_once(control: EngineControl, verify: str, target: Wanted) -> Judgement:
        if target.version and not died:
            died.append(target.label)
            raise asyncio.CancelledError
        return await proved(control, verify, target)

    monkeypatch.setattr(publishing, "proved", dies_once)
    async with world.workers() as services:
        result = await asyncio.wait_for(world.run(world.training("Effects", steps=3)), 90)
        found = await audit(services.store, world.client, result.run_id)
    assert result.state is RunState.COMPLETED
    assert len(died) == 1
    assert len(holds(world).loaded) == len(set(holds(world).loaded)) > 1  # a version may be overtaken by the next
    assert holds(world).label == weight_label(result.run_id, 3)
    assert rows(world, "SELECT DISTINCT state FROM episodes WHERE run_id = %s", result.run_id) == [("done",)]
    assert found.violations == ()


async def test_a_run_that_trains_goes_on_with_an_empty_temporal(world: World, temporal_address: str) -> None:
    document = world.training("Effects", steps=4)
    async with world.workers():
        handle = await world.start(document)
        await until(lambda: rows(world, "SELECT FROM train_steps WHERE run_id = %s", handle.id))
    world.client = await new_namespace(temporal_address)
    async with world.workers() as services:
        result = await asyncio.wait_for(world.client.get_workflow_handle(handle.id).result(), 120)
        steps = await train_steps(services.store, handle.id)
    assert result["state"] == RunState.COMPLETED
    assert [step.step for step in steps] == [0, 1, 2, 3]
    twice = rows(
        world,
        "SELECT group_no FROM batch_groups WHERE run_id = %s AND live GROUP BY 1 HAVING count(*) > 1",
        handle.id,
    )
    assert twice == []


async def test_a_second_run_is_refused_an_engine_that_is_trained(world: World) -> None:
    async with world.workers():
        first = await world.start(world.training("Effects", steps=1000))
        await until(lambda: rows(world, "SELECT FROM train_steps WHERE run_id = %s", first.id))
        second = await world.start(world.document("Effects"))
        with pytest.raises(WorkflowFailureError) as refused:
            await asyncio.wait_for(second.result(), 60)
        assert f"is in use by {first.id}, which trains it" in str(refused.value.cause)
        assert rows(world, "SELECT FROM runs WHERE run_id = %s", second.id) == []
        await first.execute_update("cancel", "enough")
        assert (await asyncio.wait_for(world.run(world.document("Effects")), 60)).state is RunState.COMPLETED


async def test_a_cancelled_run_stops_its_trainer(world: World) -> None:
    async with world.workers():
        handle = await world.start(world.training("Effects", steps=1000))
        await until(lambda: rows(world, "SELECT FROM train_steps WHERE run_id = %s", handle.id))
        await handle.execute_update("cancel", "enough")
        await asyncio.wait_for(handle.result(), 60)
        trainer = world.client.get_workflow_handle(trainer_workflow_id(handle.id))
        await asyncio.wait_for(trainer.result(), 30)
    assert rows(world, "SELECT state FROM runs WHERE run_id = %s", handle.id) == [("cancelled",)]


async def test_a_trainer_that_cannot_load_its_model_fails_the_run_with_a_sentence(world: World, tmp_path: Path) -> None:
    bare = make_model(tmp_path / "bare")
    async with world.workers():
        handle = await world.start(world.training("Effects", model={"path": str(bare)}))
        with pytest.raises(WorkflowFailureError):
            await asyncio.wait_for(handle.result(), 60)
    ((state, reason),) = rows(world, "SELECT state, reason FROM runs WHERE run_id = %s", handle.id)
    assert state == "failed"
    assert "version 0 cannot be loaded" in reason


async def test_a_fork_begins_with_the_weights_of_its_version_and_keeps_its_own_copy(world: World) -> None:
    async with world.workers() as services:
        parent = (await asyncio.wait_for(world.run(world.training("Effects", steps=2)), 90)).run_id
        row = await get_run(services.store, parent)
        assert row is not None
        with pytest.raises(CommandError, match=r"no weights of version 7 on this machine \(kept: 0, 1, 2\)"):
            await forked(services.store, row, 7, (), ())
        config = await forked(services.store, row, 1, ["trainer.steps=1"], ())
        child = (await asyncio.wait_for(world.run(config.model_dump(mode="json", exclude_unset=True)), 90)).run_id
        paths = await version_paths(services.store, child)
    begun, taken = Path(paths[0] or ""), Path(config.model.init_from or "")
    assert begun != taken
    assert (begun / "model.safetensors").read_bytes() == (taken / "model.safetensors").read_bytes()
    assert "version-000001" in str(taken)
    assert rows(world, "SELECT max(step) FROM train_steps WHERE run_id = %s", child) == [(0,)]


async def test_metrics_reach_wandb_offline_once_a_step(world: World, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    world.settings = {**world.settings, "home": tmp_path / "home"}
    document = world.training("Effects", steps=2, wandb={"project": "test", "mode": "offline"})
    async with world.workers():
        run_id = (await asyncio.wait_for(world.run(document), 90)).run_id
        folder = tmp_path / "home" / "wandb" / quote(run_id, safe="")
        last = folder / LAST_STEP
        await until(lambda: last.is_file() and json.loads(last.read_text())["step"] == 2)
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
