"""Client for vLLM and for the dev engine, which speaks the same part of vLLM's API: tokens in, tokens out.

Invariant: what `sample` returns was sampled by the engine exactly so. Every count is checked against the request
(`read_completion`), and a contradiction is a malformed answer, never a repaired one.

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
from typing import Any, Final

import httpx

from ..contracts.reasons import FinishReason
from .engines import Completion, EngineAddress, LabelSpan, SampleRequest, WeightInfo, why_unsupported
from .errors import EngineFailure, failure_from_status, failure_from_transport, malformed, rejected, unavailable

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
_INVENTED_LOGPROB: Final = -9998.0
"""vLLM writes -9999 where it has no logprob."""
_SLACK: Final = 1e-3
"""A logprob may exceed 0 by rounding, not by more."""
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

    async def sample(self, request: SampleRequest) -> Completion:
        problem = why_unsupported(request.sampling)
        if problem is not None:
            raise rejected(problem)
        served = await self._model()
        incarnation = await self._known_incarnation()
        body = request_body(request, served.get("id"))
        answer = await self._call("POST", "/inference/v1/generate", body, read_s=None)
        return read_completion(self._who, request, answer, self._vocabulary, incarnation)

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
            raise malformed(f"{self._who} answered {path} with something that is not JSON") from None
        if not isinstance(answer, dict):
            raise malformed(f"{self._who} answered {path} with JSON that is no object")
        return answer

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, read_s: float | None) -> httpx.Response:
        timeout = httpx.Timeout(connect=_CONNECT_S, read=read_s, write=_SEND_S, pool=None)
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            response = await self._http.request(method, path, content=content, headers=headers, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._forget()
            raise failure_from_transport(self._who, error) from error
        if response.status_code >= 300:
            raise failure_from_status(self._who, response.status_code, response.headers, response.content)
        return response


def request_body(request: SampleRequest, model: str | None) -> dict[str, Any]:
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
        "stream": False,
        "sampling_params": parameters,
    }
    if model is not None:
        body["model"] = model
    return body


def read_completion(
    who: str, request: SampleRequest, answer: dict[str, Any], vocabulary: int, incarnation: str
) -> Completion:
    """The completion in an answer. Raises EngineFailure where the answer contradicts itself or the request."""
    try:
        choices, usage = answer["choices"], answer["usage"]
        if len(choices) != 1:
            raise malformed(f"{who} answered with {len(choices)} completions for one request")
        choice = choices[0]
        finish = _finish(who, choice["finish_reason"])
        token_ids = choice["token_ids"]
        entries = choice["logprobs"]["content"]
        spans = tuple(LabelSpan(s["version"], s["start"], s["end"]) for s in choice["weight_versions"])
        prompt_tokens, completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        logprobs = [entry["logprob"] for entry in entries]
        echoed = [entry.get("token_id") for entry in entries]
    except (KeyError, TypeError, AttributeError) as error:
        raise malformed(f"{who} left out or misspelt a field of the completion: {error!r}") from None
    problem = (
        _token_problem(request, token_ids, finish, vocabulary)
        or _logprob_problem(token_ids, logprobs, echoed)
        or _span_problem(len(token_ids), spans)
    )
    if problem is None and prompt_tokens != len(request.prompt_ids):
        problem = f"it read {prompt_tokens} prompt tokens where {len(request.prompt_ids)} were sent"
    if problem is None and completion_tokens != len(token_ids):
        problem = f"it counts {completion_tokens} sampled tokens where it sent {len(token_ids)}"
    if problem is not None:
        raise malformed(f"{who} answered inconsistently: {problem}")
    named = answer.get("incarnation")
    return Completion(
        token_ids=token_ids,
        logprobs=[float(value) for value in logprobs],
        finish=finish,
        spans=spans,
        incarnation=named if isinstance(named, str) and named else incarnation,
        usage_prompt=prompt_tokens,
    )


def _finish(who: str, reason: object) -> FinishReason:
    if reason == "stop":
        return FinishReason.STOP
    if reason == "length":
        return FinishReason.LENGTH
    if reason == "abort":
        raise unavailable(f"{who} aborted the request")
    raise malformed(f"{who} stopped for a reason we do not know: {str(reason)[:40]!r}")


def _token_problem(request: SampleRequest, ids: object, finish: FinishReason, vocabulary: int) -> str | None:
    if not isinstance(ids, list) or not ids:
        return "no tokens"
    if not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        return f"a token id is no whole number in [0, {vocabulary})"
    if len(ids) > request.max_tokens:
        return f"{len(ids)} tokens where at most {request.max_tokens} were asked for"
    stops = set(request.stop_token_ids)
    if stops.intersection(ids[:-1]):
        return "it went on after a stop token"
    if finish is FinishReason.STOP and stops and ids[-1] not in stops:
        return f"it stopped at token {ids[-1]}, which is none of the stop tokens {sorted(stops)}"
    return None


def _logprob_problem(ids: list[int], logprobs: list[Any], echoed: list[Any]) -> str | None:
    if len(logprobs) != len(ids):
        return f"{len(logprobs)} logprobs for {len(ids)} tokens"
    if not all(type(v) in (int, float) and math.isfinite(v) for v in logprobs):
        return "a logprob is not a finite number"
    if not all(_INVENTED_LOGPROB < v <= _SLACK for v in logprobs):
        return "a logprob is above 0 or a placeholder"
    if any(echo is not None and echo != token for echo, token in zip(echoed, ids, strict=True)):
        return "a logprob belongs to another token than was sampled"
    return None


def _span_problem(tokens: int, spans: tuple[LabelSpan, ...]) -> str | None:
    position = 0
    for span in spans:
        if type(span.start) is not int or type(span.end) is not int or not isinstance(span.label, str):
            return "a version span is not a label with two whole numbers"
        if span.start != position or span.end <= span.start:
            return "version spans do not follow one another"
        position = span.end
    return None if position == tokens else f"version spans cover {position} of {tokens} tokens"


def connect_engine(address: EngineAddress, *, vocabulary: int | None = None) -> VllmEngine:
    """A client for the engine at `address`; both kinds speak the same wire. Nothing is sent yet."""
    return VllmEngine(address, vocabulary=vocabulary)


__all__ = ["UNREPORTED", "EngineFailure", "VllmEngine", "connect_engine", "read_completion", "request_body"]
