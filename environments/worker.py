"""One process of the pool: reads a request, runs author code in its main thread, answers, and waits for the next.

Invariant: author code runs in the main thread of a process of its own, so it may use signals, hold the interpreter
or never return; whoever waits kills the process. It ends with its parent, even when that is killed.
Frames are a 4-byte big-endian length and JSON. Standard output goes to standard error: prints of author code are
for people, and nothing of ours depends on them.
"""

import asyncio
import ctypes
import dataclasses
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from pydantic import BaseModel

from ..contracts.context import Context, Judge, JudgeUnavailable
from ..contracts.episode import Episode
from ..contracts.messages import Message, ToolCall
from . import faults
from .loaded import LoadedEnvironment
from .registry import load
from .results import StartOutcome, StopOutcome

HEADER: Final = struct.Struct(">I")
_PR_SET_PDEATHSIG: Final = 1


@dataclasses.dataclass(frozen=True)
class Request:
    """What the pool asks. `method` is `load` or one of `OPERATIONS`."""

    ref: str
    args: dict[str, Any]
    method: str
    payload: dict[str, Any]


class ParentsJudge:
    """Asks the judge of whoever waits for the answer. One question at a time: the process does nothing meanwhile."""

    def __init__(self, channel: socket.socket, read: Callable[[int], bytes]) -> None:
        self._channel = channel
        self._read = read

    async def ask(self, messages: list[Message], *, model: str = "default", max_tokens: int = 1024) -> str:
        plain = [message.model_dump(mode="json") for message in messages]
        send_frame(self._channel, {"ask": {"messages": plain, "model": model, "max_tokens": max_tokens}})
        reply = read_frame(self._read)
        if reply is None:
            os._exit(1)
        if "away" in reply:
            raise JudgeUnavailable(reply["away"])
        return str(reply["said"])


async def _start(env: LoadedEnvironment, given: dict[str, Any], judge: Judge) -> BaseModel:
    prompt, state = await env.start(*await _common(env, given))
    return StartOutcome(prompt=prompt, state=state)


async def _call(env: LoadedEnvironment, given: dict[str, Any], judge: Judge) -> BaseModel:
    task, ctx = await _common(env, given)
    call = ToolCall.model_validate(given["call"])
    return await env.run_call(given["index"], call, task, given["state"], ctx, judge=judge)


async def _step(env: LoadedEnvironment, given: dict[str, Any], judge: Judge) -> BaseModel:
    task, ctx = await _common(env, given)
    return await env.run_step(task, given["state"], Message.model_validate(given["message"]), ctx, judge=judge)


async def _stop(env: LoadedEnvironment, given: dict[str, Any], judge: Judge) -> BaseModel:
    task, _ = await _common(env, given)
    episode = Episode.model_validate(given["episode"])
    return StopOutcome(condition=await env.stop_condition(task, given["state"], episode))


async def _score(env: LoadedEnvironment, given: dict[str, Any], judge: Judge) -> BaseModel:
    task, ctx = await _common(env, given)
    episode = Episode.model_validate(given["episode"])
    return await env.score(given["name"], task, given["state"], episode, judge, ctx)


async def _group(env: LoadedEnvironment, given: dict[str, Any], judge: Judge) -> BaseModel:
    task, _ = await _common(env, given)
    episodes = [Episode.model_validate(episode) for episode in given["episodes"]]
    return await env.score_members(given["name"], task, episodes, judge)


async def _common(env: LoadedEnvironment, given: dict[str, Any]) -> tuple[Any, Context]:
    return await env.task_from_data(given["task"]["data"], given["task"]["info"]), Context(**given["ctx"])


Operation = Callable[[LoadedEnvironment, dict[str, Any], Judge], Coroutine[Any, Any, BaseModel]]
OPERATIONS: Final[dict[str, Operation]] = {
    "start": _start,
    "call": _call,
    "step": _step,
    "stop": _stop,
    "score": _score,
    "group": _group,
}


def answer(request: Request, loop: asyncio.AbstractEventLoop, judge: Judge) -> dict[str, Any]:
    """Run one request. Problems of author code are part of the answer, by the name of their class."""
    try:
        env = load(request.ref, request.args)
        if request.method == "load":
            loop.run_until_complete(env.ready())
            return {"result": None}
        result = loop.run_until_complete(OPERATIONS[request.method](env, request.payload, judge))
        return {"result": result.model_dump(mode="json")}
    except (faults.EnvironmentProblem, JudgeUnavailable) as problem:
        return {"problem": type(problem).__name__, "message": str(problem)}
    except Exception as error:
        said = f"{request.method} of {request.ref} failed: {faults.said(error)} ({faults.author_line(error)})"
        return {"problem": "EnvironmentFault", "message": said}


def main(descriptor: int, parent: int) -> None:
    """Serve requests on the socket `descriptor` until the other end closes it."""
    _end_with(parent)
    channel = socket.socket(fileno=descriptor)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with channel, channel.makefile("rb") as incoming:
        judge = ParentsJudge(channel, incoming.read)
        while (frame := read_frame(incoming.read)) is not None:
            send_frame(channel, answer(Request(**frame), loop, judge))


def send_frame(channel: socket.socket, frame: dict[str, Any]) -> None:
    data = json.dumps(frame).encode()
    channel.sendall(HEADER.pack(len(data)) + data)


def read_frame(read: Callable[[int], bytes]) -> Any:
    """The next frame, None at the end of the stream."""
    header = read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    data = read(size)
    return json.loads(data) if len(data) == size else None


def _end_with(parent: int) -> None:
    """Die when `parent` dies: by the kernel's word on Linux, by looking each second elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
