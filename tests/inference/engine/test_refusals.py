"""Bad input: one sentence that says what to do, and nothing half-started."""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from atropos.inference.engine.__main__ import main
from atropos.inference.engine.journal import Journal
from atropos.inference.engine.loading import limits, load
from atropos.inference.engine.scheduler import Engine
from atropos.inference.engine.server import Served, create_app
from atropos.tests.inference.conformance import Target
from atropos.tests.inference.engine.conftest import Running, engine_here


def test_a_taken_port_is_named_before_anything_is_loaded(weights: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "atropos.inference.engine", "--model", str(weights[0]), "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 2
    (sentence,) = ended.stderr.splitlines()
    assert f"127.0.0.1:{port}" in sentence
    assert "--port" in sentence


KINDS = ["absent", "empty", "torn", "too long", "journal", "open", "little cache", "no device", "no key", "two keys"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    kind: str, weights: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, more, expected = weights[0], [], ""
    if kind == "absent":
        model, expected = tmp_path / "model", "There is no folder"
    elif kind == "empty":
        model, expected = tmp_path, "no config.json"
    elif kind == "torn":
        model, expected = tmp_path, "cannot be loaded"
        (model / "config.json").write_text((weights[0] / "config.json").read_text())
        (model / "model.safetensors").write_bytes(b"torn")
    elif kind == "too long":
        more, expected = ["--max-model-len", "9999"], "1024 positions"
    elif kind == "journal":
        more, expected = ["--journal", str(tmp_path)], "journal"
    elif kind == "open":
        more, expected = ["--host", "0.0.0.0"], "--token"
    elif kind == "little cache":
        more, expected = ["--kv-cache-mb", "1"], "--kv-cache-mb"
    elif kind == "no key":
        more, expected = ["--token-env", "ATROPOS_TEST_UNSET"], "ATROPOS_TEST_UNSET"
    elif kind == "two keys":
        more, expected = ["--token-env", "PATH", "--token", "s3cret"], "give one of them"
    else:
        device = "cuda" if sys.platform == "darwin" else "mps"
        more, expected = ["--device", device], f"no {device} device"
    assert main(["--model", str(model), "--port", "0", *more]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert printed.out == ""


def test_a_token_from_the_environment_lets_the_engine_listen_for_others(
    weights: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", "s3cret")
    opened = ["--host", "0.0.0.0", "--token-env", "ENGINE_API_KEY"]
    assert main(["--model", str(weights[0]), "--port", "0", *opened, "--max-model-len", "9999"]) == 2
    printed = capsys.readouterr()
    assert "1024 positions" in printed.err  # refused for this alone
    assert "s3cret" not in printed.err + printed.out


async def test_a_token_opens_every_route(weights: tuple[Path, Path]) -> None:
    loaded = load(weights[0], torch.device("cpu"), "float32", 64)
    engine = Engine(loaded.model, weights[0], limits(loaded, 4, 16), 64, loaded.eos_ids, Journal(None), print)
    app = create_app(Served(engine, None, "policy", "0"), token="s3cret")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/weight_info")).status_code == 401
        assert (await client.post("/resume", headers={"Authorization": "Bearer wrong"})).status_code == 401
        models = await client.get("/v1/models", headers={"Authorization": "Bearer s3cret"})
        assert models.json()["data"][0]["max_model_len"] == 64


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"min_p": 0.1}, "min_p"),
        ({"n": 2}, "n"),
        ({"logprobs": 5}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stop": ["."]}, "stop"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
async def test_sampling_that_is_not_supported_is_refused_not_ignored(
    params: dict[str, object], field: str, client: httpx.AsyncClient, target: Target
) -> None:
    body = {"model": target.model, "token_ids": [1], "sampling_params": params}
    answer = await client.post("/inference/v1/generate", json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"sampling_params.{field}" in message
    assert "support" in message or "less than or equal" in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sampling_params": {"prompt_logprobs": 0, "temperature": 0.7}}, "only temperature 1.0"),
        ({"sampling_params": {"prompt_logprobs": 0, "temperature": 0.0}}, "only temperature 1.0"),
        ({"sampling_params": {"prompt_logprobs": 0}, "stream": True}, "together with stream"),
    ],
)
async def test_prompt_logprobs_have_one_meaning(
    change: dict[str, object], says: str, client: httpx.AsyncClient, target: Target
) -> None:
    answer = await client.post("/inference/v1/generate", json={"model": target.model, "token_ids": [1]} | change)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


async def test_neutral_values_of_unsupported_parameters_are_fine(client: httpx.AsyncClient, target: Target) -> None:
    params = {"max_tokens": 1, "n": 1, "min_p": 0.0, "presence_penalty": 0.0, "stop": None, "top_k": -1}
    body = {"model": target.model, "token_ids": [1], "sampling_params": params}
    assert (await client.post("/inference/v1/generate", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause?mode=freeze", None),
        ("/pause?mode=keep&clear_cache=perhaps", None),
        ("/pause?tags=all", None),
        ("/collective_rpc", {"method": "sleep"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"path": "x"}}),
        ("/update_weight_version", {"version": "v1"}),
        ("/weight_checker", {"action": "compare"}),
        ("/v1/chat/completions", {"model": "policy", "messages": [], "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "a"}], "stream": True}),
    ],
)
async def test_control_that_is_not_understood_is_refused(
    path: str, body: dict[str, object] | None, client: httpx.AsyncClient
) -> None:
    answer = await client.post(path, content=None if body is None else json.dumps(body))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


async def test_a_shutdown_fails_waiting_calls_at_once(weights: tuple[Path, Path]) -> None:
    async with engine_here(weights[0], None) as (server, client):
        await client.post("/pause?mode=keep")
        body = {"model": "policy", "token_ids": [1]}
        waiting = asyncio.create_task(client.post("/inference/v1/generate", json=body))
        while (await client.get("/load")).json() != {"server_load": 1}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.should_exit = True
        answer = await waiting
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]


async def test_the_engine_still_serves(engine: Running, client: httpx.AsyncClient) -> None:
    assert engine.process.poll() is None
    assert (await client.get("/is_paused")).json() == {"is_paused": False}
