"""The HTTP face of the engine.

Invariant: a caller that has gone takes its call with it. Each generating route waits for news of its call and for the
end of its connection at once, and whichever way it leaves, the call is cancelled unless it is over.
"""

import asyncio
import contextlib
import hmac
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import bodies, wire
from .calls import Call
from .chat import Chat
from .scheduler import Engine, PauseMode
from .wire import ApiError

BODY_LIMIT = 64 * 2**20
"""Bytes of a request body: far above any context in JSON, far below memory."""

KEEP_ALIVE_S = 75
"""Longer than any client's pool keeps an idle connection, so that it is never the server that closes first."""

RequestT = TypeVar("RequestT", bound=BaseModel)


class Served:
    """What the routes serve: one engine under one name, with the tokenizer's side if there is one."""

    def __init__(self, engine: Engine, chat: Chat | None, name: str, version: str) -> None:
        """`version` is the software's, not the weights'."""
        self.engine = engine
        self.name = name
        self.version = version
        self.started = int(time.time())
        self._chat = chat

    @property
    def chat(self) -> Chat:
        if self._chat is None:
            raise ApiError(400, "This model has no tokenizer; use /inference/v1/generate with token ids.")
        return self._chat

    def expect_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(404, f"The model {name!r} is not served here; {self.name!r} is.")


def create_app(served: Served, token: str | None = None) -> ASGIApp:
    """The ASGI application. With a `token`, every route but /health wants it as a bearer token."""
    routes = _Routes(served)
    get: dict[str, Callable[..., Any]] = {
        "/health": routes.health,
        "/version": routes.show_version,
        "/metrics": routes.metrics,
        "/load": routes.load,
        "/v1/models": routes.models,
        "/is_paused": routes.is_paused,
        "/weight_info": routes.weight_info,
    }
    post: dict[str, Callable[..., Any]] = {
        "/inference/v1/generate": routes.generate,
        "/v1/chat/completions": routes.chat_completions,
        "/v1/completions": routes.completions,
        "/pause": routes.pause,
        "/resume": routes.resume,
        "/collective_rpc": routes.collective_rpc,
        "/update_weight_version": routes.update_weight_version,
        "/weight_checker": routes.weight_checker,
        "/reset_prefix_cache": routes.reset_prefix_cache,
    }

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await served.engine.start()
        yield

    app = Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()]
        + [Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()],
        exception_handlers={ApiError: _refused},
        lifespan=lifespan,
    )
    return app if token is None else _guarded(app, token)


