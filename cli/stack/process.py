"""Processes named so that a recycled pid is never mistaken for the process we started.

Invariant: nothing is signalled by number alone. A `ProcessId` carries the start time that the kernel gave the
process; where it no longer matches, the process counts as gone.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


class ProcessId(BaseModel):
    """A process for good: its number and when it started (boot id and ticks on Linux, wall clock elsewhere)."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: str


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process, None where there is none (a zombie has ended and counts as none)."""
    started = _linux_start(pid) if sys.platform == "linux" else _portable_start(pid)
    return None if started is None else ProcessId(pid=pid, started=started)


def is_alive(process: ProcessId | None) -> bool:
    """Whether this very process, not another with its number, is running."""
    return process is not None and identify(process.pid) == process


def send(process: ProcessId, signum: int, *, group: bool = False) -> None:
    """Signal the process (or its process group) if it is still the same one; quietly nothing otherwise."""
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(process.pid, signum)


def wait_gone(process: ProcessId, timeout_s: float) -> bool:
    """Wait until the process has ended; False where it is still there after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while is_alive(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def stop_process(process: ProcessId, signum: int, grace_s: float) -> None:
    """End a process that is not our child: its own stop signal first, SIGKILL to its group after `grace_s`."""
    send(process, signum)
    if not wait_gone(process, grace_s):
        send(process, signal.SIGKILL, group=True)
        wait_gone(process, 5.0)


def die_with_parent(signum: int) -> Callable[[], None] | None:
    """A `preexec_fn` that asks Linux to signal the child when its parent dies; None where that does not exist.

    It runs after the change of user, which would clear the request. The parent may have died before the request
    was made, hence the second look at the parent's pid.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def request() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return request


def _linux_start(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name in brackets may hold spaces
    state, ticks = fields[0], fields[19]
    return None if state in {"Z", "X"} else f"{boot}:{ticks}"


def _portable_start(pid: int) -> str | None:
    shown = subprocess.run(
        ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    state, _, started = shown.partition(" ")
    return None if not state or state.startswith("Z") else started.strip()


def working_in(folder: Path) -> list[ProcessId]:
    """Processes whose current folder this is. Linux tells; elsewhere none is found."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended, or is none of ours
            if entry.readlink() == folder:
                found.append(identify(int(entry.parent.name)))
    return [process for process in found if process is not None]


def command_line(pid: int) -> str:
    """The command line of a process with spaces between arguments, empty where there is no such process."""
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    return subprocess.run(
        ["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
