"""A real HTTP engine whose words are scripted: it speaks the token wire and can be told to misbehave.

The script maps (prompt as text, number of the turn) to what the model says. Everything else is real: requests, tokens,
logprobs of the right length, spans.
"""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from atropos.contracts.messages import ToolSpec, user
from atropos.inference.tiny_policy import train_tokenizer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerFast

_TURN = re.compile(r"/turn/(\d+)/")
NO_LIMIT = 2**20
"""Tokens of context that no test fills."""
Script = Callable[[str, int], str]
EngineT = TypeVar("EngineT", bound="ScriptedEngine")


def tool_call(name: str, **arguments: Any) -> str:
    """A tool call in Qwen's format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make_model(folder: Path, tools: Sequence[ToolSpec] = ()) -> Path:
    """A model folder with a tokenizer and a chat format, and no weights."""
    train_tokenizer([([user("What is 12 + 34? Look at 5.")], tools)] * 10, folder)
    return folder


@dataclass
class ScriptedEngine:
    """What it says, how it fails, and what it was asked."""

    model: Path
    script: Script
    failures: list[Response] = field(default_factory=list)
    """Answers given instead of completions, first first."""
    down: bool = False
    """Answer 503 to everything, health included."""
    delay_s: float = 0.0
    held_turn: int | None = None
    """Requests for this turn wait until `released`; `waiting` says that one does."""
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    token_delay_s: float = 0.0
    """Between two tokens of a streamed completion."""
    breaks_after: list[int] = field(default_factory=list)
    """Streams that end without their last event after so many tokens, first first."""
    streamed: list[list[int]] = field(default_factory=list)
    """What each streamed completion sent, as far as it came."""
    label: str = "default"
    context: int = NO_LIMIT
    """What it says of its longest prompt plus completion, and refuses what leaves no room in."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(self.model))

    @property
    def app(self) -> Starlette:
        return Starlette(routes=self.routes())

    def routes(self) -> list[Route]:
        return [
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/health", self._health),
            Route("/weight_info", self._weights),
            Route("/v1/models", self._models),
        ]

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if self.down:
            return JSONResponse({"error": "down"}, 503)
        if self.failures:
            return self.failures.pop(0)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if len(body["token_ids"]) + body["sampling_params"]["max_tokens"] > self.context:
            return JSONResponse({"error": f"longer than the maximum model length of {self.context}"}, 400)
        found = _TURN.search(body["request_id"])
        turn = int(found[1]) if found else 0
        if turn == self.held_turn:
            self.waiting.set()
            await self.released.wait()
        said = self.script(self._tokenizer.decode(body["token_ids"]), turn)
        ids = [*self._tokenizer.encode(said, add_special_tokens=False), self._tokenizer.eos_token_id]
        limit = body["sampling_params"]["max_tokens"]
        cut = len(ids) > limit
        if body["stream"]:
            return StreamingResponse(self._stream(body, ids[:limit], cut=cut), media_type="text/event-stream")
        return JSONResponse(self._answer(body, ids[:limit], cut=cut))

    async def _stream(self, body: dict[str, Any], ids: list[int], *, cut: bool) -> AsyncIterator[bytes]:
        """An event for each token, then one that says why it ended."""
        sent: list[int] = []
        self.streamed.append(sent)
        stop = self.breaks_after.pop(0) if self.breaks_after else None
        for token in ids[:stop]:
            event = self._answer(body, [token], cut=False)
            event["choices"][0]["finish_reason"] = None
            sent.append(token)
            yield _event(event)
            await asyncio.sleep(self.token_delay_s)
        if stop is None:
            last = self._answer(body, [], cut=cut)
            last["usage"]["completion_tokens"] = len(ids)
            last["choices"][0]["weight_versions"] = []
            yield _event(last) + b"data: [DONE]\n\n"

    def _answer(self, body: dict[str, Any], ids: list[int], *, cut: bool) -> dict[str, Any]:
        content = [{"token_id": token, "logprob": -0.25, "rank": 1, "top_logprobs": []} for token in ids]
        choice = {
            "index": 0,
            "finish_reason": "length" if cut else "stop",
            "stop_reason": None,
            "token_ids": ids,
            "weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}],
            "logprobs": {"content": content},
        }
        prompt = len(body["token_ids"])
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)}
        return {"request_id": body["request_id"], "choices": [choice], "usage": usage, "incarnation": "scripted"}

    def hold(self, turn: int) -> None:
        """Let requests for a turn wait from now on."""
        self.held_turn = turn
        self.waiting.clear()
        self.released.clear()

    def release(self) -> None:
        """Answer those that wait, and let none wait any more."""
        self.held_turn = None
        self.released.set()

    def asked(self, episode: str) -> list[int]:
        """The turns of an episode (its workflow's id) that were asked for, request by request."""
        pairs = (str(request["request_id"]).partition("/turn/") for request in self.requests)
        return sorted(int(rest.split("/")[0]) for owner, _, rest in pairs if owner == episode)

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self.down else 200)

    async def _weights(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label, "incarnation": "scripted"})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "policy", "max_model_len": self.context}]})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@asynccontextmanager
async def scripted_engine(model: Path, script: Script, **options: Any) -> AsyncIterator[ScriptedEngine]:
    """Serve it on a free loopback port for the block."""
    async with served(ScriptedEngine(model, script, **options)) as engine:
        yield engine


@asynccontextmanager
async def served(engine: EngineT, listener: socket.socket | None = None) -> AsyncIterator[EngineT]:
    """The same for one that was made already, and on `listener` if there is one."""
    if listener is None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
    engine.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(engine.app, log_level="error", lifespan="off", timeout_graceful_shutdown=5))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        yield engine
    finally:
        engine.release()
        server.should_exit = True
        await serving
