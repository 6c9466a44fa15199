"""What any engine must do over HTTP to train with: one suite for the dev engine and for vLLM.

Invariant: a check knows an engine by its base URL and by what `Target` says about it, never by its code. What engines
may differ in is a field of `Target`. Reference logprobs come from a plain forward pass in transformers.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

Check = Callable[[httpx.AsyncClient, "Target"], Awaitable[None]]
CHECKS: list[Check] = []
"""Every check, in the order of this file."""

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class Target:
    """An engine under test, started with `weights[0]` and with its control routes open.

    `weights`: two model folders of one shape, readable by the engine. `names_incarnation`: whether it tells its process
    apart from the one before. `streams_versions`: whether each event of a stream says which weights sampled its tokens,
    or only the last one, for all of them. `tolerance`: largest difference to a float32 forward pass. `long_answer`:
    tokens that take the engine long enough to be paused midway.
    """

    model: str
    weights: tuple[Path, Path]
    context: int
    names_incarnation: bool = True
    streams_versions: bool = True
    digests_all_tensors: bool = True
    tolerance: float = 1e-4
    long_answer: int = 400


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


@lru_cache(maxsize=4)
def _reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def reference_logprobs(
    folder: Path, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Logprobs of a completion's tokens by one plain forward pass over the whole sequence."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = _reference(folder)(ids).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion)[:, None])
    return [float(value) for value in chosen[:, 0]]


def likeliest(folder: Path, prompt: Sequence[int], completion: Sequence[int]) -> list[int]:
    """The likeliest token at each place of a completion, given what is before it."""
    with torch.no_grad():
        logits = _reference(folder)(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return [int(token) for token in logits.argmax(-1)]


def assert_logprobs(choice: dict[str, Any], expected: Sequence[float], tolerance: float) -> None:
    content = choice["logprobs"]["content"]
    assert [item["token_id"] for item in content] == choice["token_ids"]
    worst = max(abs(item["logprob"] - value) for item, value in zip(content, expected, strict=True))
    assert worst <= tolerance


async def generate(client: httpx.AsyncClient, target: Target, prompt: list[int], **params: Any) -> dict[str, Any]:
    """One completion with logprobs; answers the whole body."""
    sampling = {"max_tokens": 12, "temperature": 1.0, "logprobs": 1, "ignore_eos": True} | params
    body = {"model": target.model, "token_ids": prompt, "sampling_params": sampling}
    answer = await client.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def stream(client: httpx.AsyncClient, target: Target, prompt: list[int], **params: Any) -> list[dict[str, Any]]:
    """The events of a streamed completion."""
    sampling = {"max_tokens": 12, "temperature": 1.0, "logprobs": 1, "ignore_eos": True} | params
    body = {"model": target.model, "token_ids": prompt, "stream": True, "sampling_params": sampling}
    events = []
    async with client.stream("POST", "/inference/v1/generate", json=body) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    return [event for event in events if event["choices"]]


async def control(client: httpx.AsyncClient, path: str, body: Any = None) -> dict[str, Any]:
    answer = await client.post(path, json=body) if body is not None else await client.post(path)
    assert answer.status_code == 200, f"{path}: {answer.text}"
    return dict(answer.json()) if answer.content else {}


async def publish(client: httpx.AsyncClient, folder: Path, version: str) -> None:
    """Load weights the way a publisher does: pause, load, name, resume."""
    await control(client, "/pause?mode=keep&clear_cache=true")
    await load(client, folder, version)
    await control(client, "/resume")


async def load(client: httpx.AsyncClient, folder: Path, version: str) -> None:
    await control(client, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    await control(client, "/update_weight_version", {"new_version": version})


async def version(client: httpx.AsyncClient) -> str:
    return str((await client.get("/weight_info")).json()["weight_version"])


@check
async def tells_health_name_and_load(client: httpx.AsyncClient, target: Target) -> None:
    assert (await client.get("/health")).status_code == 200
    models = (await client.get("/v1/models")).json()["data"]
    assert target.model in [card["id"] for card in models]
    assert models[0]["max_model_len"] == target.context
    assert "version" in (await client.get("/version")).json()
    assert (await client.get("/load")).status_code == 200
    metrics = (await client.get("/metrics")).text
    for name in ("num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total"):
        assert f"vllm:{name}" in metrics


@check
async def a_completion_has_its_whole_shape(client: httpx.AsyncClient, target: Target) -> None:
    body = await generate(client, target, [5, 6, 7], max_tokens=4)
    (choice,) = body["choices"]
    assert len(choice["token_ids"]) == 4
    assert choice["finish_reason"] == "length"
    counts = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert body["usage"] | counts == body["usage"]
    assert choice["weight_versions"] == [{"version": await version(client), "start": 0, "end": 4}]
    if target.names_incarnation:
        assert body["incarnation"] == (await client.get("/weight_info")).json()["incarnation"]


@check
async def a_request_keeps_its_own_id(client: httpx.AsyncClient, target: Target) -> None:
    """vLLM puts the name of its route before it."""
    body = {"model": target.model, "token_ids": [3], "request_id": "turn/7", "sampling_params": {"max_tokens": 1}}
    answer = await client.post("/inference/v1/generate", json=body | {"cache_salt": "v1", "priority": 2})
    assert answer.json()["request_id"].endswith("turn/7")


@check
async def logprobs_are_those_of_the_sampling_distribution(client: httpx.AsyncClient, target: Target) -> None:
    await publish(client, target.weights[0], "logprobs")
    prompts = [[(7 * i + j) % 256 for j in range(3 + 9 * i)] for i in range(6)]
    temperatures = [1.0, 0.7, 1.6, 1.0, 0.3, 1.0]
    bodies = await asyncio.gather(
        *(generate(client, target, p, temperature=t) for p, t in zip(prompts, temperatures, strict=True))
    )
    for prompt, temperature, body in zip(prompts, temperatures, bodies, strict=True):
        choice = body["choices"][0]
        expected = reference_logprobs(target.weights[0], prompt, choice["token_ids"], temperature)
        assert_logprobs(choice, expected, target.tolerance)


@check
async def prompt_logprobs_are_those_of_the_weights_that_serve(client: httpx.AsyncClient, target: Target) -> None:
    prompts = [[(11 * i + 5 * j) % 256 for j in range(n)] for i, n in enumerate((1, 2, 40, target.context - 1))]
    for number, folder in enumerate(target.weights):
        await publish(client, folder, f"scored-{number}")
        crowd = [asyncio.create_task(generate(client, target, [8, 9], max_tokens=60)) for _ in range(3)]
        bodies = await asyncio.gather(
            *(generate(client, target, prompt, max_tokens=1, prompt_logprobs=0) for prompt in prompts)
        )
        await asyncio.gather(*crowd)
        for prompt, body in zip(prompts, bodies, strict=True):
            assert [span["version"] for span in body["choices"][0]["weight_versions"]] == [f"scored-{number}"]
            assert_prompt_logprobs(body, prompt, folder, target.tolerance)
    await publish(client, target.weights[0], "scored-0")


def assert_prompt_logprobs(body: dict[str, Any], prompt: Sequence[int], folder: Path, tolerance: float) -> None:
    first, *rest = body["prompt_logprobs"]
    assert first is None
    assert all(len(entry) == 1 for entry in rest)
    with torch.no_grad():
        rows = torch.log_softmax(_reference(folder)(torch.tensor([list(prompt)])).logits[0, :-1], -1)
    for token, entry, row in zip(prompt[1:], rest, rows, strict=True):
        item, expected = entry[str(token)], float(row[token])
        assert abs(item["logprob"] - expected) <= tolerance
        surely_above, perhaps_above = (int((row > expected + slack).sum()) for slack in (tolerance, -tolerance))
        assert surely_above < item["rank"] <= perhaps_above


@check
async def temperature_zero_takes_the_likeliest_token(client: httpx.AsyncClient, target: Target) -> None:
    await publish(client, target.weights[0], "greedy")
    prompt = [11, 12, 13]
    choice = (await generate(client, target, prompt, temperature=0.0))["choices"][0]
    assert choice["token_ids"] == likeliest(target.weights[0], prompt, choice["token_ids"])
    assert_logprobs(choice, reference_logprobs(target.weights[0], prompt, choice["token_ids"]), target.tolerance)


@check
async def a_seed_repeats_a_completion(client: httpx.AsyncClient, target: Target) -> None:
    first = await generate(client, target, [9, 8, 7], seed=3)
    crowd = [generate(client, target, [9, 8, 7], seed=seed) for seed in (3, 4, 5, 6)]
    second, *others = await asyncio.gather(*crowd)
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert any(o["choices"][0]["token_ids"] != first["choices"][0]["token_ids"] for o in others)


@check
async def a_stop_token_ends_a_completion_and_is_part_of_it(client: httpx.AsyncClient, target: Target) -> None:
    whole = (await generate(client, target, [21, 22], seed=1))["choices"][0]["token_ids"]
    stop = whole[5]
    choice = (await generate(client, target, [21, 22], seed=1, stop_token_ids=[stop]))["choices"][0]
    assert choice["token_ids"] == whole[: whole.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@check
async def a_stream_carries_the_same_completion(client: httpx.AsyncClient, target: Target) -> None:
    whole = (await generate(client, target, [31, 32, 33], seed=2))["choices"][0]
    events = [event["choices"][0] for event in await stream(client, target, [31, 32, 33], seed=2)]
    assert len(events) > 1
    assert [token for event in events for token in event["token_ids"]] == whole["token_ids"]
    assert [event["finish_reason"] for event in events][-1] == whole["finish_reason"]
    assert all(event["finish_reason"] is None for event in events[:-1])
    for event in events:
        assert [item["token_id"] for item in event["logprobs"]["content"]] == event["token_ids"]
    named = events if target.streams_versions else events[-1:]
    assert [event for event in events if event["weight_versions"]] == named
    sizes = [len(event["token_ids"]) for event in events] if target.streams_versions else [len(whole["token_ids"])]
    for event, size in zip(named, sizes, strict=True):
        assert event["weight_versions"] == [{"version": await version(client), "start": 0, "end": size}]


@check
async def the_context_bounds_prompt_and_completion(client: httpx.AsyncClient, target: Target) -> None:
    body = await generate(client, target, [1] * (target.context - 3), max_tokens=3)
    assert len(body["choices"][0]["token_ids"]) == 3
    assert body["choices"][0]["finish_reason"] == "length"


BAD_BODIES: dict[str, dict[str, Any]] = {
    "no prompt": {"token_ids": []},
    "a prompt as long as the context": {"token_ids": [1] * 100_000},
    "no such token": {"token_ids": [10**9]},
    "negative token": {"token_ids": [-1]},
    "another model": {"model": "no-such-model"},
    "negative temperature": {"sampling_params": {"temperature": -1.0}},
    "no tokens wanted": {"sampling_params": {"max_tokens": 0}},
    "top_p above one": {"sampling_params": {"top_p": 1.5}},
    "text for tokens": {"token_ids": "hello"},
}


@check
async def a_request_that_cannot_be_served_is_refused_with_a_reason(client: httpx.AsyncClient, target: Target) -> None:
    good = {"model": target.model, "token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
    for name, change in BAD_BODIES.items():
        answer = await client.post("/inference/v1/generate", json=good | change)
        assert 400 <= answer.status_code < 500, name
        assert answer.json()["error"]["message"], name
    answer = await client.post("/inference/v1/generate", content=b"{not json")
    assert 400 <= answer.status_code < 500
    assert (await client.post("/update_weight_version", json={"version": "v1"})).status_code == 400
    assert (await client.post("/inference/v1/generate", json=good)).status_code == 200


@check
async def chat_with_tools_returns_a_message_and_its_tokens(client: httpx.AsyncClient, target: Target) -> None:
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": "What is 12 + 34?"}],
        "tools": [TOOL],
        "max_tokens": 6,
        "return_token_ids": True,
        "logprobs": True,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    chat = answer.json()
    (choice,) = chat["choices"]
    assert choice["message"]["role"] == "assistant"
    assert 1 <= len(choice["token_ids"]) <= 6
    assert chat["usage"]["prompt_tokens"] == len(chat["prompt_token_ids"])
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


@check
async def text_completions_take_text_and_tokens(client: httpx.AsyncClient, target: Target) -> None:
    body = {"model": target.model, "max_tokens": 3, "temperature": 0.0, "return_token_ids": True, "ignore_eos": True}
    text = (await client.post("/v1/completions", json=body | {"prompt": "2 + 2 ="})).json()["choices"][0]
    assert len(text["token_ids"]) == 3
    again = (await client.post("/v1/completions", json=body | {"prompt": text["prompt_token_ids"]})).json()
    assert again["choices"][0]["token_ids"] == text["token_ids"]


@check
async def requests_sent_while_paused_wait_for_the_resume(client: httpx.AsyncClient, target: Target) -> None:
    await control(client, "/pause?mode=keep&clear_cache=true")
    assert (await client.get("/is_paused")).json()["is_paused"] is True
    waiting = asyncio.create_task(generate(client, target, [41, 42]))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await control(client, "/resume")
    assert len((await waiting)["choices"][0]["token_ids"]) == 12
    assert (await client.get("/is_paused")).json()["is_paused"] is False


@check
async def a_kept_request_survives_a_reload_in_two_spans(client: httpx.AsyncClient, target: Target) -> None:
    """The heart of it: tokens before the reload match the old weights, tokens after it the new ones, given the whole
    sequence before them; the boundary is exact."""
    await publish(client, target.weights[0], "before")
    prompts = [[(50 + 3 * i + j) % 256 for j in range(5 + i)] for i in range(4)]
    running = [
        asyncio.create_task(generate(client, target, prompt, max_tokens=target.long_answer, temperature=0.9))
        for prompt in prompts
    ]
    await _until_generating(client)
    await control(client, "/pause?mode=keep&clear_cache=true")
    await load(client, target.weights[1], "after")
    assert not any(task.done() for task in running)
    await control(client, "/resume")
    bodies = await asyncio.gather(*running)
    assert any(len(body["choices"][0]["weight_versions"]) == 2 for body in bodies)
    for prompt, body in zip(prompts, bodies, strict=True):
        choice = body["choices"][0]
        spans = choice["weight_versions"]
        count = len(choice["token_ids"])
        assert count == target.long_answer
        if spans[0]["version"] == "before":
            assert [span["version"] for span in spans] == ["before", "after"]
            assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], count)
        old = reference_logprobs(target.weights[0], prompt, choice["token_ids"], 0.9)
        new = reference_logprobs(target.weights[1], prompt, choice["token_ids"], 0.9)
        cut = spans[0]["end"] if len(spans) == 2 else 0
        assert_logprobs(choice, old[:cut] + new[cut:], target.tolerance)
        # The check has power: around the boundary the other weights give other logprobs.
        assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 100 * target.tolerance
    await publish(client, target.weights[0], "before")


async def _until_generating(client: httpx.AsyncClient) -> None:
    """Until tokens have been sampled since this was called."""
    enough = await _generated(client) + 8
    while await _generated(client) < enough:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def _generated(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


@check
async def waiting_lets_requests_end_under_their_weights(client: httpx.AsyncClient, target: Target) -> None:
    await publish(client, target.weights[0], "drained")
    running = asyncio.create_task(generate(client, target, [61, 62], max_tokens=60))
    await _until_generating(client)
    await control(client, "/pause?mode=wait&clear_cache=true")
    body = await running
    await control(client, "/resume")
    assert body["choices"][0]["weight_versions"] == [{"version": "drained", "start": 0, "end": 60}]


@check
async def aborting_ends_requests_where_they_are(client: httpx.AsyncClient, target: Target) -> None:
    running = asyncio.create_task(generate(client, target, [71, 72], max_tokens=target.long_answer))
    await _until_generating(client)
    await control(client, "/pause?mode=abort&clear_cache=true")
    choice = (await running)["choices"][0]
    await control(client, "/resume")
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) < target.long_answer


@check
async def checksums_tell_weights_apart(client: httpx.AsyncClient, target: Target) -> None:
    async def sums() -> dict[str, str]:
        return dict((await control(client, "/weight_checker", {"action": "checksum"}))["checksums"])

    await publish(client, target.weights[0], "sum-0")
    first = await sums()
    assert all(name.startswith("dp0:pp0:pcp0:tp0:") and len(value) == 64 for name, value in first.items())
    await publish(client, target.weights[1], "sum-1")
    second = await sums()
    await publish(client, target.weights[0], "sum-0")
    assert await sums() == first
    different = [name for name in first if first[name] != second[name]]
    assert different
    if target.digests_all_tensors:
        matrices = [name for name in first if name.endswith("proj.weight") or "embed" in name]
        assert set(matrices) <= set(different)


@check
async def prefix_caches_can_be_reset(client: httpx.AsyncClient, target: Target) -> None:
    assert (await client.post("/reset_prefix_cache")).status_code == 200
