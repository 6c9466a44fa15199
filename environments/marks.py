"""The decorators of the contract: what a method is for and where it runs.

Invariant: a mark says only what the author said. Defaults are resolved in one place (`placement`), and a mark that
contradicts itself is refused while the class is being defined, not when an episode reaches it.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar, overload

from ..contracts.activities import ScorerPlan
from ..contracts.numbers import why_no_number
from ..contracts.reasons import RunAt
from .faults import BadEnvironment

F = TypeVar("F", bound=Callable[..., Any])
Run = Literal["inline", "process", "activity"]

INLINE_SECONDS: Final = 2.0
"""A local activity blocks its workflow's updates and cancel while it runs, so it may not take longer."""
DEFAULT_SECONDS: Final = {RunAt.INLINE: INLINE_SECONDS, RunAt.PROCESS: 30.0, RunAt.ACTIVITY: 600.0}

_MARK: Final = "__atropos_mark__"


class Kind(StrEnum):
    """What a marked method is. The value is the decorator's name."""

    TOOL = "tool"
    REWARD = "reward"
    METRIC = "metric"
    GROUP_REWARD = "group_reward"
    STOP = "stop"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Mark:
    """What a decorator was told."""

    kind: Kind
    run: RunAt | None = None
    timeout: float | None = None
    queue: str | None = None
    weight: float = 1.0
    min_valid: int = 1


def mark_of(function: object) -> Mark | None:
    """The mark of a function, None where it has none."""
    found = getattr(function, _MARK, None)
    return found if isinstance(found, Mark) else None


def _apply(function: F, mark: Mark) -> F:
    name = getattr(function, "__name__", repr(function))
    if not inspect.isfunction(function):
        raise BadEnvironment(f"@{mark.kind} marks methods, and {name} is none; put it directly above a `def`")
    earlier = mark_of(function)
    if earlier is not None:
        raise BadEnvironment(f"{name} is both @{earlier.kind} and @{mark.kind}; choose one, or write two methods")
    _check(name, mark)
    setattr(function, _MARK, mark)
    return function


def _check(name: str, mark: Mark) -> None:
    what = f"@{mark.kind} {name}"
    if mark.timeout is not None and not (math.isfinite(mark.timeout) and mark.timeout > 0):
        raise BadEnvironment(f"{what}: timeout must be a positive number of seconds, not {mark.timeout!r}")
    if mark.queue is not None and mark.run is not RunAt.ACTIVITY:
        raise BadEnvironment(f'{what}: a queue needs run="activity"; only scheduled activities have one')
    if mark.run is RunAt.INLINE and mark.timeout is not None and mark.timeout > INLINE_SECONDS:
        raise BadEnvironment(
            f"{what}: inline work has at most {INLINE_SECONDS:g} s, not {mark.timeout:g}; "
            'use run="process" or "activity"'
        )
    problem = why_no_number(mark.weight)
    if problem is not None:
        raise BadEnvironment(f"{what}: the weight is {mark.weight!r}; {problem}")
    if mark.min_valid < 1:
        raise BadEnvironment(f"{what}: min_valid must be at least 1, not {mark.min_valid!r}")


def _run(kind: Kind, run: str | None) -> RunAt | None:
    if run is None:
        return None
    if run not in set(RunAt):
        raise BadEnvironment(f"@{kind}: run must be one of {', '.join(RunAt)}, not {run!r}")
    return RunAt(run)


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, run: Run | None = None, timeout: float | None = None, queue: str | None = None) -> Callable[[F], F]: ...
def tool(
    function: F | None = None,
    /,
    *,
    run: Run | None = None,
    timeout: float | None = None,
    queue: str | None = None,
) -> F | Callable[[F], F]:
    """A tool the model may call.

    May ask for `task`, `state`, `judge`, `ctx`; its other parameters are the JSON arguments, described to the model
    by their annotations and the docstring (with its `Args:` section). Its result becomes text (JSON for structures);
    an exception becomes the text `Error: …`. Default `run`: sync → `process`, async → `inline`. `timeout` in seconds.
    """
    mark = Mark(Kind.TOOL, _run(Kind.TOOL, run), timeout, queue)
    return _apply(function, mark) if function is not None else lambda f: _apply(f, mark)


