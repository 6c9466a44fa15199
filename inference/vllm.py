"""Client for vLLM and for the dev engine, which speaks the same part of vLLM's API: tokens in, tokens out.

Invariant: what `sample` returns was sampled by the engine exactly so. Every count is checked against the request
(`answers`), and a contradiction is a malformed answer, never a repaired one.

Time has one owner: the caller, who cancels. There is no read timeout, because a long generation is not a fault; a
machine that vanishes is noticed by TCP keep-alive within half a minute. Cancelling closes the connection, which makes
the engine abort the request. Nothing is retried here.
"""

from dataclasses import replace
from typing import Any, Final

from ..contracts.engines import CAPABILITIES
from .answers import Growing, read_completion
from .connection import UNREPORTED, Connection
from .engines import Completion, EngineAddress, LabelSpan, Progress, SampleRequest, WeightInfo, why_unsupported
from .errors import EngineFailure, rejected
from .streaming import grown

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
            told = self._labelled(await self._server.label(), progress)
            growing = Growing(self._server.who, request, self._vocabulary, incarnation)
            return await grown(growing, self._server.events(GENERATE, body), told, every_s=PROGRESS_S)
        answer = await self._server.call("POST", GENERATE, body, silence_s=None)
        return read_completion(self._server.who, request, answer, self._vocabulary, incarnation)

    def _labelled(self, label: str, progress: Progress) -> Progress:
        """Tell `progress` only of tokens of which it is known which weights sampled them.

        vLLM says it at the end. Before that they are those which it held before it was asked (`label`), if it still
        holds them now. What it sampled across a reload, or just before it died, is not told of.
        """

        async def told(partial: Completion) -> None:
            if partial.spans:
                await progress(partial)
                return
            try:
                now = await self._server.label(fresh=True)
            except EngineFailure:
                return
            if now == label:
                await progress(replace(partial, spans=(LabelSpan(label, 0, len(partial.token_ids)),)))

        return told

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
