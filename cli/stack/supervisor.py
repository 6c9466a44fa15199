"""The process that holds the stack: `python -m atropos.cli.stack.supervisor --home H [--options JSON] [--owned]`.

Invariants: it starts parts in the order of their dependencies, starts again what dies, and whichever way it ends
(signal, failure of its own, death of its owner) it stops all that it started, dependents first, and nothing else.
It holds the home's lock for as long as it lives, so there is one supervisor a home; what a killed predecessor left
running is stopped before anything is started.
"""

import argparse
import logging
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from .child import Child
from .errors import StackError
from .files import StackHome, explain_os_errors, hold_lock, write_atomically
from .options import StackOptions
from .part import Part
from .plan import Plan, make_plan
from .process import ProcessId, identify, stop_process
from .state import Kept, PartStatus, Phase, StackState, read_kept, read_state, write_kept, write_state

EXIT_FAILED: Final = 1
EXIT_HELD: Final = 75
"""Another supervisor holds the home."""

_GIVE_UP_AFTER: Final = 3
"""Failures in a row, before the stack was ever up, that end the attempt."""
_TICK_S: Final = 2.0
_HURRIED_GRACE_S: Final = 2.0
_LOG_LIMIT: Final = 16 * 2**20
"""Bytes of a log; the older half is kept beside it as `.1`."""

log = logging.getLogger("atropos.stack")


class Supervisor:
    """Holds the parts of one plan. `run` returns after everything has been stopped."""

    def __init__(self, home: StackHome, plan: Plan, *, owner: int | None = None) -> None:
        """`owner` is a file descriptor; its end of file means that whoever started us is gone."""
        me = identify(os.getpid())
        if me is None:
            raise StackError("The supervisor cannot see its own process; is /proc mounted?")
        self._me: ProcessId = me
        self._home = home
        self._plan = plan
        self._owner = owner
        self._children = [Child(part, home.log(part.name)) for part in plan.parts]
        self._phase = Phase.STARTING
        self._error: str | None = None
        self._written: StackState | None = None
        self._stop_signals = 0

    def run(self) -> None:
        """Start, hold and finally stop the parts. Raises `StackError` where starting failed."""
        with self._wakeups() as wakeup:
            try:
                self._save()
                while not self._stop_signals:
                    self._step()
                    self._sleep(wakeup)
            except BaseException as error:
                self._error = str(error) if isinstance(error, StackError) else f"internal error: {error!r}"
                raise
            finally:
                self._stop_all(wakeup)
                self._finish()

    def record_failure(self, error: str) -> None:
        """Leave a state file that says why there is no stack."""
        self._error, self._phase = error, Phase.FAILED
        self._save()

    def _step(self) -> None:
        now = time.monotonic()
        for child in self._children:
            before = (child.status, child.restarts)
            child.look(now)
            if child.wants_start(now, self._met()):
                child.start()
                self._save()
            if (child.status, child.restarts) != before:
                log.info("%s: %s%s", child.part.name, child.status, f", {child.detail}" if child.detail else "")
            self._give_up_on(child)
        if self._phase is Phase.STARTING and all(child.was_ready for child in self._children):
            self._phase = Phase.RUNNING
            with explain_os_errors(self._home.root):
                write_kept(self._home, self._plan.kept)
        self._save()
        self._bound_logs()

    def _met(self) -> set[str]:
        return {child.part.name for child in self._children if child.was_ready}

    def _give_up_on(self, child: Child) -> None:
        hopeless = child.permanent or child.failures >= _GIVE_UP_AFTER
        if self._phase is Phase.STARTING and child.status is PartStatus.BACKOFF and hopeless:
            if child.permanent and child.detail:
                raise StackError(child.detail)
            raise StackError(f"{child.part.name} did not start: {child.detail} (see {child.log}).")

    def _stop_all(self, wakeup: socket.socket) -> None:
        self._phase = Phase.STOPPING
        self._save()
        for level in reversed(dependency_levels(self._plan.parts)):
            children = [child for child in self._children if child.part.name in level]
            for child in children:
                child.signal(child.part.stop_signal)
            self._await_end(children, wakeup)
            self._save()

    def _await_end(self, children: list[Child], wakeup: socket.socket) -> None:
        begun = time.monotonic()
        while alive := [child for child in children if child.running()]:
            waited = time.monotonic() - begun
            hurried = self._stop_signals > 1
            for child in alive:
                if waited > (min(_HURRIED_GRACE_S, child.part.grace_s) if hurried else child.part.grace_s):
                    child.signal(signal.SIGKILL, group=True)
                child.look(time.monotonic())
            select.select([wakeup], [], [], 0.05)
            self._drain(wakeup)
        for child in children:
            child.mark_stopped()

    def _finish(self) -> None:
        with suppress(OSError):
            if self._error is not None:
                self._phase = Phase.FAILED
                self._save()
            else:
                self._home.state.unlink(missing_ok=True)

    def _save(self) -> None:
        state = StackState(
            supervisor=self._me,
            phase=self._phase,
            error=self._error,
            temporal_address=self._plan.temporal_address,
            temporal_ui=self._plan.temporal_ui,
            database_url=self._plan.database_url,
            engine_url=self._plan.engine_url,
            notes=self._plan.notes,
            parts=tuple(child.state() for child in self._children),
        )
        if state == self._written:
            return
        try:
            write_state(self._home, state)
            self._written = state
        except OSError as error:  # a full disk must not take the running parts down with it
            log.error("The state file cannot be written: %s", error)
            if self._written is None:
                with explain_os_errors(self._home.root):
                    raise

    def _bound_logs(self) -> None:
        for path in (*(child.log for child in self._children), self._home.log("supervisor")):
            with suppress(OSError):
                if path.stat().st_size > _LOG_LIMIT:
                    shutil.copyfile(path, path.with_suffix(".log.1"))
                    os.truncate(path, 0)  # safe: all writers append

    def _sleep(self, wakeup: socket.socket) -> None:
        now = time.monotonic()
        due = min([_TICK_S, *(d for child in self._children if (d := child.due(now)) is not None)])
        if any(child.wants_start(now, self._met()) for child in self._children):
            due = 0.0
        sources: list[socket.socket | int] = [wakeup]
        if self._owner is not None:
            sources.append(self._owner)
        ready, _, _ = select.select(sources, [], [], due)
        if wakeup in ready:
            self._drain(wakeup)
        if self._owner in ready and not os.read(self._owner or 0, 4096):
            log.info("the owner of the stack is gone")
            self._owner = None
            self._stop_signals = max(1, self._stop_signals)  # a second one would mean hurry

    def _drain(self, wakeup: socket.socket) -> None:
        with suppress(BlockingIOError):
            while numbers := wakeup.recv(64):
                self._stop_signals += sum(n in (signal.SIGTERM, signal.SIGINT) for n in numbers)

    @contextmanager
    def _wakeups(self) -> Iterator[socket.socket]:
        """Signals arrive as bytes on a socket, in order, at a place of our choosing: never inside a hook."""
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        old = {number: signal.signal(number, lambda *_: None) for number in numbers}
        hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        old_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield receiver
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in (old | {signal.SIGHUP: hangup}).items():
                signal.signal(number, handler)
            receiver.close()
            sender.close()


