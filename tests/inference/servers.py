"""A small real HTTP server whose answers a test writes down, byte by byte where it must."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """`declared`: the content-length to claim, where it is not the truth. `raw`: instead of any HTTP answer.
    `hang`: never answer. The connection is closed afterwards, as with every answer here."""

    status: int = 200
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)
    declared: int | None = None
    raw: bytes | None = None
    hang: bool = False


@dataclass
class Server:
    url: str
    answer: Callable[[Seen], Answer]
    seen: list[Seen] = field(default_factory=list)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request was kept hanging."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a caller closed the connection that we kept hanging."""


@asynccontextmanager
async def serving(answer: Callable[[Seen], Answer]) -> AsyncIterator[Server]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _one(server, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", answer)
    try:
        yield server
    finally:
        listener.close()


async def _one(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    seen = Seen(method, path, headers, body)
    server.seen.append(seen)
    answer = server.answer(seen)
    if answer.hang:
        server.hanging.set()
        await reader.read()
        server.gone.set()
        return
    if answer.raw is not None:
        writer.write(answer.raw)
    else:
        content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        length = len(content) if answer.declared is None else answer.declared
        lines = [f"HTTP/1.1 {answer.status} X", f"content-length: {length}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
    await writer.drain()


def engine_answer(generate: Callable[[Seen], Answer]) -> Callable[[Seen], Answer]:
    """An engine whose control routes are in order and whose completions are `generate`'s."""

    def answer(seen: Seen) -> Answer:
        if seen.path == "/v1/models":
            return Answer(body={"data": [{"id": "policy", "max_model_len": 512}]})
        if seen.path == "/weight_info":
            return Answer(body={"weight_version": "v3", "incarnation": "life-1"})
        if seen.path == "/health":
            return Answer()
        return generate(seen)

    return answer


def completion(seen: Seen, **changes: Any) -> dict[str, Any]:
    """A correct completion of two tokens, 7 and the stop token 2, with fields of its choice changed."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [7, 2],
        "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 2, "logprob": -0.25}]},
        "weight_versions": [{"version": "v3", "start": 0, "end": 2}],
    }
    prompt = len(seen.json["token_ids"])
    usage = {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2}
    usage |= changes.pop("usage", {})
    return {"request_id": "x", "usage": usage, "choices": [choice | changes], "incarnation": "life-1"}
