"""A pool of killable processes for author code.

Invariant: a call is answered, or its process is dead. A thread that loops or holds the interpreter cannot be stopped;
a process can, so at the timeout (or when the caller is cancelled) the whole process group is killed and
the next call gets a new one. Loading an environment has a limit of its own: slow imports do not eat a tool's timeout.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from ..contracts.context import Judge, JudgeUnavailable
from ..contracts.messages import Message
from . import faults
from .faults import CallTimedOut, EnvironmentFault, EnvironmentProblem, WorkerDied
from .worker import HEADER

LOAD_SECONDS: Final = 120.0
"""Importing an environment may pull in torch or a data set; beyond this it is stuck."""

_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    f"from {__package__}.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
"""Our own start instead of `-m`, which would put the current folder before everything installed."""


class LoadTimedOut(EnvironmentFault):
    """The environment could not be loaded in time; a call that waited for it is not to blame."""


class PoolClosed(RuntimeError):
    """The pool is shutting down: nobody's fault, and to be tried again by another worker."""


class _Worker:
    """One process and the channel to it; serves one call at a time."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer
        self.loaded: set[str] = set()

    @classmethod
    async def start(cls) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-c", _BOOT, *arguments),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    async def ask(
        self, ref: str, args: Mapping[str, Any], method: str, payload: Any, timeout: float, judge: Judge | None = None
    ) -> Any:
        """One request. Raises TimeoutError, WorkerDied, or what the environment raised."""
        async with asyncio.timeout(timeout):
            try:
                reply = await self._exchange({"ref": ref, "args": dict(args), "method": method, "payload": payload})
                while (question := reply.get("ask")) is not None and judge is not None:
                    reply = await self._exchange(await _judged(judge, question))
            except (asyncio.IncompleteReadError, ConnectionError):
                code = await self.process.wait()
                what = f"{_called(method, payload)} of {ref}"
                raise WorkerDied(f"the process running {what} ended ({_ended(code)})") from None
        if "problem" in reply:
            kind = getattr(faults, reply["problem"], EnvironmentFault)
            raise kind(reply["message"])
        return reply["result"]

    async def _exchange(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(frame, default=str).encode()
        self.writer.write(HEADER.pack(len(data)) + data)
        await self.writer.drain()
        (size,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        reply: dict[str, Any] = json.loads(await self.reader.readexactly(size))
        return reply

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.writer.close()
        await self.process.wait()


class ProcessPool:
    """At most `size` processes, started when needed and kept. Use as an async context manager, or `close` it."""

    def __init__(self, size: int = 2) -> None:
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    async def run(
        self, ref: str, args: Mapping[str, Any], method: str, payload: Any, timeout: float, judge: Judge | None = None
    ) -> Any:
        """Run one operation (`worker.OPERATIONS`) of the environment `ref` with `args` in a process.

        `payload` and the result are plain JSON data; `timeout` in seconds counts from when the environment is loaded.
        `judge` stays here and answers what the process asks of it.
        Raises CallTimedOut (its process is dead by then), WorkerDied, PoolClosed, JudgeUnavailable, or the
        environment's own problem.
        """
        async with self._slots:
            if self._closed:
                raise PoolClosed("the process pool is closed")
            key = json.dumps([ref, dict(args)], sort_keys=True, default=str)
            worker = await self._take(key)
            healthy = False
            try:
                if key not in worker.loaded:
                    await self._load(worker, ref, args)
                    worker.loaded.add(key)
                result = await _ask(worker, ref, args, method, payload, timeout, judge)
                healthy = True
                return result
            except (EnvironmentProblem, JudgeUnavailable) as problem:
                healthy = not isinstance(problem, CallTimedOut | WorkerDied | LoadTimedOut)
                raise
            finally:
                if healthy and not self._closed:
                    self._idle.append(worker)
                else:
                    await asyncio.shield(self._discard(worker))

    async def _load(self, worker: _Worker, ref: str, args: Mapping[str, Any]) -> None:
        try:
            await worker.ask(ref, args, "load", {}, LOAD_SECONDS)
        except TimeoutError:
            raise LoadTimedOut(f"loading {ref} took longer than {LOAD_SECONDS:g} s and was killed") from None

    async def _take(self, key: str) -> _Worker:
        """An idle worker that has the environment, else any idle one, else a new one."""
        for worker in sorted(self._idle, key=lambda one: key not in one.loaded):
            self._idle.remove(worker)
            if worker.process.returncode is None:
                return worker
            await self._discard(worker)
        worker = await _Worker.start()
        self._all.add(worker)
        return worker

    async def _discard(self, worker: _Worker) -> None:
        self._all.discard(worker)
        await worker.kill()

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes alive now."""
        return tuple(worker.process.pid for worker in self._all)

    async def close(self) -> None:
        """Kill every process and wait for it; calls in flight raise WorkerDied."""
        self._closed = True
        await asyncio.gather(*(self._discard(worker) for worker in tuple(self._all)))
        self._idle.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _ask(
    worker: _Worker,
    ref: str,
    args: Mapping[str, Any],
    method: str,
    payload: Any,
    timeout: float,
    judge: Judge | None,
) -> Any:
    try:
        return await worker.ask(ref, args, method, payload, timeout, judge)
    except TimeoutError:
        raise CallTimedOut(f"{_called(method, payload)} took longer than {timeout:g} s and was killed") from None


async def _judged(judge: Judge, question: Mapping[str, Any]) -> dict[str, Any]:
    """What the judge says to a process, or why it does not."""
    messages = [Message.model_validate(message) for message in question["messages"]]
    try:
        return {"said": await judge.ask(messages, model=question["model"], max_tokens=question["max_tokens"])}
    except JudgeUnavailable as problem:
        return {"away": str(problem)}


def _called(method: str, payload: Mapping[str, Any]) -> str:
    """What people call the function that runs."""
    return str(payload.get("name") or (payload.get("call") or {}).get("name") or method)


def _ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
