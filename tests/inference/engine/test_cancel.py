"""A caller that has gone takes its call with it."""

import asyncio
import json
import random

import httpx
import pytest
from atropos.tests.inference.conformance import Target, control, generate, load, publish
from atropos.tests.inference.engine.conftest import Running


async def raw_request(engine: Running, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(engine.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(body).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def in_flight(client: httpx.AsyncClient) -> int:
    return int((await client.get("/load")).json()["server_load"])


async def reaches(client: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(20):
        while await in_flight(client) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def long_request(request_id: str, streamed: bool) -> dict[str, object]:
    params = {"max_tokens": 1000, "ignore_eos": True}
    body = {"model": "policy", "token_ids": [1, 2, 3], "request_id": request_id, "stream": streamed}
    return body | {"sampling_params": params}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_disconnect_ends_generation(engine: Running, client: httpx.AsyncClient, streamed: bool) -> None:
    name = f"left-{streamed}"
    _, writer = await raw_request(engine, long_request(name, streamed))
    await reaches(client, 1)
    while not any(line["request_id"] == name for line in engine.lines()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    writer.close()
    await reaches(client, 0)
    sampled = [line for line in engine.lines() if line["request_id"] == name]
    assert 0 < len(sampled) < 1000
    await asyncio.sleep(0.1)
    assert len([line for line in engine.lines() if line["request_id"] == name]) == len(sampled)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_disconnect_while_paused_is_not_resumed(
    engine: Running, client: httpx.AsyncClient, target: Target, streamed: bool
) -> None:
    await control(client, "/pause?mode=keep")
    _, writer = await raw_request(engine, long_request(f"paused-{streamed}", streamed))
    await reaches(client, 1)
    writer.close()
    await reaches(client, 0)
    await control(client, "/resume")
    await generate(client, target, [1])
    assert not [line for line in engine.lines() if line["request_id"] == f"paused-{streamed}"]


async def test_a_storm_of_requests_leavers_and_pauses_leaves_nothing_behind(
    engine: Running, client: httpx.AsyncClient, target: Target
) -> None:
    dice = random.Random(7)
    tasks = [
        asyncio.create_task(generate(client, target, [1 + i % 9] * dice.randint(1, 90), max_tokens=dice.randint(1, 60)))
        for i in range(60)
    ]
    for number, mode in enumerate(["keep", "wait", "keep", "keep"]):
        for task in dice.sample(tasks, 6):
            task.cancel()
        await asyncio.sleep(0.05)
        await control(client, f"/pause?mode={mode}")
        for task in dice.sample(tasks, 4):
            task.cancel()
        await load(client, target.weights[number % 2], f"storm-{number}")
        await control(client, "/resume")
    bodies = [b for b in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(b, dict)]
    await reaches(client, 0)
    assert len(bodies) >= 20
    lines = engine.lines()
    for body in bodies:
        choice = body["choices"][0]
        written = [line for line in lines if line["call"] == body["call"]]
        spans = [span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])]
        assert [line["token_id"] for line in written] == choice["token_ids"]
        assert [line["version"] for line in written] == spans
    await publish(client, target.weights[0], "calm")


async def test_an_id_in_flight_is_not_served_twice(engine: Running, client: httpx.AsyncClient) -> None:
    _, writer = await raw_request(engine, long_request("twice", False))
    await reaches(client, 1)
    answer = await client.post("/inference/v1/generate", json=long_request("twice", False))
    assert answer.status_code == 409
    assert "twice" in answer.json()["error"]["message"]
    writer.close()
    await reaches(client, 0)
