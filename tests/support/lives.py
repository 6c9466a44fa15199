"""Processes that are started again at once whenever they die, as under a supervisor, forked from one that has imported
everything: a life begins in a moment.

Invariant: no life outlives its supervisor, and none begins once that was told to stop (SIGTERM, passed on).
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType

from .armed import Armed
from .boundaries import ABRUPT

_LOOK_S = 0.02
_STOPS_WITHIN_S = 30.0
LIVES = 100
"""A process that needs more is not walking through boundaries any more."""
ENDED_ABRUPTLY = "a life was ended by code of an environment"
"""Said in the log for each."""


def supervise(
    lives: Mapping[str, Callable[[], object]],
    *,
    named: Armed | None = None,
    tolerant: bool = False,
    rest_s: Callable[[str], float] = lambda name: 0.0,
) -> int:
    """One life after another of each, until told to stop or our parent is gone. Returns the exit code.

    `named`: who is told the process of each life. `tolerant`: also a life that ends by itself is followed by another
    (its server is away). `rest_s`: before the next life, given the name of the one that died.
    """
    parent = os.getppid()
    running: dict[int, str] = {}
    due = dict.fromkeys(lives, 0.0)
    begun = 0
    stopping = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for child in running:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
                os.kill(child, signal.SIGCONT)

    signal.signal(signal.SIGTERM, pass_on)
    while True:
        for name in [name for name, at in due.items() if at <= time.monotonic() and not stopping]:
            if begun >= LIVES * len(lives):
                print(f"died {begun} times", file=sys.stderr)
                return 1
            del due[name]
            begun += 1
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                lives[name]()
                os._exit(0)
            running[child] = name
            if named is not None:
                named.name(name, child)
        child, code = _ended(running, parent)
        if child:
            name = running.pop(child)
            if stopping and not running:
                return 0 if tolerant or code in (0, -signal.SIGTERM, -signal.SIGKILL) else 1
            if code == ABRUPT:
                print(ENDED_ABRUPTLY, file=sys.stderr, flush=True)
            elif code != -signal.SIGKILL and not tolerant and not stopping:
                print(f"a life ended with {code}", file=sys.stderr)
                return 1
            due[name] = time.monotonic() + rest_s(name)
        elif stopping and not running:
            return 0


def _ended(running: Mapping[int, str], parent: int) -> tuple[int, int]:
    """A life that has ended with its exit code, (0, 0) after a moment without; all end when our own parent is gone."""
    if os.getppid() != parent:
        for child in running:
            os.kill(child, signal.SIGKILL)
        os._exit(1)
    with suppress(ChildProcessError):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            return child, os.waitstatus_to_exitcode(status)
    time.sleep(_LOOK_S)
    return 0, 0


@asynccontextmanager
async def supervised(
    module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A module that supervises, as a process for the block, stopped by SIGTERM at its end.

    Raises AssertionError with the log where it ended by itself or badly.
    """
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            code = await asyncio.wait_for(process.wait(), _STOPS_WITHIN_S)
        except TimeoutError:
            process.kill()
            code = await process.wait()
    assert code == 0, f"the worker ended with {code}:\n{log.read_text()[-4000:]}"
