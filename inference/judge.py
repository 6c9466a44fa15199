"""A judge over any OpenAI-compatible chat endpoint.

Invariant: `ask` gives the judge's text or raises JudgeUnavailable, which leaves a score empty; a failure never becomes
text, and so never a number. The text is what some model wrote about some other model's answer: it is returned as
it came, and whoever reads a number out of it must expect anything.

A judge is asked from inside a scorer, below any retry of Temporal's, so the retries are here: three tries at most.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx

from ..contracts.context import JudgeUnavailable
from ..contracts.messages import Message
from ..contracts.runfile import JudgeConfig
from .chat import parts
from .errors import EngineFailure, failure_from_status, failure_from_transport, malformed

_TRIES: Final = 3
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 10.0
"""A judge that asks for more is given up: the scorer's own time limit is shorter than its queue."""
_READ_S: Final = 120.0
_CONNECTIONS: Final = 64


class HttpJudge:
    """The judges of a run, by name. `secret` turns the name of an environment variable into its value.

    Belongs to one event loop. Close it when the run is over in this process.
    """

    def __init__(self, judges: Mapping[str, JudgeConfig], secret: Callable[[str], str | None]) -> None:
        self._judges = dict(judges)
        self._secret = secret
        self._http: httpx.AsyncClient | None = None

    async def ask(self, messages: list[Message], *, model: str = "default", max_tokens: int = 1024) -> str:
        """The judge's answer as text, at temperature 0. Raises JudgeUnavailable with one sentence."""
        judge = self._judges.get(model)
        if judge is None:
            known = ", ".join(sorted(self._judges)) or "none"
            raise JudgeUnavailable(f"the run has no judge {model!r}; its judges: {known}")
        headers = {}
        if judge.api_key_env is not None:
            key = self._secret(judge.api_key_env)
            if not key:
                raise JudgeUnavailable(
                    f"judge {model!r} needs the environment variable {judge.api_key_env}, which is empty"
                )
            headers["authorization"] = f"Bearer {key}"
        body = {
            "model": judge.model,
            "messages": [{"role": m.role.value, "content": parts(m, "text", "image_url")} for m in messages],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        url = f"{judge.url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"
        for tries_left in range(_TRIES - 1, -1, -1):
            try:
                return await self._once(f"judge {model!r}", url, headers, body)
            except EngineFailure as failure:
                pause = _pause(_TRIES - 1 - tries_left, failure)
                if not failure.retryable or not tries_left or pause > _LONGEST_PAUSE_S:
                    raise JudgeUnavailable(failure.message) from failure
                await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def _once(self, who: str, url: str, headers: dict[str, str], body: dict[str, Any]) -> str:
        if self._http is None:
            self._http = httpx.AsyncClient(
                timeout=httpx.Timeout(connect=5.0, read=_READ_S, write=30.0, pool=None),
                limits=httpx.Limits(max_connections=_CONNECTIONS),
            )
        try:
            response = await self._http.post(url, json=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise failure_from_transport(who, error) from error
        if response.status_code >= 300:
            raise failure_from_status(who, response.status_code, response.headers, response.content)
        return read_answer(who, response.content)


def read_answer(who: str, content: bytes) -> str:
    """The text of a chat completion's first choice. Raises EngineFailure (malformed) where there is none."""
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise malformed(f"{who} answered with something that is no chat completion") from None
    if not isinstance(text, str) or not text.strip():
        raise malformed(f"{who} answered without text")
    return text


def _pause(failed: int, failure: EngineFailure) -> float:
    """Seconds before the next try: what the server asked for, else 0.5 s doubling, spread by up to a half."""
    if failure.retry_after_s is not None:
        return failure.retry_after_s
    return _FIRST_PAUSE_S * 2.0**failed * random.uniform(1.0, 1.5)
