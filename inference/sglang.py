"""Client for SGLang: tokens in, tokens out over its native API.

Invariant: what `sample` returns was sampled by the engine exactly so, from the plain temperature distribution unless
the request asks for another, and ends only at the request's stop tokens or its limit. The server's defaults are never
relied on: each parameter that changes what is drawn is sent, and a server that adds some of its own is refused.

An end token of the server's own that is none of the request's is sampled past: the next request goes on behind it.
Time, retries and cancelling are as for vLLM (`vllm`); SGLang notices a closed connection within some seconds.

Read from the sources of 0.5.9 and 0.5.23. `KEEPS_CALLS` says from which version on calls in flight may cross a load.
"""

import asyncio
import hashlib
import json
import re
import time
from dataclasses import replace
from typing import Any, Final

from ..contracts.engines import CAPABILITIES
from .checks import followed
from .connection import CONTROL_S, INCARNATION_S, UNREPORTED, Connection
from .engines import Completion, EngineAddress, Progress, SampleRequest, WeightInfo, why_unsupported
from .errors import EngineFailure, rejected, unavailable
from .sglang_answers import Part, Reader, SglangGrowing
from .streaming import grown

GENERATE: Final = "/generate"
_VOCABULARY: Final = 2**31
PROGRESS_S: Final = 2.0
"""`progress` of a streamed completion is told at most this often."""
_LOAD_S: Final = 600.0
_EVENT_TOKENS: Final = 32
"""Tokens between two events; where each has all tokens so far, one an event would be a square of them."""
KEEPS_CALLS: Final = (0, 5, 23)
"""Says which weights sampled each token, and can drop its caches while calls in flight wait to go on."""
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
NEUTRAL: Final[dict[str, Any]] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
}


class SglangServer(Connection):
    """What an SGLang server says of itself. `model`: its `/server_info`, asked once for each life of it.

    `/health` samples a token and takes a second, so health is whether it tells its model. No life has a name; it is
    known by how long the start took and by the seed drawn in it.
    """

    _LABEL_PATH = "/model_info"

    async def health(self) -> None:
        await self.send("GET", self._LABEL_PATH)

    def __init__(self, address: EngineAddress) -> None:
        super().__init__(address)
        self._looking = asyncio.Lock()

    async def model(self) -> dict[str, Any]:
        if self._served is None:
            await self._life()
        return self._served or {}

    async def incarnation(self) -> str:
        """As read within the last seconds; while weights are loaded, the server answers only once they are."""
        async with self._looking:
            if self._incarnation is None or time.monotonic() - self._incarnation_read > INCARNATION_S:
                return await self._life(silence_s=_LOAD_S)
            return self._incarnation

    async def _life(self, silence_s: float = CONTROL_S) -> str:
        info = await self.call("GET", "/server_info", silence_s=silence_s)
        incarnation = life_of(info)
        self._remember(incarnation)
        self._served = info
        return incarnation


def life_of(info: dict[str, Any]) -> str:
    """A name for this life of a server, from what differs between two starts."""
    marks = [info.get("random_seed"), info.get("startup_time")]
    if marks == [None, None]:
        return UNREPORTED
    return "life-" + hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()[:16]


def keeps_calls(info: dict[str, Any]) -> bool:
    """Whether calls in flight may cross a load: the version can be told, and is new enough."""
    found = _VERSION.match(str(info.get("version")))
    return found is not None and tuple(map(int, found.groups())) >= KEEPS_CALLS


