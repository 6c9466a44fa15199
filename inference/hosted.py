"""Client for servers that take messages: OpenAI's API, hosted or not.

Invariant: what is stored is what the provider answered, byte for byte; no token, logprob or count is made up for what
it left out. One answer is asked for in one request (`n` is never sent, since many servers ignore it), nothing is
retried here, and the server is never sampled from to see whether it lives.

Two fields differ between servers and are learnt from a refusal, once for each client: the name of the answer's limit,
and whether reasoning can be given encrypted.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from ..contracts.engines import EngineApi, EngineKind, HostedOptions, capabilities
from . import chat, responses
from .connection import Connection
from .engines import Answer, AskRequest, ContextOverflow, EngineAddress, why_unsupported
from .errors import EngineFailure, failure_from_status, rejected, unavailable


@dataclass(frozen=True, slots=True)
class _Dialect:
    """One of the two APIs."""

    path: str
    limits: tuple[str, ...]
    body: Callable[[AskRequest, str, str], dict[str, Any]]
    read: Callable[[str, AskRequest, dict[str, Any], bytes], Answer]


@dataclass(frozen=True, slots=True)
class _Form:
    """How the fields are said in which servers differ."""

    limit: str
    encrypted: bool

    def instead(self, failure: EngineFailure, limits: tuple[str, ...]) -> "_Form | None":
        """Another form, where the refusal of this one was about it."""
        if failure.status not in (400, 422):
            return None
        later = limits[limits.index(self.limit) + 1 :]
        if later and later[0] in failure.message:
            return replace(self, limit=later[0])
        if self.encrypted and re.search(r"encrypted|include", failure.message):
            return replace(self, encrypted=False)
        return None


_APIS: Final = {
    EngineApi.CHAT: _Dialect(chat.PATH, chat.LIMITS, chat.body, chat.read),
    EngineApi.RESPONSES: _Dialect(responses.PATH, responses.LIMITS, responses.body, responses.read),
}
_TOO_LONG: Final = re.compile(
    r"context_length_exceeded|maximum context length|context window|prompt is too long|longer than the maximum|"
    r"exceeds? the (?:model'?s? )?(?:maximum )?context",
    re.IGNORECASE,
)
"""How servers say that a conversation does not fit. Their status is 400 or 413."""


class HostedEngine:
    """A server at `address.url`, the base that OpenAI's own client would be given; without a path, `/v1` is meant."""

    def __init__(self, address: EngineAddress) -> None:
        self.engine_id = address.engine_id
        self._options = address.hosted or HostedOptions()
        self._api = _APIS[self._options.api]
        path = urlsplit(address.url).path.strip("/")
        base = address.url.rstrip("/") + ("" if path else "/v1")
        self._server = Connection(address, base=base, through_proxies=True)
        self._form = _Form(self._api.limits[0], self._options.api is EngineApi.RESPONSES)

    async def health(self) -> None:
        """The list of models is free everywhere; a server without one answers all the same."""
        try:
            await self._server.send("GET", "/models")
        except EngineFailure as failure:
            if failure.status not in (404, 405):
                raise

    async def waiting(self) -> int | None:
        """Such servers do not say."""
        return None

    async def ask(self, request: AskRequest) -> Answer:
        problem = why_unsupported(request.sampling, capabilities(EngineKind.OPENAI, self._options))
        if problem is not None:
            raise rejected(problem)
        response = await self._sent(request)
        answer = self._server.parsed(self._api.path, response)
        self._refuse_error(answer, response)
        return self._api.read(self._server.who, request, answer, response.content)

    async def close(self) -> None:
        await self._server.close()

    async def _sent(self, request: AskRequest) -> httpx.Response:
        while True:
            form = self._form
            body = self._api.body(request, self._options.model or request.model, form.limit)
            if not form.encrypted:
                body.pop("include", None)
            try:
                return await self._server.send("POST", self._api.path, body | self._options.body, silence_s=None)
            except EngineFailure as failure:
                if failure.status in (400, 413) and _TOO_LONG.search(failure.message):
                    raise ContextOverflow(failure.message) from failure
                other = form.instead(failure, self._api.limits)
                if other is None:
                    raise
                self._form = other

    def _refuse_error(self, answer: dict[str, Any], response: httpx.Response) -> None:
        """Some servers say that something failed with status 200."""
        error = answer.get("error")
        if not isinstance(error, dict):
            return
        code = error.get("code")
        if type(code) is int and 400 <= code < 600:
            raise failure_from_status(self._server.who, code, response.headers, json.dumps(error).encode())
        raise unavailable(f"{self._server.who} answered with an error: {str(error.get('message') or code)[:300]}")
