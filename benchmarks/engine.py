"""How much the dev engine gains from batching: 64 requests at once against one, over HTTP.

Run: python benchmarks/engine.py [--model DIR] [--url URL]. Prints one JSON line last. Both figures come from one run,
alternating, so that whatever else the machine does weighs on both. Without --model, a random Llama of the tiny policy's
size is served; without --url, an engine is started and stopped.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PROMPT_TOKENS = (45, 80)
COMPLETION_TOKENS = (8, 24)
"""Lengths of the calculator's two-turn episodes."""
VOCABULARY = 560


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=512, help="requests of a concurrent round")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = options.url
        if url is None:
            folder = options.model
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                save_tiny_llama(folder)
            url = stack.enter_context(serving(folder, options.threads))
        print(json.dumps(asyncio.run(measure(url, options))))


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate rounds of one and of many requests at once; medians over the rounds."""
    await load(url, 8, 64)
    alone, together = [], []
    for number in range(options.rounds):
        alone.append(await load(url, 1, max(16, options.requests // 16), seed=number))
        together.append(await load(url, options.concurrency, options.requests, seed=number))
        print(f"round {number + 1}: {alone[-1]:.0f} tok/s alone, {together[-1]:.0f} together", flush=True)
    one, many = statistics.median(alone), statistics.median(together)
    return {
        "bench": "engine",
        "concurrency": options.concurrency,
        "tokens_per_s_one": round(one, 1),
        "tokens_per_s_many": round(many, 1),
        "ratio": round(many / one, 2),
    }


async def load(url: str, concurrency: int, requests: int, seed: int = 0) -> float:
    """Sampled tokens per second of `requests` requests, `concurrency` at a time."""
    draw = random.Random(seed)
    bodies = iter([body(draw) for _ in range(requests)])
    started = time.perf_counter()
    tokens = await asyncio.gather(*(client(url, bodies) for _ in range(concurrency)))
    return sum(tokens) / (time.perf_counter() - started)


def body(draw: random.Random) -> bytes:
    prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(*PROMPT_TOKENS))]
    params = {"max_tokens": draw.randint(*COMPLETION_TOKENS), "ignore_eos": True, "logprobs": 0}
    return json.dumps({"model": "policy", "token_ids": prompt, "sampling_params": params}).encode()


async def client(url: str, bodies: Iterator[bytes]) -> int:
    """One connection that sends request after request. A bare HTTP/1.1 client: its cost is not what is measured."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: "
    tokens = 0
    for request in bodies:
        writer.write(head.encode() + str(len(request)).encode() + b"\r\n\r\n" + request)
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(headers.split("content-length:")[1].split("\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        if " 200 " not in headers.splitlines()[0]:
            raise RuntimeError(f"the engine refused a request: {answer}")
        tokens += answer["usage"]["completion_tokens"]
    writer.close()
    return tokens


@contextlib.contextmanager
def serving(folder: Path, threads: int | None) -> Iterator[str]:
    """An engine on a free port, ended with the block."""
    command = [sys.executable, "-m", "atropos.inference.engine", "--model", str(folder), "--port", "0"]
    command += ["--threads", str(threads)] if threads else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if " at http" not in line:
            raise SystemExit("The engine did not start; its reason is above.")
        yield line.split(" at ")[1].split()[0]
    finally:
        process.terminate()
        process.wait(30)


def save_tiny_llama(folder: Path) -> None:
    """A random model of the tiny policy's size: 440 thousand parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=256, tie_word_embeddings=False, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
