"""A dev engine as users start it: its own process, on a free port, with random weights of the tiny policy's size."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from atropos.inference.engine.journal import Journal
from atropos.inference.engine.loading import limits, load
from atropos.inference.engine.scheduler import Engine
from atropos.inference.engine.server import Served, Server, create_app
from atropos.tests.inference.conformance import Target
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 1024
START_TIMEOUT_S = 90


def save_model(folder: Path, seed: int) -> Path:
    """A random untied Llama, sharp enough to tell two seeds apart, and a byte tokenizer with Qwen's tokens."""
    pieces = models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    tokenizer = Tokenizer(pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    marks = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in marks])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Running:
    """An engine process: where it answers, and what it writes."""

    url: str
    journal: Path
    process: subprocess.Popen[str]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.journal.read_text().splitlines()]


@contextlib.contextmanager
def engine_process(model: Path, journal: Path, *arguments: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "atropos.inference.engine", "--model", str(model), "--port", "0"]
    command += ["--journal", str(journal), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http" in line, "the engine did not start"
        yield Running(line.split(" at ")[1].split()[0], journal, process)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def engine_here(
    model: Path, journal: Path | None, on_fatal: Callable[[str], None] = print
) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    """The same server inside the test's process: quicker to start, for tests that need no process of its own."""
    loaded = load(model, torch.device("cpu"), "float32", 64)
    engine = Engine(loaded.model, model, limits(loaded, 4, 16), 64, loaded.eos_ids, Journal(journal), on_fatal)
    server = Server(create_app(Served(engine, None, "policy", "0")), engine)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            yield server, client
        server.should_exit = True
        await serving


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_model(folder / "zero", 0), save_model(folder / "one", 1)


@pytest.fixture(scope="session")
def engine(weights: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with engine_process(weights[0], tmp_path_factory.mktemp("engine") / "journal.jsonl") as running:
        yield running


@pytest.fixture(scope="session")
def target(weights: tuple[Path, Path]) -> Target:
    return Target(model="policy", weights=weights, context=CONTEXT)


@pytest.fixture
async def client(engine: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=60.0) as client:
        yield client
