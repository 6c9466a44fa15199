"""How much of an engine's places are filled: by the pool alone, and by whole episodes."""

import asyncio
import time
from pathlib import Path
from typing import Final

import psycopg
from atropos.cli.stack.running import RunningStack
from atropos.cli.temporal import connect, prepare
from atropos.contracts.queues import WORKFLOWS
from atropos.contracts.records import EngineRecord
from atropos.contracts.workflows import RUN_WORKFLOW
from atropos.inference.engines import EngineAddress
from atropos.inference.pool import EnginePool

from .episodes import GROUP, MODEL_S, document, workers

AT_ONCE: Final = 256
CALLS: Final = 8
"""Each place is taken so often."""
CALL_S: Final = 1.0
SLOTS: Final = 48
EPISODES: Final = 480
GROUPS_AT_ONCE: Final = 10
RUN: Final = "run/slots"


class Sleeper:
    """An engine of which nothing is asked but time."""

    def __init__(self, address: EngineAddress) -> None:
        self.engine_id = address.engine_id

    async def health(self) -> None:
        return None

    async def waiting(self) -> int | None:
        return 0

    async def close(self) -> None:
        return None


async def pool_slots_busy() -> float:
    """Part of the time that 256 places are taken, where calls of a second each wait for them."""
    records = [
        EngineRecord(f"engine-{number}", "dev", f"http://e{number}:1", AT_ONCE // 4, None, "ready", None, None, None)
        for number in range(4)
    ]
    pool = EnginePool(records, lambda _: None, connect=Sleeper)

    async def call(number: int) -> None:
        async with pool.lease(f"episode-{number}"):
            await asyncio.sleep(CALL_S)

    began = time.perf_counter()
    await asyncio.gather(*(call(number) for number in range(AT_ONCE * CALLS)))
    wall = time.perf_counter() - began
    await pool.close()
    return CALLS * CALL_S / wall


async def slots_busy(stack: RunningStack, model: Path) -> float:
    """The same for the 48 places of an engine and whole episodes, in the middle eight tenths of a run."""
    client = await connect(stack.temporal_address)
    await prepare(client)
    wanted = document("slots", model, EPISODES // GROUP, 0.0)
    wanted["engines"][0]["concurrency"] = SLOTS
    wanted["rollout"]["concurrency"] = GROUPS_AT_ONCE
    with workers(stack, model, "product", MODEL_S):
        await client.execute_workflow(RUN_WORKFLOW, wanted, id=RUN, task_queue=WORKFLOWS)
    assert stack.database_url is not None
    query = "SELECT extract(epoch FROM created_at)::float8 FROM turns WHERE run_id = %s ORDER BY 1"
    with psycopg.connect(stack.database_url.get_secret_value()) as connection:
        moments = [float(row[0]) for row in connection.execute(query, [RUN])]
    tenth = len(moments) // 10
    middle = moments[tenth : len(moments) - tenth]
    return len(middle) * MODEL_S / (SLOTS * (middle[-1] - middle[0]))
