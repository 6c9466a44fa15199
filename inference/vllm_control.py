"""The control side of vLLM and of the dev engine, which speaks the same routes.

Invariant: calls in flight are kept over a load, since each token's version is reported: what was sampled before it
keeps the old name, what comes after it carries the new one.
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .answers import read_labels, read_prompt_logprobs
from .connection import CONTROL_S, Connection
from .control import CHECKSUMS_S, PAUSE_S, RESUME_S, SCORE_S, all_of, wrong_version
from .engines import EngineAddress, WeightInfo
from .errors import malformed
from .vllm import GENERATE

_RANK: Final = re.compile(r"^(?:[a-z]+\d+:)+")
"""`dp0:pp0:pcp0:tp0:` before a tensor's name."""


class VllmControl:
    """The control routes of one engine."""

    def __init__(self, address: EngineAddress) -> None:
        self.engine_id = address.engine_id
        self._concurrency = address.concurrency
        self._server = Connection(address)

    async def weight_info(self) -> WeightInfo:
        return await self._server.weight_info()

    async def is_paused(self) -> bool:
        paused = (await self._server.call("GET", "/is_paused")).get("is_paused")
        if not isinstance(paused, bool):
            raise malformed(f"{self._server.who} does not say whether it is paused")
        return paused

    async def pause(self, *, limit_s: float = PAUSE_S) -> None:
        """Freeze calls in flight and drop every cached key and value."""
        await self._server.within(limit_s, "/pause?mode=keep&clear_cache=true")

    async def load(self, path: Path, label: str, *, limit_s: float) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await self._server.within(limit_s, "/collective_rpc", body)
        await self.set_version(label)

    async def set_version(self, label: str) -> None:
        await self._server.within(CONTROL_S, "/update_weight_version", {"new_version": label})

    async def resume(self, *, limit_s: float = RESUME_S) -> None:
        await self._server.within(limit_s, "/resume")

    async def checksums(self, *, limit_s: float = CHECKSUMS_S) -> dict[str, str]:
        """The SHA-256 of each tensor by its plain name. A name that ranks report with different digests is sharded and
        has no digest of its own; it is left out."""
        path = "/weight_checker"
        answer = self._server.parsed(path, await self._server.within(limit_s, path, {"action": "checksum"}))
        reported = answer.get("checksums")
        if not isinstance(reported, dict) or not all(isinstance(value, str) for value in reported.values()):
            raise malformed(f"{self._server.who} did not return a digest for each tensor")
        by_name: dict[str, set[str]] = {}
        for name, digest in reported.items():
            by_name.setdefault(_RANK.sub("", name), set()).add(digest)
        return {name: digests.pop() for name, digests in by_name.items() if len(digests) == 1}

    async def score(
        self, sequences: Sequence[Sequence[int]], *, label: str | None = None, limit_s: float = SCORE_S
    ) -> list[list[float]]:
        model = (await self._server.model()).get("id")
        slots = asyncio.Semaphore(self._concurrency)

        async def one(ids: Sequence[int]) -> list[float]:
            async with slots:
                return await self._score(ids, model, label, limit_s)

        return await all_of([one(ids) for ids in sequences])

    async def _score(self, ids: Sequence[int], model: object, label: str | None, limit_s: float) -> list[float]:
        parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "ignore_eos": True}
        body = {"model": model, "token_ids": list(ids), "stream": False, "sampling_params": parameters}
        answer = self._server.parsed(GENERATE, await self._server.within(limit_s, GENERATE, body))
        if label is not None:
            found = read_labels(self._server.who, answer)
            if found != {label}:
                raise wrong_version(self._server.who, found, label)
        return read_prompt_logprobs(self._server.who, ids, answer)

    async def close(self) -> None:
        await self._server.close()
