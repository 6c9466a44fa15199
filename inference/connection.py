"""One inference server over HTTP: calls, streams, and what the server says about itself.

Invariant: whoever calls gets an answer that is JSON of the right kind, or an EngineFailure and nothing else. Nothing is
retried here, and a broken connection forgets all that was known about the server, since another life of it may answer
next.

Incarnation: the dev engine names itself in each answer. vLLM does not, so it is the start time of its process
(`process_start_time_seconds` of `/metrics`), read again after a broken connection and whenever the last reading is
older than five seconds; where the metric is missing it is `unreported`. What the server calls its weights is read
again after a quarter of a second: no server starts anew within that.
"""

import asyncio
import json
import math
import re
import socket
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

import httpx

from .answers import events
from .engines import EngineAddress, WeightInfo
from .errors import EngineFailure, failure_from_status, failure_from_transport, malformed, quoted, unavailable

UNREPORTED: Final = "unreported"
"""Incarnation of a server that says nothing from which one could be told."""
CONTROL_S: Final = 10.0
"""Longest silence of a control call; those are answered at once or not at all."""
_CONNECT_S: Final = 5.0
_SEND_S: Final = 30.0
"""Longest stall while a prompt is being sent."""
INCARNATION_S: Final = 5.0
_LABEL_S: Final = 0.25
_JSON: Final = {"content-type": "application/json"}
_START_TIME: Final = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def _keep_alive() -> list[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), seconds))
    return options


class Connection:
    """HTTP to one server, named `who` in messages. What it says of itself is read as vLLM and the dev engine say it;
    a subclass knows how others do (`_LABEL_PATH`, `_life`, `model`, `health`)."""

    _LABEL_PATH = "/weight_info"

    def __init__(self, address: EngineAddress, *, base: str | None = None, through_proxies: bool = False) -> None:
        """`base`: what paths are behind; default: the address without `/v1`, where engines of our own have theirs.

        Only a hosted server is reached through a proxy of the environment: others are here or in a private network.
        """
        self.who = f"engine {address.engine_id}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=address.concurrency + 4)
        # Certificates take 25 ms to load, and most engines are spoken to without.
        verify = address.url.startswith("https:")
        transport = (
            None
            if through_proxies
            else httpx.AsyncHTTPTransport(
                verify=verify, retries=0, socket_options=_keep_alive(), limits=limits, trust_env=False
            )
        )
        self._http = httpx.AsyncClient(
            base_url=base or address.url.rstrip("/").removesuffix("/v1"),
            headers={"authorization": f"Bearer {address.api_key}"} if address.api_key else {},
            timeout=httpx.Timeout(connect=_CONNECT_S, read=None, write=_SEND_S, pool=None),
            transport=transport,
            limits=limits,
            verify=verify,
            trust_env=through_proxies,
        )
        self._served: dict[str, Any] | None = None
        self._incarnation: str | None = None
        self._incarnation_read = -math.inf
        self._label: str | None = None
        self._label_read = -math.inf
        self._reading = asyncio.Lock()

    async def health(self) -> None:
        await self.send("GET", "/health")

    async def weight_info(self) -> WeightInfo:
        label, named = await self._weights()
        return WeightInfo(label, named or await self._life())

    async def label(self, *, fresh: bool = False) -> str:
        """What it calls its weights, as read a moment ago, or now. Those who ask at once share an answer."""
        async with self._reading:
            if fresh or self._label is None or time.monotonic() - self._label_read > _LABEL_S:
                return (await self._weights())[0]
            return self._label

    async def model(self) -> dict[str, Any]:
        """The first model the server lists; asked once for each life of the server."""
        if self._served is None:
            data = (await self.call("GET", "/v1/models")).get("data")
            if not isinstance(data, list) or not data or not isinstance(data[0], dict):
                raise malformed(f"{self.who} lists no model")
            self._served = data[0]
        return self._served

    async def incarnation(self) -> str:
        """As read within the last seconds."""
        async with self._reading:
            if self._incarnation is None or time.monotonic() - self._incarnation_read > INCARNATION_S:
                return (await self.weight_info()).incarnation
            return self._incarnation

    async def close(self) -> None:
        await self._http.aclose()

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, silence_s: float | None = CONTROL_S
    ) -> dict[str, Any]:
        """The JSON object of an answer. `silence_s`: see `send`."""
        return self.parsed(path, await self.send(method, path, body, silence_s=silence_s))

    async def send(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, silence_s: float | None = CONTROL_S
    ) -> httpx.Response:
        """`silence_s`: longest time without a byte of the answer; None where the caller limits time."""
        timeout = httpx.Timeout(connect=_CONNECT_S, read=silence_s, write=_SEND_S, pool=None)
        content, headers = (None, {}) if body is None else (_dumped(body), _JSON)
        try:
            response = await self._http.request(method, path, content=content, headers=headers, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._forget()
            raise failure_from_transport(self.who, error) from error
        if response.status_code >= 300:
            raise failure_from_status(self.who, response.status_code, response.headers, response.content)
        return response

    def parsed(self, path: str, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = json.loads(response.content)
        except (ValueError, RecursionError):
            raise malformed(
                f"{self.who} answered {path} with something that is not JSON: {quoted(response.content)}"
            ) from None
        if not isinstance(answer, dict):
            raise malformed(f"{self.who} answered {path} with JSON that is no object: {quoted(response.content)}")
        return answer

    async def within(self, limit_s: float, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """POST with a limit on the whole time, answer included."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.send("POST", path, body, silence_s=None)
        except TimeoutError:
            self._forget()
            raise unavailable(f"{self.who} did not answer {path} within {limit_s:g} s") from None

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a stream of server-sent events."""
        try:
            async with self._http.stream("POST", path, content=_dumped(body), headers=_JSON) as response:
                if response.status_code >= 300:
                    said = await response.aread()
                    raise failure_from_status(self.who, response.status_code, response.headers, said)
                async for event in events(self.who, response.aiter_bytes()):
                    yield event
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._forget()
            raise failure_from_transport(self.who, error) from error

    async def _weights(self) -> tuple[str, str | None]:
        """The label of its weights, and its incarnation where it names that."""
        asked = time.monotonic()
        answer = await self.call("GET", self._LABEL_PATH)
        label = answer.get("weight_version")
        if not isinstance(label, str) or not label:
            raise malformed(f"{self.who} does not say which weights it holds")
        self._label, self._label_read = label, asked
        named = answer.get("incarnation")
        if not isinstance(named, str) or not named:
            return label, None
        self._remember(named)
        return label, named

    async def _life(self) -> str:
        """From what it says without naming it, which life of the server this is."""
        response = await self.send("GET", "/metrics")
        found = _START_TIME.search(response.text)
        incarnation = f"start-{float(found[1]):.2f}" if found else UNREPORTED
        self._remember(incarnation)
        return incarnation

    async def gauge(self, name: str) -> int | None:
        """A number of `/metrics`, summed over its labels; None where there is none of that name."""
        try:
            response = await self.send("GET", "/metrics")
        except EngineFailure as failure:
            if failure.status == 404:
                return None
            raise
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+]+)$", response.text, re.MULTILINE)
        return round(sum(map(float, found))) if found else None

    def _remember(self, incarnation: str) -> None:
        if incarnation != self._incarnation:
            self._served = self._served if self._incarnation is None else None
        self._incarnation, self._incarnation_read = incarnation, time.monotonic()

    def _forget(self) -> None:
        self._incarnation, self._served, self._label = None, None, None


def _dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
