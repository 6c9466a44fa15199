"""Starting a supervisor and waiting for it; the stack as a context manager.

Invariant: a supervisor that was started here and whose stack is not wanted any more (Ctrl-C or an error while
waiting, the end of a `running_stack` block, the death of the owning process) ends together with its parts.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from .child import tail_line
from .errors import StackError
from .files import StackHome, explain_os_errors, write_atomically
from .options import StackOptions
from .process import identify
from .state import Phase, StackState, read_state
from .supervisor import EXIT_HELD

Progress = Callable[[StackState], None]
"""Called with each new state while a stack starts."""

_POLL_S = 0.1
_STATE_APPEARS_S = 60.0
"""A supervisor stops what its predecessor left over before it writes its first state."""


class AlreadyRunning(StackError):
    """Another supervisor holds the home."""


@dataclass(frozen=True)
class RunningStack:
    """A stack that is up. Addresses of parts that were not asked for are None."""

    home: StackHome
    state: StackState

    @property
    def temporal_address(self) -> str | None:
        """`host:port` of Temporal."""
        return self.state.temporal_address

    @property
    def temporal_ui(self) -> str | None:
        """URL of Temporal's web page."""
        return self.state.temporal_ui

    @property
    def database_url(self) -> SecretStr | None:
        """`postgresql://…` with its password."""
        return self.state.database_url

    @property
    def engine_url(self) -> str | None:
        """Base URL of the dev engine."""
        return self.state.engine_url

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences the user should read once."""
        return self.state.notes


@contextmanager
def running_stack(home: Path, options: StackOptions, *, progress: Progress | None = None) -> Iterator[RunningStack]:
    """Hold a stack of our own for the block.

    Leaving the block in any way stops it; should this process be killed outright, the supervisor sees its
    standard input end and stops too. Ctrl-C in the terminal reaches only us. Raises `StackError` where the stack
    cannot start, `AlreadyRunning` where the home's stack is up already.
    """
    place = StackHome(home)
    place.prepare()
    read_state(place)  # a damaged state file is reported before anything starts
    supervisor = launch(place, options, owned=True)
    ready = False
    try:
        state = await_ready(place, supervisor, progress)
        ready = True
        yield RunningStack(place, state)
    finally:
        end(supervisor)
        if not ready:
            place.tidy()


def launch(home: StackHome, options: StackOptions, *, owned: bool) -> "subprocess.Popen[bytes]":
    """Start a supervisor process in a session of its own; `owned` ties its life to our end of its stdin."""
    command = [
        sys.executable, "-P", "-m", "atropos.cli.stack.supervisor",
        "--home", str(home.root), "--options", options.model_dump_json(exclude_defaults=True),
    ]  # fmt: skip
    with explain_os_errors(home.root):
        log = home.log("supervisor").open("ab")
    with log:
        supervisor = subprocess.Popen(
            [*command, "--owned"] if owned else command,
            stdin=subprocess.PIPE if owned else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _note(home, supervisor)
    return supervisor


def _note(home: StackHome, supervisor: "subprocess.Popen[bytes]") -> None:
    """Write down which process is about to hold the home, so that `down` can stop it before its first state.

    A supervisor that finds the home held ends at once, and a dead process is nobody's note: no harm in either.
    """
    process = identify(supervisor.pid)
    if process is None:
        return
    try:
        with explain_os_errors(home.root):
            write_atomically(home.launched, process.model_dump_json())
    except BaseException:
        end(supervisor)
        raise


def await_ready(home: StackHome, supervisor: "subprocess.Popen[bytes]", progress: Progress | None = None) -> StackState:
    """Wait until the supervisor that we started has every part ready. Raises `StackError` saying why not."""
    seen: StackState | None = None
    while (code := supervisor.poll()) is None:
        state = read_state(home)
        if state is not None and state.supervisor.pid == supervisor.pid and state != seen:
            seen = state
            if progress is not None:
                progress(state)
            if state.phase is Phase.RUNNING:
                return state
        time.sleep(_POLL_S)
    if code == EXIT_HELD:
        raise AlreadyRunning(f"A stack is already running in {home.root}; stop it with `atropos down`.")
    state = read_state(home)
    if state is not None and state.error is not None and state.supervisor.pid == supervisor.pid:
        raise StackError(state.error)
    if code in (0, -signal.SIGTERM, -signal.SIGINT):
        raise StackError(f"The stack in {home.root} was stopped while it was starting; `atropos up` starts it again.")
    words = tail_line(home.log("supervisor"))
    raise StackError(f"The supervisor ended with status {code}: {words or 'it left no message'}.")


def await_other(home: StackHome, progress: Progress | None = None) -> StackState | None:
    """Wait for a stack that someone else started; None where it ended meanwhile."""
    deadline = time.monotonic() + _STATE_APPEARS_S
    seen: StackState | None = None
    while time.monotonic() < deadline:
        state = read_state(home)
        if state is not None and state.supervised():
            deadline = time.monotonic() + 1.0  # from here on its life is what we wait for
            if state.phase is Phase.RUNNING:
                return state
            if state != seen and progress is not None:
                progress(state)
            seen = state
        time.sleep(_POLL_S)
    return None


def end(supervisor: "subprocess.Popen[bytes]") -> None:
    """Tell a supervisor of ours to stop everything and wait for it; a Ctrl-C meanwhile makes it hurry."""
    while supervisor.poll() is None:
        with suppress(KeyboardInterrupt):
            with suppress(OSError):
                if supervisor.stdin is not None:
                    supervisor.stdin.close()
            supervisor.terminate()
            supervisor.wait()
