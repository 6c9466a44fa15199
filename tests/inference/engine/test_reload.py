"""A reload is all or nothing, and tokens are never labelled with weights that did not compute them."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from atropos.tests.inference.conformance import (
    Target,
    assert_logprobs,
    assert_prompt_logprobs,
    control,
    generate,
    load,
    publish,
    reference_logprobs,
    version,
)
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def _torn(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path / "model.safetensors")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def _noise(path: Path, tensors: Tensors) -> None:
    del tensors
    (path / "model.safetensors").write_bytes(b"not weights")


def _absent(path: Path, tensors: Tensors) -> None:
    del path, tensors


def _index_of_missing_shards(path: Path, tensors: Tensors) -> None:
    del tensors
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')


def _one_short(path: Path, tensors: Tensors) -> None:
    tensors.pop("model.norm.weight")
    save_file(tensors, path / "model.safetensors")


def _one_more(path: Path, tensors: Tensors) -> None:
    save_file(tensors | {"model.extra": torch.zeros(2)}, path / "model.safetensors")


def _another_shape(path: Path, tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    save_file(tensors, path / "model.safetensors")


def _not_a_number(path: Path, tensors: Tensors) -> None:
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path / "model.safetensors")


BROKEN: dict[str, Callable[[Path, Tensors], None]] = {
    "half a file": _torn,
    "another format": _noise,
    "no file": _absent,
    "shards that are gone": _index_of_missing_shards,
    "a missing tensor": _one_short,
    "an unknown tensor": _one_more,
    "another shape": _another_shape,
    "not a number": _not_a_number,
}


@pytest.mark.parametrize("name", BROKEN)
async def test_weights_that_do_not_fit_leave_the_old_ones_serving(
    name: str, client: httpx.AsyncClient, target: Target, tmp_path: Path
) -> None:
    await publish(client, target.weights[0], "kept")
    before = await control(client, "/weight_checker", {"action": "checksum"})
    tensors = load_file(target.weights[1] / "model.safetensors")
    BROKEN[name](tmp_path, tensors)
    await control(client, "/pause?mode=keep")
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    answer = await client.post("/collective_rpc", json=call)
    assert answer.status_code == 400
    assert "the old ones stay" in answer.json()["error"]["message"]
    await control(client, "/resume")
    assert await version(client) == "kept"
    assert await control(client, "/weight_checker", {"action": "checksum"}) == before
    choice = (await generate(client, target, [1, 2]))["choices"][0]
    assert_logprobs(choice, reference_logprobs(target.weights[0], [1, 2], choice["token_ids"]), target.tolerance)


async def test_a_running_engine_does_not_reload(client: httpx.AsyncClient, target: Target) -> None:
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(target.weights[1])}}
    answer = await client.post("/collective_rpc", json=call)
    assert answer.status_code == 409
    assert "pause" in answer.json()["error"]["message"].lower()


async def test_weights_without_a_name_are_called_unversioned(client: httpx.AsyncClient, target: Target) -> None:
    await publish(client, target.weights[0], "named")
    await control(client, "/pause?mode=keep")
    await control(
        client, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(target.weights[1])}}
    )
    await control(client, "/resume")
    assert await version(client) == "unversioned"
    spans = (await generate(client, target, [1]))["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["unversioned"]
    await publish(client, target.weights[0], "named")


async def test_a_prompt_is_scored_by_the_weights_that_answer_it(client: httpx.AsyncClient, target: Target) -> None:
    await control(client, "/pause?mode=keep")
    prompt = [7, 3, 99, 4, 120, 55]
    waiting = asyncio.create_task(generate(client, target, prompt, max_tokens=1, prompt_logprobs=0))
    while (await client.get("/load")).json() != {"server_load": 1}:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await load(client, target.weights[1], "later")
    await control(client, "/resume")
    body = await waiting
    assert body["choices"][0]["weight_versions"] == [{"version": "later", "start": 0, "end": 1}]
    assert_prompt_logprobs(body, prompt, target.weights[1], target.tolerance)
    await publish(client, target.weights[0], "earlier")


async def test_every_span_of_many_reloads_matches_its_weights(client: httpx.AsyncClient, target: Target) -> None:
    await publish(client, target.weights[0], "0")
    prompts = [[(13 * i + j) % 256 for j in range(4 + 20 * i)] for i in range(5)]
    length = 400
    running = [asyncio.create_task(generate(client, target, p, max_tokens=length)) for p in prompts]
    for number in range(1, 5):
        await asyncio.sleep(0.15)
        await control(client, "/pause?mode=keep")
        await load(client, target.weights[number % 2], str(number))
        await control(client, "/resume")
    most = 0
    for prompt, body in zip(prompts, await asyncio.gather(*running), strict=True):
        choice = body["choices"][0]
        spans = choice["weight_versions"]
        most = max(most, len(spans))
        assert [spans[0]["start"], spans[-1]["end"]] == [0, length]
        assert all(a["end"] == b["start"] for a, b in itertools.pairwise(spans))
        by_weights = [reference_logprobs(folder, prompt, choice["token_ids"]) for folder in target.weights]
        expected = [x for s in spans for x in by_weights[int(s["version"]) % 2][s["start"] : s["end"]]]
        assert_logprobs(choice, expected, target.tolerance)
    assert most > 1
    await publish(client, target.weights[0], "0")
