"""Workflows are lost, reset, restarted or moved to another server: rows are enough to go on, and nothing is redone."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from atropos.activities.runs import group_start
from atropos.activities.services import Services
from atropos.contracts.activities import EpisodeResult, GroupResult
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.queues import WORKFLOWS, WorkerRole
from atropos.contracts.states import GroupState, RunState
from atropos.contracts.workflows import GROUP_WORKFLOW, GroupInput, RunResult
from atropos.db.groups import load_group
from atropos.db.late import TAKEN
from atropos.db.summary import run_summary
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowHandle, WorkflowHistory

from ..support.scripted import scripted_engine
from ..support.world import ROLES, World, new_namespace
from .conftest import looks_twice

SOON_S = 90.0
WITHOUT_MODEL = [role for role in ROLES if role is not WorkerRole.MODEL]


@pytest.fixture
async def world(temporal_address: str, database_url: str, model: Path) -> AsyncIterator[World]:
    """A namespace and an engine a test; runs of all tests share the module's database, whose other runs are over."""
    async with scripted_engine(model, looks_twice) as engine:
        yield World(await new_namespace(temporal_address), database_url, engine)


def one_episode(run_id: str) -> EpisodeKey:
    return EpisodeKey(run_id=run_id, group_no=0, member=0)


async def start_one(world: World) -> "WorkflowHandle[object, RunResult]":
    """A run of one group of one episode."""
    return await world.start(world.document("Effects", environment={"group_size": 1}, budget={"groups": 1}))


async def start_held(world: World, turn: int) -> "WorkflowHandle[object, RunResult]":
    """The same, with the engine holding its answer to `turn`."""
    world.engine.hold(turn)
    handle = await start_one(world)
    await asyncio.wait_for(world.engine.waiting.wait(), SOON_S)
    return handle


async def ended_well(world: World, services: Services, run_id: str) -> None:
    """The run completed, nothing failed, and no turn or call was stored twice."""
    result = await asyncio.wait_for(world.client.get_workflow_handle(run_id, result_type=RunResult).result(), SOON_S)
    assert result.state is RunState.COMPLETED
    summary = await run_summary(services.store, run_id)
    assert (summary.episodes["train"].failures, summary.episodes["train"].mean_reward) == ({}, 1.0)
    assert (await load_group(services.store, one_episode(run_id).group)).group.state is GroupState.SEALED
    rows = world.rows(run_id)
    assert (len(rows["episodes"]), len(rows["turns"]), len(rows["tool_calls"])) == (1, 3, 2)
    assert all(TAKEN in row for row in rows["late_results"])


async def asked_again(world: World, key: EpisodeKey, turns: list[int]) -> None:
    """Wait until the engine was asked for these turns: the new execution waits for it beside the old one's call."""
    async with asyncio.timeout(SOON_S):
        while world.engine.asked(key.workflow_id) != turns:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.05)


def first_workflow_task(history: WorkflowHistory) -> int:
    return next(e.event_id for e in history.events if e.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED)


async def reset(client: Client, workflow_id: str) -> str:
    """`temporal workflow reset --type FirstWorkflowTask`. Returns the id of the new execution."""
    handle = client.get_workflow_handle(workflow_id)
    description = await handle.describe()
    request = ResetWorkflowExecutionRequest(
        namespace=client.namespace,
        workflow_execution=WorkflowExecution(workflow_id=workflow_id, run_id=description.run_id),
        reason="a test",
        workflow_task_finish_event_id=first_workflow_task(await handle.fetch_history()),
        request_id=str(uuid.uuid4()),
    )
    return str((await client.workflow_service.reset_workflow_execution(request)).run_id)


async def test_a_finished_episode_that_is_reset_reuses_every_row(world: World) -> None:
    async with world.workers():
        run = await (await start_one(world)).result()
        key = one_episode(run.run_id)
        rows, asked = world.rows(run.run_id), world.engine.asked(key.workflow_id)
        before = await world.client.get_workflow_handle(key.workflow_id, result_type=EpisodeResult).result()
        again = await reset(world.client, key.workflow_id)
        handle = world.client.get_workflow_handle(key.workflow_id, run_id=again, result_type=EpisodeResult)
        assert await asyncio.wait_for(handle.result(), SOON_S) == before
        assert before.reward == 1.0
        assert world.rows(run.run_id) == rows
        assert world.engine.asked(key.workflow_id) == asked == [0, 1, 2]


