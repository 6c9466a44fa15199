"""Whoever waits for the end of a run gets it, also from a Temporal that dies while it tells."""

import asyncio

import pytest
from atropos.cli.run_start import run_ends
from atropos.contracts.states import RunState
from atropos.workflows.plugin import AtroposPlugin
from temporalio.client import Client
from temporalio.service import RetryConfig, RPCError, RPCStatusCode

from ..support.breaking import BreakingWay, breaking_way
from ..support.world import World

DEATHS = 2
SOON_S = 60.0
AWAY = {RPCStatusCode.UNAVAILABLE, RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED}
"""What a server that is merely absent shows as."""


async def connected(way: BreakingWay, world: World) -> Client:
    """A client without patience of its own: what it meets is seen at once."""
    impatient = RetryConfig(max_retries=1, max_elapsed_time_millis=1)
    return await Client.connect(
        way.address, namespace=world.client.namespace, plugins=[AtroposPlugin()], retry_config=impatient
    )


async def test_a_temporal_that_dies_while_it_tells_the_end_is_asked_again(world: World, temporal_address: str) -> None:
    world.engine.hold(0)
    async with breaking_way(temporal_address) as way, world.workers(), asyncio.timeout(SOON_S):
        client = await connected(way, world)
        run = await world.start(world.document("Answers"))
        await world.engine.waiting.wait()
        waiting = asyncio.create_task(run_ends(client, run.id))
        way.deaths = DEATHS
        world.engine.release()
        assert await waiting is RunState.COMPLETED
        assert way.deaths == 0

        way.deaths = 1
        with pytest.raises(RPCError) as died:
            await client.get_workflow_handle(run.id).result()
        assert died.value.status not in AWAY
