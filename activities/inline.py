"""Author code that runs inside the worker: remembered, watched, and moved apart where it killed workers.

Invariant: no call kills more than two workers. What runs is noted before it begins; whoever finds the note of a dead
worker records the death; a call with two runs in a process of the pool from then on, where a death is its result.
A local call is refused for that, and so falls back to the scheduled one, which the pool's worker serves. The import of
an environment is noted likewise; with two deaths it is refused. Of a run without a row, which is being registered, its
deaths are kept in the folder of the notes.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from ..contracts.reasons import RunAt
from ..db.deaths import (
    ENOUGH,
    Apart,
    Death,
    Import,
    InlineCall,
    import_deaths,
    record_death,
    record_import_death,
    runs_apart,
)
from ..db.errors import StoreError
from ..db.events import INLINE_SLOW, add_event_once
from ..db.store import Store
from ..environments.faults import BadEnvironment
from .leftovers import Notes, left_by_the_dead, remember, remembered
from .watch import HELD_S, STUCK_S, LoopWatch

_log = logging.getLogger("atropos.worker")
_READ_EVERY_S: Final = 2.0
"""Less than Temporal takes to notice that a worker died, so a death is known before its call comes again."""
_RUNS_KEPT: Final = 64
_FORMAT: Final = 2
"""Of the notes: those of another build are left to it."""
RUNS_APART: Final = "RunsApart"
_IMPORT: Final = "import"
"""First of a note that tells of one."""


class InlineCode:
    """One per process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._notes: Notes | None = None
        self._kept: tuple[Path, str] | None = None
        self._watch = LoopWatch(self._warn, self._record)
        self._told: set[tuple[str, str]] = set()
        self._recording: set[asyncio.Task[None]] = set()
        self._apart: dict[str, tuple[float, Apart]] = {}

    async def open(self, folder: Path, database: str) -> None:
        """Record what killed workers before, and begin to note and to watch.

        Workers of one folder and one database (a name without secrets) are each other's successors. Without a folder
        to write in there are no notes, and a warning says so.
        """
        owner = hashlib.sha256(f"{_FORMAT} {database}".encode()).hexdigest()[:12]
        try:
            with left_by_the_dead(folder, owner) as left:
                for name, running in left:
                    await self._learn(folder, owner, name, running)
            self._notes = Notes.begin(folder, owner)
            self._kept = (folder, owner)
        except OSError as error:
            _log.warning(
                "inline code that kills this worker will not be recognised: %s is not writable (%s); set ATROPOS_HOME "
                "to a folder of yours",
                folder,
                error.strerror,
            )
        self._watch.start()

    async def _learn(self, folder: Path, owner: str, name: str, running: list[Any]) -> None:
        """What ran in a worker that died."""
        imports = [Import(*facts) for first, *facts in running if first == _IMPORT]
        calls = [InlineCall(*call) for call in running if call[0] != _IMPORT]
        await record_death(self._store, Death(name, tuple(calls)))
        for one in imports:
            if not await record_import_death(self._store, name, one):
                remember(folder, owner, (name, one.run_id, one.environment))

    def end_process_when_stuck(self, stuck_s: float = STUCK_S) -> None:
        self._watch.end_process_when_stuck(stuck_s)

    async def close(self) -> None:
        """The process ends in good order."""
        self._watch.close()
        await asyncio.gather(*self._recording)
        if self._notes is not None:
            self._notes.close()

    @asynccontextmanager
    async def running(self, call: InlineCall, placed: RunAt | None) -> AsyncIterator[bool]:
        """The block runs `call` of author code placed so; the value says whether it has to run apart.

        Raises, in a local activity, where it has to: the same call is scheduled then.
        """
        if placed is not RunAt.INLINE:
            yield False
        elif call in await self._runs_apart(call.run_id, fresh=not activity.info().is_local):
            if activity.info().is_local:
                raise ApplicationError(
                    f"{call.function} runs in a process of its own",
                    type=RUNS_APART,
                    non_retryable=True,
                    category=ApplicationErrorCategory.BENIGN,
                )
            yield True
        else:
            with ExitStack() as stack:
                stack.enter_context(self._watch.running(call))
                if self._notes is not None:
                    stack.enter_context(self._notes.note((call.run_id, call.owner, call.call, call.function)))
                yield False

    async def importing(self, run_id: str, label: str, ref: str) -> AbstractContextManager[None]:
        """The block imports the environment `label` of a run, which is `ref`, and nothing else.

        Raises BadEnvironment where that ended workers twice.
        """
        one = Import(run_id, label)
        deaths = await import_deaths(self._store, one)
        if deaths is None:
            deaths = len({name for name, *facts in self._remembered() if Import(*facts) == one})
        if deaths >= ENOUGH:
            raise BadEnvironment(
                f"importing the environment {label} ({ref}) ended {deaths} workers: it crashes or exits, or takes more "
                f"than a minute; put right what it does at the top level of its module (`atropos env check {ref}` "
                "imports it), then start the run again, or resume it where it is paused"
            )
        return nullcontext() if self._notes is None else self._notes.note((_IMPORT, run_id, label))

    def _remembered(self) -> list[Any]:
        return [] if self._kept is None else remembered(*self._kept)

    async def _runs_apart(self, run_id: str, *, fresh: bool) -> Apart:
        """What the rows say, at most two seconds ago where it need not be `fresh`."""
        read, known = self._apart.get(run_id, (0.0, None))
        now = time.monotonic()
        if known is not None and not fresh and now - read < _READ_EVERY_S:
            return known
        if known is not None:
            self._apart[run_id] = (now, known)  # others need not ask as well
        found = await runs_apart(self._store, run_id)
        self._apart.pop(run_id, None)
        self._apart[run_id] = (now, found)
        while len(self._apart) > _RUNS_KEPT:
            del self._apart[next(iter(self._apart))]
        return found

    def _warn(self, call: InlineCall) -> None:
        if (call.run_id, call.function) not in self._told:
            _log.warning("%s: %s (%s of %s)", call.run_id, _held(call), call.call, call.owner)

    def _record(self, call: InlineCall) -> None:
        if (call.run_id, call.function) not in self._told:
            self._told.add((call.run_id, call.function))
            task = asyncio.create_task(self._tell(call))
            self._recording.add(task)
            task.add_done_callback(self._recording.discard)

    async def _tell(self, call: InlineCall) -> None:
        try:
            await add_event_once(self._store, call.run_id, INLINE_SLOW, _held(call), {"function": call.function})
        except StoreError as error:
            _log.warning("that %s is slow could not be recorded: %s", call.function, error)


def _held(call: InlineCall) -> str:
    return (
        f"inline code of {call.function} held its worker for more than {HELD_S:g} s, in which no other episode there "
        f'moved; mark it run="process"'
    )