@overload
def reward(function: F, /) -> F: ...
@overload
def reward(
    *, weight: float = 1.0, run: Run | None = None, timeout: float | None = None, queue: str | None = None
) -> Callable[[F], F]: ...
def reward(
    function: F | None = None,
    /,
    *,
    weight: float = 1.0,
    run: Run | None = None,
    timeout: float | None = None,
    queue: str | None = None,
) -> F | Callable[[F], F]:
    """A part of an episode's reward: a finite number, or None for unscored. The reward is the weighted sum.

    May ask for `task`, `episode`, `state`, `judge`, `ctx`. Default `run`: sync → `process`, async → `inline`, with
    `judge` → `activity`, since a judge takes seconds.
    """
    mark = Mark(Kind.REWARD, _run(Kind.REWARD, run), timeout, queue, weight)
    return _apply(function, mark) if function is not None else lambda f: _apply(f, mark)


@overload
def metric(function: F, /) -> F: ...
@overload
def metric(*, run: Run | None = None, timeout: float | None = None, queue: str | None = None) -> Callable[[F], F]: ...
def metric(
    function: F | None = None,
    /,
    *,
    run: Run | None = None,
    timeout: float | None = None,
    queue: str | None = None,
) -> F | Callable[[F], F]:
    """A number that is kept and shown but never part of the reward. Asks like `reward`; default `run`: `inline`."""
    mark = Mark(Kind.METRIC, _run(Kind.METRIC, run), timeout, queue)
    return _apply(function, mark) if function is not None else lambda f: _apply(f, mark)


@overload
def group_reward(function: F, /) -> F: ...
@overload
def group_reward(
    *,
    min_valid: int = 2,
    weight: float = 1.0,
    run: Run | None = None,
    timeout: float | None = None,
    queue: str | None = None,
) -> Callable[[F], F]: ...
def group_reward(
    function: F | None = None,
    /,
    *,
    min_valid: int = 2,
    weight: float = 1.0,
    run: Run | None = None,
    timeout: float | None = None,
    queue: str | None = None,
) -> F | Callable[[F], F]:
    """A part of the reward that compares the valid episodes of a group: one number or None for each, in their order.

    May ask for `task`, `episodes`, `judge`, `ctx`. With fewer than `min_valid` valid members nobody is scored by it.
    Defaults of `run` as for `reward`.
    """
    mark = Mark(Kind.GROUP_REWARD, _run(Kind.GROUP_REWARD, run), timeout, queue, weight, min_valid)
    return _apply(function, mark) if function is not None else lambda f: _apply(f, mark)


def stop(function: F, /) -> F:
    """A condition that ends the episode when it returns True; asked inline after tools and `step` have answered.

    May ask for `task`, `state`, `episode`.
    """
    return _apply(function, Mark(Kind.STOP))


def step(*, run: Run | None = None, timeout: float | None = None, queue: str | None = None) -> Callable[[F], F]:
    """Says where the method `step` runs, where the default (`inline`) does not fit."""
    mark = Mark(Kind.STEP, _run(Kind.STEP, run), timeout, queue)
    return lambda function: _apply(function, mark)


def placement(name: str, function: Callable[..., Any], mark: Mark, asks_judge: bool) -> ScorerPlan:
    """Where a marked function runs and how long it may: the author's word, else the defaults of the contract."""
    run = mark.run
    if run is None:
        awaited = inspect.iscoroutinefunction(function)
        sync_default = RunAt.PROCESS if mark.kind in (Kind.TOOL, Kind.REWARD, Kind.GROUP_REWARD) else RunAt.INLINE
        run = RunAt.ACTIVITY if asks_judge else RunAt.INLINE if awaited else sync_default
        if run is RunAt.INLINE and mark.timeout is not None and mark.timeout > INLINE_SECONDS:
            raise BadEnvironment(
                f"@{mark.kind} {name} would run inline, which has at most {INLINE_SECONDS:g} s; "
                f'with timeout={mark.timeout:g} say run="process" or "activity"'
            )
    return ScorerPlan(name=name, run=run, queue=mark.queue, timeout_s=mark.timeout or DEFAULT_SECONDS[run])
