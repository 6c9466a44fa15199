"""Who holds the event loop, seen by a thread of its own.

Invariant: what is told was running on the loop all the time: the same call was found there twice in a row, or nothing
else could run since the last look (the interpreter was held). Code that only waits is never blamed.
"""

import asyncio
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

HELD_S: Final = 2.0
"""Longer than inline code may take at all."""
STUCK_S: Final = 60.0
"""A process whose loop is held for so long serves nobody and never will."""
_LOOK_S: Final = 0.25

CallT = TypeVar("CallT")


@dataclass(frozen=True, eq=False)
class _Running(Generic[CallT]):
    call: CallT
    since: float


class LoopWatch(Generic[CallT]):
    """Tells, on the loop once it is free, which call held it; in the thread at once, through `at_once`."""

    def __init__(
        self,
        at_once: Callable[[CallT], None],
        afterwards: Callable[[CallT], None],
        *,
        held_s: float = HELD_S,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._at_once = at_once
        self._afterwards = afterwards
        self._held_s = held_s
        self._stuck_s = stuck_s
        self._running: dict[asyncio.Task[object] | None, _Running[CallT]] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends_process = False

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._watch, args=(loop,), name="loop-watch", daemon=True)
        self._thread.start()

    def end_process_when_stuck(self) -> None:
        """From now on a loop that is held for a minute ends the process, with all stacks on standard error.

        The alarm is the interpreter's own, since code that holds the interpreter holds our thread as well.
        """
        self._ends_process = True

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def running(self, call: CallT) -> Iterator[None]:
        """The current task runs `call` for the block."""
        task = asyncio.current_task()
        self._running[task] = _Running(call, time.monotonic())
        try:
            yield
        finally:
            del self._running[task]

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        last: _Running[CallT] | None = None
        told: _Running[CallT] | None = None
        looked = time.monotonic()
        while not self._stopping.wait(_LOOK_S):
            now = time.monotonic()
            found = self._running.get(asyncio.current_task(loop))
            held = found if found is not None and (found is last or now - looked > self._held_s) else None
            if held is not None and held is not told and now - held.since > self._held_s:
                told = held
                self._at_once(held.call)
                loop.call_soon_threadsafe(self._afterwards, held.call)
            if self._ends_process and held is None:
                faulthandler.dump_traceback_later(self._stuck_s, exit=True, file=sys.__stderr__ or sys.stderr)
            last, looked = found, now
        if self._ends_process:
            faulthandler.cancel_dump_traceback_later()
