"""Client for vLLM and for the dev engine, which speaks the same part of vLLM's API: tokens in, tokens out.

Invariant: what `sample` returns was sampled by the engine exactly so. Every count is checked against the request
(`answers`), and a contradiction is a malformed answer, never a repaired one.

Time has one owner: the caller, who cancels. There is no read timeout, because a long generation is not a fault; a
machine that vanishes is noticed by TCP keep-alive within half a minute. Cancelling closes the connection, which makes
the engine abort the request. Nothing is retried here.

Incarnation: the dev engine names itself in each answer. vLLM does not, so it is the start time of its process
(`process_start_time_seconds` of `/metrics`), read again after a broken connection and whenever the last reading is
older than five seconds; where the metric is missing it is `unreported`.
"""

import asyncio
import json
import math
import re
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import httpx

from .answers import Growing, events, read_completion
from .engines import Completion, EngineAddress, Progress, SampleRequest, WeightInfo, why_unsupported
from .errors import (
    EngineFailure,
    EngineFailureKind,
    failure_from_status,
    failure_from_transport,
    malformed,
    quoted,
    rejected,
)

UNREPORTED: Final = "unreported"
"""Incarnation of a server that says nothing from which one could be told."""
_CONNECT_S: Final = 5.0
_SEND_S: Final = 30.0
"""Longest stall while a prompt is being sent."""
_CONTROL_S: Final = 10.0
"""Longest silence of a control call; those are answered at once or not at all."""
_INCARNATION_S: Final = 5.0
_VOCABULARY: Final = 2**31
"""Ids are stored as int32; a tighter bound comes from the model's own vocabulary."""
PROGRESS_S: Final = 2.0
"""`progress` of a streamed completion is told at most this often."""
_JSON: Final = {"content-type": "application/json"}
_START_TIME: Final = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def _keep_alive() -> list[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), seconds))
    return options


class VllmEngine:
    """One engine over HTTP. `vocabulary`: number of ids the model has, where it is known."""

    def __init__(self, address: EngineAddress, *, vocabulary: int | None = None) -> None:
        self.engine_id = address.engine_id
        self._who = f"engine {address.engine_id}"
        self._vocabulary = vocabulary or _VOCABULARY
        # Never through a proxy of the environment: an engine is on this machine or a private network.
        self._http = httpx.AsyncClient(
            base_url=address.url.rstrip("/").removesuffix("/v1"),
            headers={"authorization": f"Bearer {address.api_key}"} if address.api_key else {},
            timeout=httpx.Timeout(connect=_CONNECT_S, read=None, write=_SEND_S, pool=None),
            transport=httpx.AsyncHTTPTransport(
                retries=0,
                socket_options=_keep_alive(),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=address.concurrency + 4),
            ),
            trust_env=False,
        )
        self._served: dict[str, Any] | None = None
        self._incarnation: str | None = None
        self._incarnation_read = -math.inf
        self._reading = asyncio.Lock()

    async def sample(self, request: SampleRequest, progress: Progress | None = None) -> Completion:
        problem = why_unsupported(request.sampling)
        if problem is not None:
            raise rejected(problem)
        served = await self._model()
        incarnation = await self._known_incarnation()
        body = request_body(request, served.get("id"), stream=progress is not None)
        if progress is not None:
            growing = Growing(self._who, request, self._vocabulary, incarnation)
            return await self._grown(growing, body, progress)
        answer = await self._call("POST", "/inference/v1/generate", body, read_s=None)
        return read_completion(self._who, request, answer, self._vocabulary, incarnation)

    async def _grown(self, growing: Growing, body: dict[str, Any], progress: Progress) -> Completion:
        """The whole of a streamed completion; `progress` hears of what came before a stream broke off, too."""
        told, told_at = 0, time.monotonic()
        try:
            async with aclosing(self._events("/inference/v1/generate", body)) as stream:
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

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with self._http.stream("POST", path, content=_dumped(body), headers=_JSON) as response:
                if response.status_code >= 300:
                    said = await response.aread()
                    raise failure_from_status(self._who, response.status_code, response.headers, said)
                async for event in events(self._who, response.aiter_bytes()):
                    yield event
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._forget()
            raise failure_from_transport(self._who, error) from error

    async def health(self) -> None:
        await self._send("GET", "/health", None, _CONTROL_S)

    async def weight_info(self) -> WeightInfo:
        answer = await self._call("GET", "/weight_info")
        label = answer.get("weight_version")
        if not isinstance(label, str) or not label:
            raise malformed(f"{self._who} does not say which weights it holds")
        named = answer.get("incarnation")
        if isinstance(named, str) and named:
            self._remember(named)
            return WeightInfo(label, named)
        return WeightInfo(label, await self._start_time())

    async def context_limit(self) -> int | None:
        limit = (await self._model()).get("max_model_len")
        return limit if type(limit) is int and limit > 0 else None

    async def close(self) -> None:
        await self._http.aclose()

    async def _model(self) -> dict[str, Any]:
        """The first model the server lists; asked once for each life of the server."""
        if self._served is None:
            data = (await self._call("GET", "/v1/models")).get("data")
            if not isinstance(data, list) or not data or not isinstance(data[0], dict):
                raise malformed(f"{self._who} lists no model")
            self._served = data[0]
        return self._served

    async def _known_incarnation(self) -> str:
        async with self._reading:
            if self._incarnation is None or time.monotonic() - self._incarnation_read > _INCARNATION_S:
                return (await self.weight_info()).incarnation
            return self._incarnation

    async def _start_time(self) -> str:
        response = await self._send("GET", "/metrics", None, _CONTROL_S)
        found = _START_TIME.search(response.text)
        incarnation = f"start-{float(found[1]):.2f}" if found else UNREPORTED
        self._remember(incarnation)
        return incarnation

    def _remember(self, incarnation: str) -> None:
        if incarnation != self._incarnation:
            self._served = self._served if self._incarnation is None else None
        self._incarnation, self._incarnation_read = incarnation, time.monotonic()

    def _forget(self) -> None:
        self._incarnation, self._served = None, None

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, read_s: float | None = _CONTROL_S
    ) -> dict[str, Any]:
        response = await self._send(method, path, body, read_s)
        try:
            answer = json.loads(response.content)
        except (ValueError, RecursionError):
            raise malformed(
                f"{self._who} answered {path} with something that is not JSON: {quoted(response.content)}"
            ) from None
        if not isinstance(answer, dict):
            raise malformed(f"{self._who} answered {path} with JSON that is no object: {quoted(response.content)}")
        return answer

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, read_s: float | None) -> httpx.Response:
        timeout = httpx.Timeout(connect=_CONNECT_S, read=read_s, write=_SEND_S, pool=None)
        content, headers = (None, {}) if body is None else (_dumped(body), _JSON)
        try:
            response = await self._http.request(method, path, content=content, headers=headers, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._forget()
            raise failure_from_transport(self._who, error) from error
        if response.status_code >= 300:
            raise failure_from_status(self._who, response.status_code, response.headers, response.content)
        return response


def _dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


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
    if sampling.top_p < 1.0:
        parameters["top_p"] = sampling.top_p
    if sampling.top_k > 0:
        parameters["top_k"] = sampling.top_k
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


def connect_engine(address: EngineAddress, *, vocabulary: int | None = None) -> VllmEngine:
    """A client for the engine at `address`; both kinds speak the same wire. Nothing is sent yet."""
    return VllmEngine(address, vocabulary=vocabulary)


__all__ = ["UNREPORTED", "EngineFailure", "VllmEngine", "connect_engine", "read_completion", "request_body"]
