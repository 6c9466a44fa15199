"""The journal holds every token anyone has seen, in the order in which it was sampled."""

import asyncio
import json
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from atropos.inference.engine.journal import Journal, Line
from atropos.tests.inference.conformance import Target, generate, publish, stream
from atropos.tests.inference.engine.conftest import Running, engine_here, engine_process


def by_call(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    calls: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        calls[line["call"]].append(line)
    return calls


async def test_the_journal_equals_what_responses_returned(
    engine: Running, client: httpx.AsyncClient, target: Target
) -> None:
    await publish(client, target.weights[0], "journalled")
    answers = await asyncio.gather(*(generate(client, target, [i + 1, i + 2], max_tokens=5 + i) for i in range(12)))
    events = await stream(client, target, [3, 4], max_tokens=9)
    expected = {body["call"]: body["choices"][0]["token_ids"] for body in answers}
    expected[events[0]["call"]] = [token for event in events for token in event["choices"][0]["token_ids"]]
    calls = by_call(engine.lines())
    for call, tokens in expected.items():
        assert [line["token_id"] for line in calls[call]] == tokens
        assert [line["position"] for line in calls[call]] == list(range(len(tokens)))
        assert {line["version"] for line in calls[call]} == {"journalled"}
    assert {line["request_id"] for line in calls[answers[0]["call"]]} == {answers[0]["request_id"]}


async def test_versions_in_the_journal_change_where_the_spans_do(
    engine: Running, client: httpx.AsyncClient, target: Target
) -> None:
    running = asyncio.create_task(generate(client, target, [8, 9], max_tokens=300))
    await asyncio.sleep(0.2)
    await publish(client, target.weights[1], "journal-new")
    body = await running
    written = by_call(engine.lines())[body["call"]]
    spans = body["choices"][0]["weight_versions"]
    versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    assert [line["version"] for line in written] == versions
    await publish(client, target.weights[0], "journalled")


async def test_a_killed_engine_leaves_every_token_it_had_handed_out(
    weights: tuple[Path, Path], tmp_path: Path, target: Target
) -> None:
    seen: list[int] = []
    journal = tmp_path / "deep" / "journal.jsonl"
    with engine_process(weights[0], journal) as doomed:
        params = {"max_tokens": 900, "ignore_eos": True}
        body = {"model": "policy", "token_ids": [1, 2], "stream": True, "sampling_params": params}
        async with httpx.AsyncClient(base_url=doomed.url, timeout=60.0) as client:
            try:
                async with client.stream("POST", "/inference/v1/generate", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line:
                            seen += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                        if len(seen) >= 20:
                            doomed.process.send_signal(signal.SIGKILL)
            except httpx.HTTPError:
                pass
        doomed.process.wait()
    raw = journal.read_text()
    assert raw.endswith("\n")
    written = [json.loads(line)["token_id"] for line in raw.splitlines()]
    assert len(seen) >= 20
    assert written[: len(seen)] == seen


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
async def test_a_token_that_cannot_be_journalled_is_not_handed_out(weights: tuple[Path, Path]) -> None:
    died: asyncio.Queue[str] = asyncio.Queue()
    async with engine_here(weights[0], Path("/dev/full"), died.put_nowait) as (_, client):
        answer = await client.post("/inference/v1/generate", json={"model": "policy", "token_ids": [1]})
        assert answer.status_code == 500
        assert "No space left" in answer.json()["error"]["message"]
        assert "No space left" in await died.get()
        assert (await client.get("/health")).status_code == 503


def test_a_journal_is_appended_to_and_keeps_any_text(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for position in range(2):
        journal = Journal(path)
        journal.append([Line('turn "7"\n', "c-1").of(position, 5, json.dumps("v\\1"))])
        journal.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first = {"request_id": 'turn "7"\n', "position": 0, "token_id": 5, "version": "v\\1", "call": "c-1"}
    assert lines == [first, first | {"position": 1}]
