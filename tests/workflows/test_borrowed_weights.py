"""Runs without trainer on an engine that an ended run had trained: they sample from its weights and keep them there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from atropos.activities.restoring import why_set_aside
from atropos.cli.audit import audit
from atropos.cli.run_steer import why, why_engines
from atropos.contracts.ids import weight_label
from atropos.contracts.states import RunState
from atropos.db.engines import engines_of, version_paths
from atropos.db.publishing import Wanted
from atropos.db.runs import get_run
from atropos.environments.registry import load

from ..support.scripted import make_model, served
from ..support.weights import WeightedEngine, add_weights, every_other
from ..support.world import ENVIRONMENTS, World, new_namespace
from .conftest import looks_twice

ENDS_WITHIN_S = 90.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tools = load(f"{ENVIRONMENTS}:Effects").spec.tool_specs()
    return add_weights(make_model(tmp_path_factory.mktemp("policy"), tools))


@pytest.fixture
async def engine(policy: Path) -> AsyncIterator[WeightedEngine]:
    async with served(WeightedEngine(policy, every_other("nothing", "something"))) as engine:
        yield engine


@pytest.fixture
async def world(temporal_address: str, database_url: str, engine: WeightedEngine, tmp_path: Path) -> World:
    return World(await new_namespace(temporal_address), database_url, engine, tmp_path / "checkpoints")


def rows(world: World, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(world.database) as connection:
        return connection.execute(query, values).fetchall()


async def begun(world: World, engine: WeightedEngine, **changes: Any) -> Any:
    """A run without trainer whose episodes wait for their second turn: what it samples from is known."""
    engine.script = looks_twice
    engine.hold(1)
    handle = await world.start(world.document("Effects", publish={"verify": "checksum"}, **changes))
    await until_row(world, "SELECT FROM turns WHERE run_id = %s", handle.id)
    return handle


async def until_row(world: World, query: str, run_id: str) -> None:
    async with asyncio.timeout(ENDS_WITHIN_S):
        while not rows(world, query, run_id):  # noqa: ASYNC110 - rows have no event
            await asyncio.sleep(0.1)


async def test_a_restarted_engine_is_given_the_weights_of_the_ended_run_again(
    world: World, engine: WeightedEngine
) -> None:
    async with world.workers() as services:
        parent = (await asyncio.wait_for(world.run(world.training("Effects", steps=2)), ENDS_WITHIN_S)).run_id
        handle = await begun(world, engine)
        given = len(engine.loaded)
        engine.restart()
        engine.release()
        result = await asyncio.wait_for(handle.result(), ENDS_WITHIN_S)
        made = (await version_paths(services.store, parent))[2]
        found = await audit(services.store, world.client, result.run_id)
    assert result.state is RunState.COMPLETED
    assert (engine.label, engine.loaded[given:]) == (weight_label(parent, 2), [made])
    assert found.violations == ()
    given_to = "SELECT incarnation, version, state FROM publications WHERE run_id = %s"
    assert rows(world, given_to, handle.id) == [("scripted+", 0, "verified")]
    labels = "SELECT DISTINCT span->>0 FROM turns, jsonb_array_elements(spans) AS span WHERE run_id = %s"
    assert rows(world, labels, handle.id) == [(weight_label(parent, 2),)]
    assert rows(world, "SELECT state FROM engines WHERE run_id = %s", handle.id) == [("ready",)]


async def test_an_evaluation_gets_its_weights_back_too(world: World, engine: WeightedEngine) -> None:
    sets = {"sets": [{"id": "Effects", "split": "eval", "tasks": 2}], "at_start": True}
    async with world.workers():
        parent = (await asyncio.wait_for(world.run(world.training("Effects", steps=1)), ENDS_WITHIN_S)).run_id
        handle = await begun(world, engine, eval=sets)
        engine.restart()
        engine.release()
        result = await asyncio.wait_for(handle.result(), ENDS_WITHIN_S)
    assert result.state is RunState.COMPLETED
    assert engine.label == weight_label(parent, 1)


async def test_of_two_runs_on_an_engine_one_loads_it_and_both_go_on(world: World, engine: WeightedEngine) -> None:
    async with world.workers() as services:
        parent = (await asyncio.wait_for(world.run(world.training("Effects", steps=1)), ENDS_WITHIN_S)).run_id
        runs = [await begun(world, engine) for _ in range(2)]
        given = len(engine.loaded)
        engine.restart()
        engine.release()
        for handle in runs:
            assert (await asyncio.wait_for(handle.result(), ENDS_WITHIN_S)).state is RunState.COMPLETED
            assert (await audit(services.store, world.client, handle.id)).violations == ()
        assert engine.loaded[given:] == [(await version_paths(services.store, parent))[1]]


async def test_where_nobody_knows_the_weights_why_says_what_to_do(world: World, engine: WeightedEngine) -> None:
    engine.label = "somebody's"
    async with world.workers() as services:
        handle = await begun(world, engine)
        engine.restart()
        engine.release()
        await until_row(world, "SELECT FROM runs WHERE run_id = %s AND waiting_for IS NOT NULL", handle.id)
        row = await get_run(services.store, handle.id)
        assert row is not None
        told = [*await why(row, None), *why_engines(await engines_of(services.store, handle.id))]
        engine.label = "somebody's"
        result = await asyncio.wait_for(handle.result(), ENDS_WITHIN_S)
    says = (
        "it holds weights 'default', and this run samples from \"somebody's\", of which nobody knows where they are: "
        f"load those into it under that name, or end this run with `atropos run cancel {handle.id}` and start it again"
    )
    assert told == [
        f"It waits: no engine may be given work: {engine.url}: {says}.",
        f"The engine {engine.url} is quarantined: {says}.",
    ]
    assert result.state is RunState.COMPLETED
    assert engine.loaded == []


@pytest.mark.parametrize(
    ("path", "first", "words"),
    [
        ("/w/3", "run/mine", "which is being loaded into it again from /w/3"),
        ("/w/3", None, "which is being loaded into it again from /w/3"),
        ("/w/3", "run/older", "while run/older, which began before, uses it too: end that run or this one"),
        (None, "run/mine", "load those into it under that name, or end this run with `atropos run cancel run/mine`"),
        (None, "run/older", "load those into it under that name, or end this run with `atropos run cancel run/mine`"),
    ],
)
def test_what_became_of_the_weights_is_said_in_one_sentence(path: str | None, first: str | None, words: str) -> None:
    target = Wanted(RunState.RUNNING, 0, "run/ended@3", path, None, None, False, None, borrowed=path is not None)
    said = why_set_aside("run/mine", "default", target, first)
    assert said.startswith("it holds weights 'default', and this run samples from 'run/ended@3', ")
    assert words in said
