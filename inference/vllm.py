"""Client for vLLM and for the dev engine, which speaks the same part of vLLM's API: tokens in, tokens out.

Invariant: what `sample` returns was sampled by the engine exactly so. Every count is checked against the request
(`answers`), and a contradiction is a malformed answer, never a repaired one.

Time has one owner: the caller, who cancels. There is no read timeout, because a long generation is not a fault; a
machine that vanishes is noticed by TCP keep-alive within half a minute. Cancelling closes the connection, which makes
the engine abort the request. Nothing is retried here.
"""

import time
from contextlib import aclosing
from typing import Any, Final

from ..contracts.engines import CAPABILITIES
from .answers import Growing, read_completion
from .connection import UNREPORTED, Connection
from .engines import Completion, EngineAddress, Progress, SampleRequest, WeightInfo, why_unsupported
from .errors import EngineFailure, EngineFailureKind, rejected

GENERATE: Final = "/inference/v1/generate"
_VOCABULARY: Final = 2**31
"""Ids are stored as int32; a tighter bound comes from the model's own vocabulary."""
PROGRESS_S: Final = 2.0
"""`progress` of a streamed completion is told at most this often."""


class VllmEngine:
    """One engine over HTTP. `vocabulary`: number of ids the model has, where it is known."""

    def __init__(self, address: EngineAddress, *, vocabulary: int | None = None) -> None:
        self.engine_id = address.engine_id
        self._can = CAPABILITIES[address.kind]
        self._vocabulary = vocabulary or _VOCABULARY
        self._server = Connection(address)

    async def sample(self, request: SampleRequest, progress: Progress | None = None) -> Completion:
        problem = why_unsupported(request.sampling, self._can)
        if problem is not None:
            raise rejected(problem)
        served = await self._server.model()
        incarnation = await self._server.incarnation()
        body = request_body(request, served.get("id"), stream=progress is not None)
        if progress is not None:
            growing = Growing(self._server.who, request, self._vocabulary, incarnation)
            return await self._grown(growing, body, progress)
        answer = await self._server.call("POST", GENERATE, body, silence_s=None)
        return read_completion(self._server.who, request, answer, self._vocabulary, incarnation)

    async def _grown(self, growing: Growing, body: dict[str, Any], progress: Progress) -> Completion:
        """The whole of a streamed completion; `progress` hears of what came before a stream broke off, too."""
        told, told_at = 0, time.monotonic()
        try:
            async with aclosing(self._server.events(GENERATE, body)) as stream:
                async for event in stream:
                    growing.add(event)
                    if time.monotonic() - told_at >= PROGRESS_S and growing.size > told:
                        told, told_at = growing.size, time.monotonic()
                        await progress(growing.partial())
            return growing.whole()
        except EngineFailure as failure:
            if failure.kind is not EngineFailureKind.MALFORMED and growing.size > told:
                await progress(growing.partial())
            raise

    async def health(self) -> None:
        await self._server.health()

    async def weight_info(self) -> WeightInfo:
        return await self._server.weight_info()

    async def label(self) -> str:
        return await self._server.label()

    async def context_limit(self) -> int | None:
        limit = (await self._server.model()).get("max_model_len")
        return limit if type(limit) is int and limit > 0 else None

    async def waiting(self) -> int | None:
        return await self._server.gauge("vllm:num_requests_waiting")

    async def close(self) -> None:
        await self._server.close()


def request_body(request: SampleRequest, model: str | None, *, stream: bool = False) -> dict[str, Any]:
    """The JSON body of `/inference/v1/generate`.

    `logprobs: 1`: the sampled token's own, of the distribution after temperature (the server runs with
    `--logprobs-mode processed_logprobs`). `ignore_eos`: only the chat format's own stop tokens end a completion,
    whatever the server's generation config adds.
    """
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "logprobs": 1,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,
    }
    parameters |= sampling.special
    if request.seed is not None:
        parameters["seed"] = request.seed
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": request.prompt_ids,
        "stream": stream,
        "sampling_params": parameters,
    }
    if model is not None:
        body["model"] = model
    return body


__all__ = ["UNREPORTED", "EngineFailure", "VllmEngine", "request_body"]