def dependency_levels(parts: tuple[Part, ...]) -> list[set[str]]:
    """Names by depth: each part lies deeper than all it depends on. Raises `ValueError` on a cycle or a stranger."""
    levels: list[set[str]] = []
    placed: set[str] = set()
    while len(placed) < len(parts):
        level = {p.name for p in parts if p.name not in placed and placed.issuperset(p.depends_on)}
        if not level:
            raise ValueError("parts depend on each other in a circle, or on a part that is not there")
        levels.append(level)
        placed |= level
    return levels


def stop_leftovers(state: StackState | None) -> None:
    """End what a killed supervisor left running: the state file's parts, last started first."""
    for part in reversed(state.orphans() if state is not None else ()):
        log.info("%s: left over from a killed supervisor, stopping it", part.name)
        if part.process is not None:
            stop_process(part.process, part.stop_signal, part.grace_s)


def supervise(home: StackHome, options: StackOptions, owner: int | None) -> int:
    """Hold a stack in `home` until told to stop; returns an exit status. Raises nothing that it can explain."""
    try:
        home.prepare()
        with hold_lock(home) as held:
            if not held:
                return EXIT_HELD
            return _supervise_locked(home, options, owner)
    except StackError as error:
        log.error("%s", error)
        return EXIT_FAILED


def _supervise_locked(home: StackHome, options: StackOptions, owner: int | None) -> int:
    stop_leftovers(read_state(home))
    home.state.unlink(missing_ok=True)
    try:
        plan = make_plan(home, options, read_kept(home))
        if plan.temporal_profile is not None:
            with explain_os_errors(home.root):
                write_atomically(home.temporal_profile, plan.temporal_profile)
        Supervisor(home, plan, owner=owner).run()
    except StackError as error:
        if not home.state.exists():  # the plan failed before there was anything to supervise
            Supervisor(home, Plan(parts=(), kept=Kept())).record_failure(str(error))
        raise
    return 0


def main() -> int:
    """Entry point of the supervisor process."""
    parser = argparse.ArgumentParser(prog="python -m atropos.cli.stack.supervisor", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="folder of the stack")
    parser.add_argument("--options", default="{}", help="what to start, as JSON")
    parser.add_argument("--owned", action="store_true", help="stop when standard input ends")
    arguments = parser.parse_args()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    options = StackOptions.model_validate_json(arguments.options)
    return supervise(StackHome(arguments.home), options, sys.stdin.fileno() if arguments.owned else None)


if __name__ == "__main__":
    sys.exit(main())
