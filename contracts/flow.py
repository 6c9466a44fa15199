"""The pure flow of an episode: whose turn it is, when it ends, in which order limits are checked.

Invariant: what happens next is a pure function of small facts, written here once. The durable workflow and the
in-terminal `atropos env try` both ask it, so they cannot disagree.

Order of checks
1. After the model spoke: LENGTH (the message is cut, nothing in it may run) → tools, if it called any → `step`, if the
   environment has one → ANSWERED.
2. After the answer of tools and `step`: DONE / TRUNCATED from `step` → CONDITION.
3. Before the next model call: MAX_TURNS → MAX_TOKENS → CONTEXT_OVERFLOW (the last needs the rendered
   prompt, so the model call itself reports it).
With both tools and `step`, a message with tool calls is answered by the tools alone; `step` sees the first message
without any.
"""

from enum import StrEnum
from typing import Final

from .base import Wire
from .limits import Limits
from .reasons import FinishReason, RunAt, StopReason


class Next(StrEnum):
    """What an episode does next."""

    MODEL = "model"
    TOOLS = "tools"
    STEP = "step"
    END = "end"


class Move(Wire):
    """The next thing to do; `stop` is set exactly when `next` is END."""

    next: Next
    stop: StopReason | None = None


class Spent(Wire):
    """What an episode has used up so far."""

    turns: int = 0
    tokens: int = 0
    """Sampled tokens."""


MODEL: Final = Move(next=Next.MODEL)


def end(stop: StopReason) -> Move:
    return Move(next=Next.END, stop=stop)


def before_model(spent: Spent, limits: Limits) -> Move:
    """May the model be called again?"""
    if limits.turns is not None and spent.turns >= limits.turns:
        return end(StopReason.MAX_TURNS)
    if limits.tokens is not None and spent.tokens >= limits.tokens:
        return end(StopReason.MAX_TOKENS)
    return MODEL


def after_model(finish: FinishReason, calls: int, has_step: bool) -> Move:
    """Who answers the message the model has just finished?"""
    if finish is FinishReason.LENGTH:
        return end(StopReason.LENGTH)
    if calls:
        return Move(next=Next.TOOLS)
    if has_step:
        return Move(next=Next.STEP)
    return end(StopReason.ANSWERED)


def after_answer(*, done: bool = False, truncated: bool = False, condition: str | None = None) -> Move:
    """What follows the answer of tools or `step`; the limits are asked next, by `before_model`."""
    if done:
        return end(StopReason.DONE)
    if truncated:
        return end(StopReason.TRUNCATED)
    if condition is not None:
        return end(StopReason.CONDITION)
    return MODEL


def completion_budget(limits: Limits, spent: Spent, max_tokens: int, prompt: int, context: int) -> int:
    """Tokens the next completion may have; ≤ 0 means CONTEXT_OVERFLOW.

    `prompt`: tokens of the rendered prompt; `context`: the model's own limit.
    """
    room = min(context, limits.context or context) - prompt
    if limits.tokens is not None:
        room = min(room, limits.tokens - spent.tokens)
    return min(room, max_tokens)


class CallPlan(Wire):
    """Where one tool call of a message runs."""

    index: int
    name: str
    run: RunAt
    serial: bool
    """Takes `state`, so it runs after the calls before it and its change is seen by those after it."""
    queue: str | None = None
    timeout_s: float = 2.0


def waves(calls: tuple[CallPlan, ...]) -> tuple[tuple[CallPlan, ...], ...]:
    """Calls grouped into waves that run one after another; calls of one wave run side by side.

    Neighbouring inline calls form one wave (one local activity answers them all, in order); a scheduled call that
    takes no state joins the scheduled wave before it; every other one is a wave of its own. Order is kept.
    """
    out: list[list[CallPlan]] = []
    for call in calls:
        if out and _joins(call, out[-1]):
            out[-1].append(call)
        else:
            out.append([call])
    return tuple(tuple(wave) for wave in out)


def _joins(call: CallPlan, wave: list[CallPlan]) -> bool:
    if call.run is RunAt.INLINE:
        return wave[-1].run is RunAt.INLINE
    return not call.serial and all(other.run is not RunAt.INLINE and not other.serial for other in wave)
