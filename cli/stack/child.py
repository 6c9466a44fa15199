"""A part that runs: started, probed, found dead, started again after a pause.

Invariants: a child leads a session of its own (Ctrl-C in a terminal reaches only the supervisor) and asks the
kernel to be stopped when the supervisor dies; when it ends, whatever it left in its process group is killed
before its pid is given back, so the pid cannot have been recycled by then. A part that keeps dying is started
ever more rarely, never in a hot loop.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from .errors import StackError
from .part import Part
from .ports import is_free
from .process import ProcessId, die_with_parent, identify
from .state import PartState, PartStatus

_BACKOFF_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STABLE_AFTER_S: Final = 30.0
"""Ready for this long, a part is healthy again and its earlier failures are forgotten."""
_PROBE_EVERY_S: Final = 0.1
_TELLING: Final = ("FATAL", "PANIC", "ERROR", "Error", "error:")


class Child:
    """The life of one part under the supervisor. Single-threaded; nothing here waits longer than a hook does."""

    def __init__(self, part: Part, log: Path) -> None:
        self.part = part
        self.log = log
        self.status = PartStatus.WAITING
        self.process: ProcessId | None = None
        self.restarts = 0
        self.failures = 0
        """In a row; also the place in the backoff table."""
        self.detail: str | None = None
        self.permanent = False
        """The last failure explained itself and would happen again."""
        self.was_ready = False
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._since = 0.0
        self._next_try = 0.0

    def state(self) -> PartState:
        """What the state file says about it."""
        return PartState(
            name=self.part.name,
            status=self.status,
            address=self.part.address,
            process=self.process,
            restarts=self.restarts,
            detail=self.detail,
            stop_signal=self.part.stop_signal,
            grace_s=self.part.grace_s,
        )

    def due(self, now: float) -> float | None:
        """Seconds until it wants attention; None where only its death would matter."""
        if self.status is PartStatus.BACKOFF:
            return max(0.0, self._next_try - now)
        return _PROBE_EVERY_S if self.status is PartStatus.STARTING else None

    def wants_start(self, now: float, met: set[str]) -> bool:
        """Whether it should be started now, given the names of the parts that have been ready."""
        if self.status is PartStatus.WAITING:
            return met.issuperset(self.part.depends_on)
        return self.status is PartStatus.BACKOFF and now >= self._next_try

    def start(self) -> None:
        """Start it; a failure is recorded, not raised."""
        part = self.part
        if self.status is PartStatus.BACKOFF:
            self.restarts += 1
        try:
            part.prepare()
            if taken := next((port for port in part.ports if not is_free(port)), None):
                self._failed(f"port {taken} is taken by another program")
                return
            self._spawn()
        except StackError as error:
            self._failed(str(error), permanent=True)
        except OSError as error:
            self._failed(f"{part.argv[0]} could not be started ({error.strerror})", permanent=True)

    def look(self, now: float) -> None:
        """Notice that it ended, or became ready, or takes too long."""
        code = self._reap()
        if code is not None:
            self._ended(code)
        elif self.status is PartStatus.STARTING and not self.part.one_shot:
            self._probe(now)
        elif self.status is PartStatus.READY and self.failures and now - self._since > _STABLE_AFTER_S:
            self.failures = 0
            self.detail = None

    def signal(self, signum: int, *, group: bool = False) -> None:
        """Send a signal to the child (or its group) if it has not ended."""
        if self._popen is not None:
            with suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self._popen.pid, signum)

    def running(self) -> bool:
        """Whether there is a process that has not been reaped."""
        return self._popen is not None

    def mark_stopped(self) -> None:
        """It is not to run any more."""
        if self.status is not PartStatus.DONE:
            self.status = PartStatus.STOPPED

    def _spawn(self) -> None:
        part = self.part
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:  # appending, so that the supervisor may truncate it
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                part.argv,
                env=dict(part.env),
                cwd=part.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=None if part.user is None else part.user[0],
                group=None if part.user is None else part.user[1],
                extra_groups=None if part.user is None else (),
                preexec_fn=die_with_parent(part.stop_signal),
            )
        self.process = identify(self._popen.pid)
        self.status = PartStatus.STARTING
        self._since = time.monotonic()

    def _probe(self, now: float) -> None:
        reason = self.part.ready()
        if reason is None:
            try:
                self.part.on_ready()
            except StackError as error:
                self._kill_and_fail(str(error), permanent=True)
                return
            self.status, self._since, self.was_ready = PartStatus.READY, now, True
            if not self.failures:
                self.detail = None
        elif now - self._since > self.part.start_timeout_s:
            self._kill_and_fail(f"it was not ready after {self.part.start_timeout_s:.0f} s ({reason})")
        else:
            self.detail = reason if not self.failures else self.detail

    def _kill_and_fail(self, reason: str, *, permanent: bool = False) -> None:
        self.signal(signal.SIGKILL, group=True)
        if self._popen is not None:
            self._popen.wait()
        self._popen = self.process = None
        self._failed(reason, permanent=permanent)

    def _reap(self) -> int | None:
        if self._popen is None:
            return None
        if hasattr(os, "waitid"):
            ended = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
        elif self._popen.poll() is None:
            return None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        code = self._popen.wait()
        self._popen = self.process = None
        return code

    def _ended(self, code: int) -> None:
        if self.part.one_shot and code == 0:
            self.status, self.was_ready, self.detail = PartStatus.DONE, True, None
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        words = tail_line(self.log, self._log_start) if code >= 0 else None
        if words is not None and code == self.part.refuses_with:
            self._failed(words, permanent=True)
        else:
            self._failed(f"it {how}" + (f": {words}" if words else ""))

    def _failed(self, reason: str, *, permanent: bool = False) -> None:
        pause = _BACKOFF_S[min(self.failures, len(_BACKOFF_S) - 1)]
        self.failures += 1
        self.permanent = permanent
        self.status = PartStatus.BACKOFF
        self.detail = reason
        self._next_try = time.monotonic() + pause


def tail_line(path: Path, start: int = 0) -> str | None:
    """The line of a log, from byte `start` on, that best explains an end: the last error, else the last line."""
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - 16_384))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if any(word in line for word in _TELLING)]
        if lines:
            return (telling or lines)[-1][:300]
    return None
