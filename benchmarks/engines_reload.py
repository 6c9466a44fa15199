"""How long generation stands still for a reload while requests are kept: through `publish`, and by bare calls.

The stall is the longest time between two tokens of requests that stream all the while.
"""

import asyncio
import json
import random
import statistics
import time
from pathlib import Path

import httpx
from atropos.contracts.engines import EngineKind
from atropos.inference.control import publish
from atropos.inference.engines import EngineAddress
from atropos.inference.vllm_control import VllmControl

from .engine import VOCABULARY

_STREAMS = 8
_TOKENS = 150
_PROMPT = 40


class Streams:
    """Requests that follow one another on a few connections, and when their tokens came."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._last = time.perf_counter()
        self.longest = 0.0

    async def run(self, number: int) -> None:
        draw = random.Random(number)
        async with httpx.AsyncClient(base_url=self._url, timeout=None, trust_env=False) as client:
            while True:
                prompt = [draw.randrange(3, VOCABULARY) for _ in range(_PROMPT)]
                body = {
                    "model": "policy",
                    "token_ids": prompt,
                    "stream": True,
                    "sampling_params": {"max_tokens": _TOKENS, "ignore_eos": True, "logprobs": 1},
                }
                async with client.stream("POST", "/inference/v1/generate", content=json.dumps(body)) as answer:
                    async for _ in answer.aiter_bytes():
                        now = time.perf_counter()
                        self.longest, self._last = max(self.longest, now - self._last), now


async def measure(folder: Path, url: str, rounds: int) -> dict[str, float]:
    """`reload_stall_ratio`, and both stalls in ms: medians over rounds that take turns."""
    streams = Streams(url)
    tasks = [asyncio.create_task(streams.run(number)) for number in range(_STREAMS)]
    times: dict[str, list[float]] = {"publish": [], "bare": []}
    try:
        for number in range(rounds):
            for way, stalls in times.items():
                await asyncio.sleep(0.5)
                streams.longest = 0.0
                if way == "publish":
                    control = VllmControl(EngineAddress("engine", EngineKind.DEV, url, 8))
                    await publish(control, path=folder, label=f"p{number}", load_timeout_s=60)
                    await control.close()
                else:
                    await _bare(url, folder)
                await asyncio.sleep(0.5)
                stalls.append(streams.longest)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ratio = statistics.median(ours / bare for ours, bare in zip(*times.values(), strict=True))
    return {"reload_stall_ratio": ratio} | {f"stall_{way}_ms": statistics.median(s) * 1000 for way, s in times.items()}


async def _bare(url: str, folder: Path) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        await client.post("/pause?mode=keep&clear_cache=true")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await client.post("/collective_rpc", json=body)
        await client.post("/resume")
