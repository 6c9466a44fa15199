"""One process of the stack, as a value: how to start it, when it is ready, how to stop it."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Check = Callable[[], str | None]
"""Answers None when all is well, else a short reason; must return within about a second and never raise."""


def always_ready() -> str | None:
    """The check of a part that is ready as soon as it runs."""
    return None


def nothing() -> None:
    """The hook that does nothing."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process that the supervisor starts, watches and stops.

    `prepare` runs before each start, `on_ready` after each time the part became ready; both must be repeatable
    and may raise `StackError`, which counts as a failed start.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """The complete environment of the process."""
    user: tuple[int, int] | None = None
    """Numeric user and group to run as; None is ours."""
    cwd: str | None = None
    depends_on: tuple[str, ...] = ()
    """Parts that must have been ready (or, one-shot, done) before this one is first started."""
    one_shot: bool = False
    """It runs to its end once; the exit status 0 is success."""
    ready: Check = always_ready
    prepare: Callable[[], None] = nothing
    on_ready: Callable[[], None] = nothing
    address: str | None = None
    """What people are shown; no passwords."""
    ports: tuple[int, ...] = ()
    """Ports it listens on; checked before each start, for a clear sentence."""
    refuses_with: int | None = None
    """The exit status by which it says that no other try will do better."""
    start_timeout_s: float = 60.0
    stop_signal: int = signal.SIGTERM
    grace_s: float = 10.0
    """Seconds between the stop signal and SIGKILL."""
