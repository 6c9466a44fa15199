"""Who holds the event loop, seen by a thread of its own.

Invariant: what is told was running on the loop all the time: the same call was found there look after look, or nothing
else could run since the last look although the process computed (the interpreter was held). Code that only waits is
never blamed, nor is any for a process that was stopped: between two looks no more counts than they are apart.
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
_LATE_S: Final = 1.0
"""A look that comes so late on a busy machine still counts whole."""
_COMPUTED: Final = 0.1
"""A process that computed for this part of a time was not stopped in it."""

CallT = TypeVar("CallT")


@dataclass(frozen=True, eq=False)
class _Running(Generic[CallT]):
    call: CallT


class LoopWatch(Generic[CallT]):
    """Tells, on the loop once it is free, which call held it; in the thread at once, through `at_once`."""

    def __init__(
        self,
        at_once: Callable[[CallT], None],
        afterwards: Callable[[CallT], None],
        *,
        held_s: float = HELD_S,
    ) -> None:
        self._at_once = at_once
        self._afterwards = afterwards
        self._held_s = held_s
        self._running: dict[asyncio.Task[object] | None, _Running[CallT]] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._stuck_s: float | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._watch, args=(loop,), name="loop-watch", daemon=True)
        self._thread.start()

    def end_process_when_stuck(self, stuck_s: float = STUCK_S) -> None:
        """From now on a loop that is held for so long ends the process, with all stacks on standard error.

        The alarm is the interpreter's own, since code that holds the interpreter holds our thread as well.
        """
        self._stuck_s = stuck_s

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def running(self, call: CallT) -> Iterator[None]:
        """The current task runs `call` for the block."""
        task = asyncio.current_task()
        self._running[task] = _Running(call)
        try:
            yield
        finally:
            del self._running[task]

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        last: _Running[CallT] | None = None
        told: _Running[CallT] | None = None
        looked, computed, held_s = time.monotonic(), time.process_time(), 0.0
        answered = threading.Event()
        answered.set()
        while not self._stopping.wait(_LOOK_S):
            now, cpu = time.monotonic(), time.process_time()
            since, alone = now - looked, cpu - computed > _COMPUTED * (now - looked) > _COMPUTED * self._held_s
            found = self._running.get(asyncio.current_task(loop))
            held = found if found is not None and (found is last or alone) else None
            held_s = 0.0 if held is None else since if alone else held_s + min(since, _LATE_S)
            if held is not None and held is not told and held_s > self._held_s:
                told = held
                self._at_once(held.call)
                loop.call_soon_threadsafe(self._afterwards, held.call)
            if self._stuck_s is not None and answered.is_set():  # whoever holds it, an import or a task without a name
                answered.clear()
                loop.call_soon_threadsafe(answered.set)
                faulthandler.dump_traceback_later(self._stuck_s, exit=True, file=sys.__stderr__ or sys.stderr)
            last, looked, computed = found, now, cpu
        if self._stuck_s is not None:
            faulthandler.cancel_dump_traceback_later()
