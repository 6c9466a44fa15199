"""Loops over the unbounded continue as new, and lose nothing on the way."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from atropos.cli.stack.temporal_server import installed_temporal
from atropos.contracts.ids import GroupKey, rollout_workflow_id
from atropos.contracts.states import GroupState, RunState
from atropos.db.groups import load_group
from atropos.workflows.plugin import AtroposPlugin
from temporalio.testing import WorkflowEnvironment

from ..support.scripted import scripted_engine
from ..support.world import World
from .conftest import looks_twice

GROUPS = 12
EVENTS = 40
"""The server suggests to continue as new after so many, instead of 4,096."""


@pytest.fixture
async def impatient_world(database_url: str, model: Path) -> AsyncIterator[World]:
    """A server of its own that suggests to continue as new early."""
    server = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(installed_temporal()),
        dev_server_extra_args=[
            f"--dynamic-config-value=limit.historyCount.suggestContinueAsNew={EVENTS}",
            "--dynamic-config-value=history.transferProcessorMaxPollRPS=2000",
        ],
        plugins=[AtroposPlugin()],
    )
    async with server, scripted_engine(model, looks_twice) as engine:
        yield World(server.client, database_url, engine)


async def test_a_rollout_that_continues_as_new_loses_no_group(impatient_world: World) -> None:
    world = impatient_world
    async with world.workers() as services:
        sets = [{"id": "Effects", "split": "eval", "tasks": 6}]
        document = world.document("Effects", budget={"groups": GROUPS}, rollout={"concurrency": 2}, eval={"sets": sets})
        result = await world.run(document)
        assert result.state is RunState.COMPLETED
        assert [outcome.episodes for outcome in result.evaluations] == [6]
        keys = [GroupKey(run_id=result.run_id, group_no=number) for number in range(GROUPS + 6)]
        groups = [await load_group(services.store, key) for key in keys]
        assert {facts.group.state for facts in groups} == {GroupState.SEALED}
        assert sorted(facts.group.draw for facts in groups if facts.group.kind == "train") == list(range(GROUPS))
        latest = await world.client.get_workflow_handle(rollout_workflow_id(result.run_id)).describe()
        assert latest.raw_description.workflow_execution_info.first_run_id != latest.run_id