class SglangEngine:
    """One engine over HTTP. `vocabulary`: number of ids the model has, where it is known."""

    def __init__(self, address: EngineAddress, *, vocabulary: int | None = None) -> None:
        self.engine_id = address.engine_id
        self._can = CAPABILITIES[address.kind]
        self._vocabulary = vocabulary or _VOCABULARY
        self._server = SglangServer(address)

    async def sample(self, request: SampleRequest, progress: Progress | None = None) -> Completion:
        problem = why_unsupported(request.sampling, self._can)
        if problem is not None:
            raise rejected(problem)
        so_far: Completion | None = None
        number = 0
        while True:
            part = await self._part(_rest(request, so_far), number, _after(so_far, progress))
            so_far = part.completion if so_far is None else joined(so_far, part.completion)
            if not part.goes_on:
                return so_far
            number += 1

    async def _part(self, request: SampleRequest, number: int, progress: Progress | None) -> Part:
        info = await self._server.model()
        if info.get("preferred_sampling_params"):
            says = "changes how everything is sampled; start it without --preferred-sampling-params"
            raise rejected(f"{self._server.who} {says}")
        incarnation = await self._server.incarnation()
        reader = Reader(self._server.who, request, self._vocabulary, incarnation, keeps_calls(info))
        body = request_body(request, number, stream=progress is not None)
        try:
            if progress is not None:
                growing = SglangGrowing(reader, await self._server.label())
                return await grown(growing, self._server.events(GENERATE, body), progress, every_s=PROGRESS_S)
            return reader.part(await self._server.call("POST", GENERATE, body, silence_s=None))
        except EngineFailure as failure:
            if failure.status == 400 and "uplicate request ID" in failure.message:
                says = f"{self._server.who} still works on the call that this one repeats"
                raise unavailable(says) from failure
            raise

    async def health(self) -> None:
        await self._server.health()

    async def waiting(self) -> int | None:
        """It says so where it was started with `--enable-metrics`."""
        return await self._server.gauge("sglang:num_queue_reqs")

    async def weight_info(self) -> WeightInfo:
        return await self._server.weight_info()

    async def label(self) -> str:
        return await self._server.label()

    async def context_limit(self) -> int | None:
        """A prompt must be shorter than `max_req_input_len`, and one that is leaves room for a few tokens."""
        limit = (await self._server.model()).get("max_req_input_len")
        return limit - 1 if type(limit) is int and limit > 1 else None

    async def close(self) -> None:
        await self._server.close()


def request_body(request: SampleRequest, number: int, *, stream: bool) -> dict[str, Any]:
    """The JSON body of `/generate` for part `number` of a completion.

    `rid`: the server aborts every call whose id begins with that of the call to abort, so none is the beginning of
    another. `ignore_eos` would ignore the request's own stop tokens, too.
    """
    parameters = NEUTRAL | {
        "max_new_tokens": request.max_tokens,
        "temperature": request.sampling.temperature,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": False,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    parameters |= request.sampling.special
    if request.seed is not None:
        parameters["sampling_seed"] = request.seed
    if stream:
        parameters["stream_interval"] = _EVENT_TOKENS
    return {
        "rid": f"{request.request_id}/part/{number}/",
        "input_ids": request.prompt_ids,
        "sampling_params": parameters,
        "return_logprob": True,
        "stream": stream,
    }


def joined(first: Completion, then: Completion) -> Completion:
    """A completion and the one that goes on behind it. Raises EngineFailure where the server was restarted between."""
    if then.incarnation != first.incarnation:
        raise unavailable("the engine was restarted within a completion")
    return replace(
        then,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
        spans=followed(first.spans, then.spans, len(first.token_ids)),
        usage_prompt=first.usage_prompt,
    )


def _rest(request: SampleRequest, so_far: Completion | None) -> SampleRequest:
    if so_far is None:
        return request
    left = request.max_tokens - len(so_far.token_ids)
    return replace(request, prompt_ids=request.prompt_ids + so_far.token_ids, max_tokens=left)


def _after(so_far: Completion | None, progress: Progress | None) -> Progress | None:
    """Progress of the part behind `so_far`, told as progress of both."""
    if progress is None or so_far is None:
        return progress

    async def told(partial: Completion) -> None:
        await progress(joined(so_far, partial))

    return told
