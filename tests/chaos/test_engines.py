"""An engine that misbehaves costs time and nothing else: it is told, fails no episode, invents no reward, and is used
again as soon as it is well."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from atropos.contracts.states import RunState
from atropos.db.audit import audit_run
from atropos.db.summary import run_summary
from atropos.environments.registry import load
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..support.scripted import ScriptedEngine, make_model, served, tool_call
from ..support.world import ENVIRONMENTS, World, new_namespace
from .conftest import Why, until_said

ENDS_WITHIN_S = 90.0


@dataclass
class Ill(ScriptedEngine):
    """`illness`: what it does to an answer while it is ill. `asked_at`: when it was asked."""

    illness: Callable[[dict[str, Any]], Response | None] | None = None
    asked_at: list[float] = field(default_factory=list)

    async def _generate(self, request: Request) -> Response:
        self.asked_at.append(time.monotonic())
        if self.illness is not None:
            answer = self.illness(await request.json())
            if answer is not None:
                return answer
        return await super()._generate(request)


def says(prompt: str, turn: int) -> str:
    return tool_call("look", at=turn) if turn < 2 else "nothing"


@pytest.fixture
async def world(
    temporal_address: str, database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    model = make_model(tmp_path_factory.mktemp("model"), load(f"{ENVIRONMENTS}:Effects").spec.tool_specs())
    async with served(Ill(model, says)) as engine:
        yield World(await new_namespace(temporal_address), database_url, engine)


def ill(world: World) -> Ill:
    assert isinstance(world.engine, Ill)
    return world.engine


def cut(body: dict[str, Any]) -> Response:
    """Half an answer or stream, after which the connection is gone."""
    kind = "text/event-stream" if body["stream"] else "application/json"
    return Response(b'data: {"choi', media_type=kind, headers={"content-length": "4096"})


async def ended_well(world: World, services: Any, run_id: str) -> None:
    """Completed, nothing failed, every reward earned, and every row agrees with every other."""
    state = (await asyncio.wait_for(world.client.get_workflow_handle(run_id).result(), ENDS_WITHIN_S))["state"]
    assert state == RunState.COMPLETED
    told = (await run_summary(services.store, run_id)).episodes["train"]
    assert (told.failures, told.mean_reward) == ({}, 1.0)
    assert (await audit_run(services.store, run_id)).violations == ()


SHORT, STREAMED = 64, 1500


@pytest.mark.parametrize(
    ("illness", "words", "max_tokens"),
    [
        pytest.param(lambda body: PlainTextResponse("boom", 500), "answered 500: boom", SHORT, id="500"),
        pytest.param(lambda body: JSONResponse({}, 429), "answered 429", SHORT, id="429"),
        pytest.param(lambda body: PlainTextResponse("{half", 200), ": {half.", SHORT, id="garbage"),
        pytest.param(cut, "broke the connection", SHORT, id="an answer that is cut"),
        pytest.param(cut, "broke the connection", STREAMED, id="a stream that is cut"),
    ],
)
async def test_it_is_told_and_nothing_fails(
    world: World, why: Why, illness: Callable[[dict[str, Any]], Response], words: str, max_tokens: int
) -> None:
    engine = ill(world)
    engine.illness = lambda body: illness(body) if "/turn/1/" in body["request_id"] else None
    async with world.workers() as services:
        run = await world.start(world.document("Effects", sampling={"max_tokens": max_tokens}))
        said = await until_said(why, words, run.id, world.client, world.database)
        assert "It tries sample_turn again and again" in said
        engine.illness = None
        await ended_well(world, services, run.id)


async def test_weights_that_the_run_never_published_count_for_nothing(world: World, why: Why) -> None:
    engine = ill(world)
    async with world.workers() as services:
        engine.hold(1)
        run = await world.start(world.document("Effects"))
        await asyncio.wait_for(engine.waiting.wait(), ENDS_WITHIN_S)
        engine.label = "somebody's"
        engine.release()
        words = (
            "it holds weights \"somebody's\", and this run samples from 'default', of which nobody knows where they are"
        )
        await until_said(why, words, run.id, world.client, world.database)
        engine.label = "default"
        await ended_well(world, services, run.id)
    assert all("somebody" not in row for row in world.rows(run.id)["turns"])


async def test_no_call_comes_earlier_than_the_engine_asked_for(world: World) -> None:
    """Three others are answered after it said so, which is no reason to call it earlier."""
    engine = ill(world)
    engine.hold(1)
    rests_s = 4.0
    said: list[float] = []
    refused = asyncio.Event()

    def fourth(body: dict[str, Any]) -> Response | None:
        others = sum("/turn/1/" in one["request_id"] for one in engine.requests)
        if refused.is_set() or "/turn/1/" not in body["request_id"] or others < 3:
            return None
        said.append(time.monotonic())
        refused.set()
        return JSONResponse({"error": "slow down"}, 429, {"retry-after": str(rests_s)})

    engine.illness = fourth
    async with world.workers() as services:
        run = await world.start(world.document("Effects"))
        await asyncio.wait_for(refused.wait(), ENDS_WITHIN_S)
        engine.release()
        await ended_well(world, services, run.id)
    later = [at for at in engine.asked_at if at > said[0]]
    assert min(later) - said[0] >= rests_s