async def test_a_running_episode_that_is_reset_samples_no_stored_turn_again(world: World) -> None:
    async with world.workers() as services:
        handle = await start_held(world, turn=2)
        key = one_episode(handle.id)
        again = await reset(world.client, key.workflow_id)
        await asked_again(world, key, [0, 1, 2, 2])
        world.engine.release()
        episode = world.client.get_workflow_handle(key.workflow_id, run_id=again, result_type=EpisodeResult)
        result = await asyncio.wait_for(episode.result(), SOON_S)
        assert (result.valid, result.turns, result.reward) == (True, 3, 1.0)
        await ended_well(world, services, handle.id)
        assert world.engine.asked(key.workflow_id) == [0, 1, 2, 2]


async def restart_group(world: World, services: Services, run_id: str) -> "WorkflowHandle[object, GroupResult]":
    """Start a group's workflow by hand, as reconciliation does."""
    group = (await load_group(services.store, one_episode(run_id).group)).group
    run = await services.run(run_id)
    start = group_start(run.config, group, await services.environment(run_id, group.environment))
    return await world.client.start_workflow(
        GROUP_WORKFLOW,
        GroupInput(start=start, parent=f"{run_id}/rollout"),
        id=start.key.workflow_id,
        task_queue=WORKFLOWS,
        result_type=GroupResult,
    )


async def test_a_group_that_is_terminated_and_started_again_reuses_every_row(world: World) -> None:
    async with world.workers() as services:
        handle = await start_held(world, turn=1)
        key = one_episode(handle.id)
        await world.client.get_workflow_handle(key.group.workflow_id).terminate("a test")
        group = await restart_group(world, services, handle.id)
        await asked_again(world, key, [0, 1, 1])
        world.engine.release()
        assert (await asyncio.wait_for(group.result(), SOON_S)).valid == 1
        await ended_well(world, services, handle.id)
        assert world.engine.asked(key.workflow_id) == [0, 1, 1, 2]

        rows = world.rows(handle.id)
        again = await restart_group(world, services, handle.id)
        assert await asyncio.wait_for(again.result(), SOON_S) == await group.result()
        assert world.rows(handle.id) == rows
        assert world.engine.asked(key.workflow_id) == [0, 1, 1, 2]


async def test_a_run_goes_on_at_an_empty_temporal_server(world: World, temporal_address: str) -> None:
    async with world.workers():
        handle = await start_held(world, turn=1)
    moved = World(await new_namespace(temporal_address), world.database, world.engine)
    world.engine.release()
    async with moved.workers() as services:
        await ended_well(moved, services, handle.id)
    assert world.engine.asked(one_episode(handle.id).workflow_id) == [0, 1, 1, 2]


@pytest.mark.parametrize(("grace_s", "asked"), [(0.5, [0, 1, 1, 2]), (60.0, [0, 1, 2])])
async def test_a_worker_that_is_told_to_stop_finishes_its_call_or_hands_it_back(
    world: World, tmp_path: Path, grace_s: float, asked: list[int]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    async with world.workers(WITHOUT_MODEL) as services:
        async with world.process([WorkerRole.MODEL], first, grace_s=grace_s) as process:
            handle = await start_held(world, turn=1)
            process.terminate()
            if grace_s > 1:
                world.engine.release()
            assert await asyncio.wait_for(process.wait(), SOON_S) == 0
        world.engine.release()
        async with world.process([WorkerRole.MODEL], second):
            await ended_well(world, services, handle.id)
    key = one_episode(handle.id)
    assert world.engine.asked(key.workflow_id) == asked
    attempts = [
        event.activity_task_started_event_attributes.attempt
        for event in (await world.history(key)).events
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED
    ]
    assert attempts[0] == attempts[2] == 1
    assert (attempts[1] > 1) == (asked.count(1) > 1)
