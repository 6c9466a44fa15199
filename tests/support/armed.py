"""Points that a test arms: a file says how often a point is passed before, and what happens then.

Invariant: a point acts once, in whichever process comes by, and its file is gone then. So a test arms one, starts a
run, and sees that it happened. Whoever acts may strike itself or another process, which is named by its pid file in the
same folder: a fault of a server happens at a moment of the work that depends on it.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KILL, STOP = "kill", "stop"
_SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP}


@dataclass(frozen=True)
class Armed:
    """Files of `folder`: the point's name → `PASSES ACTION`, where ACTION may be `ACTION:NAME` of another process."""

    folder: Path

    def arm(self, point: str, action: str = KILL, passes: int = 1) -> None:
        """Act the next time but `passes` that the point is reached."""
        self._write(point, f"{passes} {action}")

    def waiting(self, point: str) -> bool:
        """Whether it has not happened yet."""
        return (self.folder / point).exists()

    def stopped(self, point: str) -> int | None:
        """The process that was stopped there."""
        found = self.folder / f"{point}.stopped"
        return int(found.read_text()) if found.exists() else None

    def forget(self, point: str) -> None:
        """It goes on, and may stop there again."""
        (self.folder / f"{point}.stopped").unlink()

    def name(self, process: str, pid: int) -> None:
        """From now on the process called so is this one."""
        self._write(f"{process}.pid", str(pid))

    def pid(self, process: str) -> int:
        return int((self.folder / f"{process}.pid").read_text())

    def take(self, point: str) -> str | None:
        """What to do here and now."""
        file = self.folder / point
        try:
            passes, action = file.read_text().split()
        except FileNotFoundError:
            return None
        if int(passes) > 0:
            self.arm(point, action, int(passes) - 1)
            return None
        file.unlink()
        return action

    def reach(self, point: str) -> None:
        action = self.take(point)
        if action is None:
            return
        what, _, who = action.partition(":")
        pid = self.pid(who) if who else os.getpid()
        if what == STOP:
            self._write(f"{point}.stopped", str(pid))
        strike(pid, _SIGNALS[what])
        if pid == os.getpid() and what == KILL:
            time.sleep(60)  # nothing after this line runs while the signal is on its way

    def _write(self, name: str, text: str) -> None:
        hidden = self.folder / f".{name}.{os.getpid()}"
        hidden.write_text(text)
        hidden.rename(self.folder / name)


def strike(pid: int, number: signal.Signals) -> None:
    """Signal a process; stopping and going on are for all that it started, too: a Postgres is many processes."""
    if number is not signal.SIGKILL:
        for child in _children(pid):
            with suppress(ProcessLookupError):
                os.kill(child, number)
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
