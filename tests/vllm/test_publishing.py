"""A run whose engine is vLLM, which is killed in the middle: no token counts as a version's that did not sample it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from atropos.contracts.ids import weight_label
from atropos.contracts.states import RunState
from atropos.db.audit import audit_run

from ..support.vllm_server import VllmServer
from ..support.world import ENVIRONMENTS, World, new_namespace
from ..workflows.test_real_engine import SAME, off

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

LIMIT_S = 1200.0
UNNAMED = "default"
"""What vLLM calls the weights it starts with."""


@pytest.fixture
async def world(temporal_address: str, database_url: str, tmp_path: Path) -> World:
    settings = {"shutdown_grace_s": 1.0, "tool_processes": 1, "home": tmp_path / "home"}
    return World(await new_namespace(temporal_address), database_url, None, settings=settings)  # type: ignore[arg-type]


def document(model: Path, url: str, steps: int) -> dict[str, Any]:
    """A run whose trainer moves the weights far enough at each step to be seen in logprobs."""
    optim = {"lr": 1e-2, "warmup": 0}
    return {
        "name": "vllm",
        "model": {"path": str(model)},
        "engines": [{"kind": "vllm", "url": f"{url}/v1", "concurrency": 8}],
        "environments": [{"id": f"{ENVIRONMENTS}:Letters", "group_size": 4}],
        "sampling": {"max_tokens": 24},
        "batch": {"groups": 2},
        "trainer": {"kind": "builtin", "steps": steps, "optim": optim, "checkpoint": {"keep": 100}},
    }


def rows(world: World, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(world.database) as connection:
        return connection.execute(query.encode(), values).fetchall()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not true():  # noqa: ASYNC110 - rows have no event
            await asyncio.sleep(0.1)


async def sampled_while_unnamed(url: str) -> list[float]:
    """The tokens that a server which starts had sampled at each look until its weights had a name of ours."""
    seen: list[float] = []
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60.0) as client:
        while True:
            counted = (await client.get("/metrics")).text
            if (await client.get("/weight_info")).json()["weight_version"] != UNNAMED:
                return seen
            lines = [one for one in counted.splitlines() if one.startswith("vllm:generation_tokens_total")]
            seen.append(sum(float(line.split()[-1]) for line in lines))
            await asyncio.sleep(0.1)


async def test_a_killed_server_comes_back_as_another_life_and_is_loaded_before_it_is_given_work(
    world: World, server: VllmServer, weights: tuple[Path, Path]
) -> None:
    async with world.workers() as services:
        handle = await world.start(document(weights[0], server.url, 3))
        await until(lambda: rows(world, "SELECT FROM train_steps WHERE run_id = %s", handle.id))
        await asyncio.to_thread(server.kill)
        await until(lambda: rows(world, "SELECT FROM engines WHERE run_id = %s AND state = 'down'", handle.id))
        await asyncio.to_thread(server.start)
        assert set(await sampled_while_unnamed(server.url)) <= {0.0}
        result = await asyncio.wait_for(handle.result(), LIMIT_S)
        audit = await audit_run(services.store, handle.id)
    assert result.state is RunState.COMPLETED
    assert audit.violations == ()
    given = "SELECT incarnation, version, state FROM publications WHERE run_id = %s ORDER BY 1, 2"
    publications = rows(world, given, handle.id)
    first, second = sorted({life for life, _, _ in publications})
    assert {state for life, _, state in publications if life == second} == {"verified"}
    # Nothing had moved yet that logprobs could show, and digests of a build for a CPU are blind: used, and called so.
    assert next((version, state) for life, version, state in publications if life == first) == (0, "unverified")
    last = "SELECT weight_label, state FROM engines WHERE run_id = %s"
    assert rows(world, last, handle.id) == [(weight_label(handle.id, 3), "ready")]
    spans = off(world, handle.id)
    assert len(spans) >= 12
    assert max(distance for distance, _ in spans) < SAME
    assert sum(other > 2 * SAME for _, other in spans) > len(spans) / 2  # or no wrong version could be seen
