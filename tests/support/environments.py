"""Environments of the workflow tests."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from atropos import (
    EnvConfig,
    Environment,
    Episode,
    Limits,
    Message,
    State,
    Step,
    Task,
    group_reward,
    metric,
    reward,
    stop,
    tool,
)
from atropos.contracts.context import Context, Judge
from atropos.tests.support.armed import Armed
from atropos.tests.support.boundaries import ABRUPT, Boundaries
from pydantic import BaseModel


class Where(EnvConfig):
    folder: str = ""
    """Where effects leave their marks; empty: there are none."""
    boundaries: str = ""
    """Folder of boundaries to die at, between an effect and its row; empty: it never dies."""
    points: str = ""
    """Folder of points that a test arms; empty: there are none."""
    first: int = 0
    """The first task."""
    turns: int | None = None
    where: str = ""
    """The function in which `Deadly` ends its process."""


class Place(BaseModel):
    at: int


class Count(State):
    calls: int = 0
    seen: list[str] = []


class Effects(Environment[Where, Count]):
    """A tool with an effect outside that honours the key: one file a key, however often it is asked."""

    limits = Limits(turns=10)

    def task(self, split: str, index: int) -> Task[Place]:
        return Task(data=Place(at={"train": 0, "eval": 1, "test": 2}[split] * 10**6 + index))

    def prompt(self, task: Task[Place]) -> str:
        return f"What is at {task.data.at}?"

    @tool(run="inline")
    def look(self, at: int, *, state: Count, ctx: Context) -> str:
        """Look at a place."""
        self._touch(state, ctx)
        return f"{state.calls}: nothing at {at}."

    def _touch(self, state: Count, ctx: Context) -> None:
        """The effect outside: a file named by the key, made once; every try is a line of `tries`."""
        state.calls += 1
        state.seen = [*state.seen, ctx.key]
        if not self.config.folder:
            return
        folder = Path(self.config.folder)
        with (folder / "tries").open("a") as tries:
            tries.write(f"{ctx.key}\n")
        with suppress(FileExistsError):
            os.close(os.open(folder / f"{ctx.key}.effect", os.O_CREAT | os.O_EXCL))
        if self.config.boundaries:
            Boundaries(Path(self.config.boundaries)).reach(f"effect.{ctx.turn}")

    @reward(run="inline")
    def answered(self, episode: Episode) -> float:
        return float(episode.answer == "nothing")

    @metric
    def calls(self, state: Count) -> int:
        return state.calls


class Letters(Environment[Where, Count]):
    """Rewards what any model says about half of the time, for no reason."""

    def task(self, split: str, index: int) -> Task[Place]:
        return Task(data=Place(at={"train": 0, "eval": 1, "test": 2}[split] * 10**6 + index))

    def prompt(self, task: Task[Place]) -> str:
        return f"Say {task.data.at}."

    @reward(run="inline")
    def answered(self, episode: Episode) -> float:
        return float(len(episode.answer) % 2)


class Deadly(Effects):
    """Member 0 of each group ends its process: in the tool of its first turn, or in its reward (`where`)."""

    @tool(run="inline")
    def look(self, at: int, *, state: Count, ctx: Context) -> str:
        """Look at a place."""
        self._end("look", ctx, at == 0)
        state.calls += 1
        return f"nothing at {at}."

    @reward(run="inline", weight=0.5)
    async def alive(self, ctx: Context) -> float:
        self._end("alive", ctx, True)
        return 1.0

    def _end(self, where: str, ctx: Context, now: bool) -> None:
        if now and ctx.member == 0 and where == self.config.where:
            os._exit(ABRUPT)


class Slow(Effects):
    """Its tool holds the event loop, once for each episode."""

    @tool(run="inline")
    def look(self, at: int, *, state: Count, ctx: Context) -> str:
        """Look at a place."""
        with suppress(FileExistsError):
            os.close(os.open(Path(self.config.folder) / f"slept.{ctx.member}", os.O_CREAT | os.O_EXCL))
            time.sleep(2.8)
        return "nothing"


class Placed(Effects):
    """Tools and scorers everywhere: in a process, in an activity, with state and without; a stop condition."""

    @tool
    def slow(self, at: int) -> str:
        """Look from a process."""
        return f"slow sees {at}"

    @tool(run="activity")
    async def far(self, at: int, *, state: Count) -> str:
        """Look from an activity, with state."""
        state.calls += 1
        return f"far sees {at} after {state.calls}"

    @tool(run="inline")
    def broken(self) -> str:
        """Raise."""
        raise RuntimeError("the lens is cracked")

    @reward(weight=0.5)
    def scored_in_a_process(self, episode: Episode) -> float:
        return float(len(episode.outcomes))

    @stop
    def enough(self, state: Count) -> bool:
        return state.calls >= 5


class Far(Effects):
    """The effect is made by a scheduled tool, and what it was worth is scored in a process."""

    @tool(run="activity")
    async def reach(self, at: int, *, state: Count, ctx: Context) -> str:
        """Look from an activity."""
        self._touch(state, ctx)
        return f"{state.calls}: nothing at {at}."

    @reward(weight=0.5)
    def outcomes(self, episode: Episode) -> float:
        return float(len(episode.outcomes))


class Points(Effects):
    """An inline tool and a scheduled one, each with an effect, at whose points a process may be struck; a reward of
    its own for each member. What is said and earned is the same in every run of the same tasks."""

    def task(self, split: str, index: int) -> Task[Place]:
        return super().task(split, self.config.first + index)

    @tool(run="activity")
    async def reach(self, at: int, *, state: Count, ctx: Context) -> str:
        """Look from an activity."""
        self._touch(state, ctx)
        return f"{state.calls}: nothing at {at}."

    @reward(run="activity")
    async def place(self, ctx: Context) -> float:
        return float(ctx.member)

    def _touch(self, state: Count, ctx: Context) -> None:
        super()._touch(state, ctx)
        if self.config.points:
            Armed(Path(self.config.points)).reach("effect")


class Answers(Environment[Where, Count]):
    """The environment answers: three messages, then done, a reward each."""

    def task(self, split: str, index: int) -> Task[Place]:
        return Task(data=Place(at={"train": 0, "eval": 1, "test": 2}[split] * 10**6 + index))

    def prompt(self, task: Task[Place]) -> str:
        return "Say something."

    def step(self, state: Count, message: Message) -> Step:
        state.calls += 1
        return Step(f"You said {message.text}.", reward=0.25, done=state.calls == 3)

    @reward(run="inline")
    def total(self, episode: Episode) -> float:
        return sum(episode.step_rewards)


class Judged(Answers):
    """Scored as a group."""

    @group_reward(min_valid=2)
    async def wins(self, episodes: Sequence[Episode], judge: Judge) -> list[float | None]:
        return [float(position) for position, _ in enumerate(episodes)]


class Waiting(Effects):
    """Its judge gives no value before there is a file `judge` in the folder, which then holds the value."""

    @reward(run="process", weight=2.0)
    def judged(self) -> float | None:
        verdict = Path(self.config.folder) / "judge"
        return float(verdict.read_text()) if verdict.exists() else None


class Second(Effects):
    """Another opinion of what `Effects` asked: a changed reward, new ones, a metric that cannot take every episode."""

    version = "second"

    @reward(run="inline")
    def answered(self, episode: Episode) -> float:
        return 0.5 + float(episode.answer == "nothing")

    @reward(run="process", weight=0.5)
    def early(self, episode: Episode) -> float:
        return 1.0 / len(episode.turns)

    @group_reward(min_valid=2)
    def place(self, episodes: Sequence[Episode]) -> list[float | None]:
        return [float(position) for position, _ in enumerate(episodes)]

    @metric
    def odd(self, ctx: Context) -> float:
        if ctx.member % 2:
            raise ZeroDivisionError("nothing to divide by")
        return 1.0


class Faulty(Answers):
    """Its reward raises."""

    @reward(run="inline")
    def bad(self, episode: Episode) -> float:
        raise ZeroDivisionError("nothing to divide by")
