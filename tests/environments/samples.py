"""Environments that misbehave in one way each, loaded by file as an author's would be."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from atropos import (
    Context,
    EnvConfig,
    Environment,
    Episode,
    Message,
    State,
    Step,
    Task,
    group_reward,
    reward,
    stop,
    tool,
    user,
)
from atropos import step as placed_step
from atropos.contracts.context import Judge
from pydantic import BaseModel


class Word(BaseModel):
    word: str


class Kept(State):
    seen: list[str] = []


class Config(EnvConfig):
    word: str = "hello"


class Pooled(Environment[Config, Kept]):
    """Everything that runs in the process pool."""

    def startup(self) -> None:
        self.started_in = os.getpid()

    def task(self, split: str, index: int) -> Task[Word]:
        return Task(data=Word(word=f"{self.config.word} {split} {index}"))

    def prompt(self, task: Task[Word]) -> list[Message]:
        return [user(task.data.word)]

    @tool
    def pid(self) -> dict[str, int]:
        """Where this runs."""
        return {"pid": os.getpid(), "started": self.started_in}

    @tool
    def remember(self, word: str, *, state: Kept, task: Task[Word], ctx: Context) -> str:
        """Keep a word."""
        print("author's print on standard output")
        state.seen.append(word)
        return f"{task.data.word}/{ctx.key}"

    @tool
    def fail(self) -> str:
        """Raise."""
        raise ValueError("that went wrong")

    @tool(timeout=0.5)
    def hang(self, marker: str) -> str:
        """Start a child and never return."""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(marker).write_text(f"{os.getpid()} {child.pid}")
        while True:
            time.sleep(1)

    @tool(timeout=0.5)
    def hold(self) -> str:
        """Hold the interpreter in a regular expression that does not end."""
        return str(re.match(r"(a+)+$", "a" * 64 + "b"))

    @tool
    def die(self, marker: str) -> str:
        """End the process at each call."""
        with Path(marker).open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    @tool(run="process")
    async def slowly(self, seconds: float) -> str:
        """Wait on a loop."""
        await asyncio.sleep(seconds)
        return "waited"

    @reward(timeout=5)
    def alarmed(self, episode: Episode) -> float:
        """Uses SIGALRM, which works in a main thread only."""
        assert threading.current_thread() is threading.main_thread()

        def ring(number: int, frame: object) -> None:
            raise InterruptedError

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            while True:
                time.sleep(1)
        except InterruptedError:
            return float(len(episode.turns))
        finally:
            signal.signal(signal.SIGALRM, before)

    @reward(timeout=0.5)
    def endless(self) -> float:
        """Never returns."""
        while True:
            time.sleep(1)

    @placed_step(run="process")
    def step(self, state: Kept, message: Message) -> Step:
        state.seen.append(message.text)
        return Step("go on", reward=0.5, done=len(state.seen) > 1, info={"n": len(state.seen)})

    @group_reward(min_valid=2)
    def ranks(self, episodes: list[Episode]) -> list[float | None]:
        return [float(episode.key.member) for episode in episodes]


class Aside(Pooled):
    """What runs inline, and can run in the pool all the same."""

    @tool(run="inline")
    async def ask(self, *, state: Kept, judge: Judge) -> dict[str, str | int]:
        """Ask the judge twice, side by side."""
        answers = await asyncio.gather(*(judge.ask([user(word)], max_tokens=7) for word in ("a", "b")))
        state.seen.extend(answers)
        return {"pid": os.getpid(), "said": " ".join(answers)}

    @stop
    def full(self, state: Kept) -> bool:
        return len(state.seen) > 1


class Broken(Environment):
    """Its prompt raises."""

    def task(self, split: str, index: int) -> Task[Word]:
        return Task(data=Word(word="x"))

    def prompt(self, task: Task[Word]) -> list[Message]:
        return [user(os.environ["MISSING FROM HERE"])]  # the line that a fault names