class Server(uvicorn.Server):
    """uvicorn, except that a shutdown ends the engine's calls first: nobody waits for an answer that will not come."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=3,
            )
        )
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._engine.close()
        await super().shutdown(sockets)


class _Routes:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._engine = served.engine

    async def generate(self, request: Request) -> Response:
        body = await _parse(request, wire.GenerateRequest)
        self._served.expect_model(body.model)
        call = self._engine.submit(body.token_ids, body.sampling_params, body.request_id, body.stream)
        if body.stream:
            return _Events(self._engine, call)
        await self._finish(request, call)
        return _json(bodies.generated(call, self._engine.incarnation))

    async def chat_completions(self, request: Request) -> Response:
        body = await _parse(request, wire.ChatRequest)
        self._served.expect_model(body.model)
        chat = self._served.chat
        tools = None if body.tool_choice == "none" else body.tools
        prompt = chat.render(body.messages, tools)
        params = body.sampling(max(1, self._engine.context - len(prompt)))
        if not params.ignore_eos:
            ends = tuple(sorted({*params.stop_token_ids, *chat.stop_ids()}))
            params = params.model_copy(update={"stop_token_ids": ends})
        call = self._engine.submit(prompt, params, body.request_id)
        await self._finish(request, call)
        message = chat.parse(call.prompt, call.tokens, tools)
        return _json(bodies.chat(call, message, body, self._served, self._served.started))

    async def completions(self, request: Request) -> Response:
        body = await _parse(request, wire.CompletionRequest)
        self._served.expect_model(body.model)
        prompt = body.prompt if isinstance(body.prompt, list) else self._served.chat.encode(body.prompt)
        call = self._engine.submit(prompt, body.sampling(), body.request_id)
        await self._finish(request, call)
        return _json(bodies.completion(call, body, self._served, self._served.started))

    async def _finish(self, request: Request, call: Call) -> None:
        """Wait until the call is over; cancel it if the caller leaves first. Raises ApiError if it failed."""
        try:
            while not call.over:
                if not await _news(call, request.receive):
                    raise ApiError(499, "The caller closed the connection.")
        finally:
            self._engine.cancel(call)
        if call.error is not None:
            raise ApiError(call.error_status, call.error)

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self._engine.healthy else 503)

    async def show_version(self, _: Request) -> Response:
        return _json({"version": self._served.version})

    async def load(self, _: Request) -> Response:
        return _json({"server_load": self._engine.running + self._engine.waiting})

    async def models(self, _: Request) -> Response:
        card: dict[str, Any] = {"id": self._served.name, "object": "model", "owned_by": "atropos"}
        card |= {"created": self._served.started, "max_model_len": self._engine.context}
        return _json({"object": "list", "data": [card]})

    async def metrics(self, _: Request) -> Response:
        text = bodies.metrics(self._engine, self._served.name)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def is_paused(self, _: Request) -> Response:
        return _json({"is_paused": self._engine.paused})

    async def weight_info(self, _: Request) -> Response:
        return _json({"weight_version": self._engine.version, "incarnation": self._engine.incarnation})

    async def pause(self, request: Request) -> Response:
        query = dict(request.query_params)
        mode = query.pop("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise ApiError(400, f"mode is {mode!r}; it must be abort, wait or keep.")
        # Keys and values never outlive a pause here, so both answers to clear_cache come to the same.
        if query.pop("clear_cache", "true") not in ("true", "false"):
            raise ApiError(400, "clear_cache must be true or false.")
        if query:
            raise ApiError(400, f"{', '.join(sorted(query))}: not parameters of this engine's pause.")
        await self._engine.pause(cast(PauseMode, mode))
        return _json({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        await self._engine.resume()
        return _json({"status": "resumed"})

    async def collective_rpc(self, request: Request) -> Response:
        body = await _parse(request, wire.CollectiveRpc)
        if body.method != "reload_weights":
            raise ApiError(400, f"The method {body.method!r} is not supported; reload_weights is.")
        unknown = body.kwargs.keys() - {"weights_path"}
        path = body.kwargs.get("weights_path")
        if unknown or not isinstance(path, str | None):
            raise ApiError(400, "reload_weights takes one text argument, weights_path.")
        await self._engine.reload(None if path is None else Path(path))
        return _json({"results": [None]})

    async def update_weight_version(self, request: Request) -> Response:
        body = await _parse(request, wire.NewVersion)
        self._engine.set_version(body.new_version)
        return _json({"success": True, "new_version": body.new_version})

    async def weight_checker(self, request: Request) -> Response:
        await _parse(request, wire.CheckWeights)
        return _json({"checksums": await self._engine.checksums()})

    async def reset_prefix_cache(self, _: Request) -> Response:
        """There is no prefix cache, so it is always as if just reset."""
        return Response(status_code=200)


class _Events(Response):
    """A completion as server-sent events: one for each engine step that the connection keeps up with."""

    def __init__(self, engine: Engine, call: Call) -> None:
        super().__init__(media_type="text/event-stream")
        self._engine = engine
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        call, sent = self._call, 0
        try:
            while not call.over:
                if not await _news(call, receive):
                    return
                call.changed.clear()
                known = len(call.tokens)
                if call.error is None and not call.over and known > sent:
                    event = bodies.generated(call, self._engine.incarnation, sent, known)
                    await send({"type": "http.response.body", "body": _event(event), "more_body": True})
                    sent = known
            last = (
                ApiError(call.error_status, call.error).body()
                if call.error is not None
                else bodies.generated(call, self._engine.incarnation, sent)
            )
            await send({"type": "http.response.body", "body": _event(last) + b"data: [DONE]\n\n"})
        finally:
            self._engine.cancel(call)


async def _news(call: Call, receive: Receive) -> bool:
    """Wait for the call to change (True) or its caller to leave (False)."""
    changed = asyncio.ensure_future(call.changed.wait())
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((changed, gone), return_when=asyncio.FIRST_COMPLETED)
        return changed.done()
    finally:
        changed.cancel()
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _parse(request: Request, kind: type[RequestT]) -> RequestT:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > BODY_LIMIT:
        raise ApiError(413, f"The body has {length} bytes; the limit is {BODY_LIMIT}.")
    raw = await request.body()
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        raise ApiError(400, wire.explain(error)) from error


def _json(body: Any) -> Response:
    return Response(json.dumps(body, separators=(",", ":")), media_type="application/json")


def _event(body: Any) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status)


def _guarded(app: ASGIApp, token: str) -> ASGIApp:
    expected = f"Bearer {token}".encode()

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, expected):
                error = ApiError(401, "This engine wants its token: Authorization: Bearer <token>.")
                await JSONResponse(error.body(), status_code=401)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guard
