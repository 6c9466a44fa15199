"""An environment that answers: guess a number. Try it with `atropos env try examples/guess.py`.

The game object cannot be stored, so the state is its seed and the actions taken so far, and each step rebuilds it.
"""

import random
import re

from atropos import (
    EnvConfig,
    Environment,
    Episode,
    Limits,
    Message,
    Replay,
    Step,
    Task,
    assistant,
    metric,
    reward,
    user,
)
from pydantic import BaseModel, Field


class Game:
    """A simulator that knows a number and says whether a guess is too low or too high."""

    def __init__(self, seed: int, highest: int) -> None:
        self.highest = highest
        self._secret = random.Random(seed).randint(1, highest)
        self.won = False

    def guess(self, number: int) -> str:
        self.won = number == self._secret
        return "correct" if self.won else "higher" if number < self._secret else "lower"


class GuessConfig(EnvConfig):
    highest: int = Field(default=16, ge=2)


class Seed(BaseModel):
    seed: int


class Guess(Environment[GuessConfig, Replay]):
    """Guess a number from hints."""

    limits = Limits(turns=8)

    def task(self, split: str, index: int) -> Task[Seed]:
        return Task(data=Seed(seed=random.Random(f"{split} {index}").getrandbits(32)))

    def prompt(self, task: Task[Seed]) -> list[Message]:
        return [user(f"I think of a number from 1 to {self.config.highest}. Guess it; answer with the number alone.")]

    def step(self, state: Replay, message: Message) -> Step:
        found = re.search(r"[0-9]{1,9}", message.text)
        if found is None:
            return Step("Say a number.", reward=0.0)
        game = state.rebuild(self._start, Game.guess)
        number = int(found[0])
        hint = game.guess(number)
        state.record(number)
        return Step(hint, reward=1.0 if game.won else 0.0, done=game.won)

    def _start(self, seed: int) -> Game:
        return Game(seed, self.config.highest)

    @reward(run="inline")
    def solved(self, episode: Episode) -> float:
        return sum(episode.step_rewards)

    @metric
    def guesses(self, state: Replay) -> int:
        return len(state.actions)

    def demonstrate(self, task: Task[Seed], rng: random.Random) -> list[Message]:
        """Halve what is left each time."""
        game, low, high, said = self._start(task.data.seed), 1, self.config.highest, list[Message]()
        while not game.won:
            number = (low + high) // 2
            hint = game.guess(number)
            said += [assistant(str(number)), user(hint)]
            low, high = (number + 1, high) if hint == "higher" else (low, number - 1)
        return said
