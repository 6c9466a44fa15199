"""Randomness and idempotency keys of author code, and the judge it may ask.

Invariant: both derive from (run, task, member, turn, call) and never from an attempt, so a retried tool draws the
same numbers and presents the same key. An effect happens once across crashes only where its receiver honours the key.
"""

import hashlib
import random
from dataclasses import dataclass
from typing import Protocol

from .messages import Message


@dataclass(frozen=True)
class Context:
    """What a function receives as `ctx`."""

    run_id: str
    task_key: str
    member: int
    turn: int
    call: str = ""
    """Which call inside the turn: its index, `step`, or a scorer's name."""

    @property
    def key(self) -> str:
        """Idempotency key for side effects: 32 hex digits."""
        parts = (self.run_id, self.task_key, str(self.member), str(self.turn), self.call)
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def rng(self) -> random.Random:
        """A fresh generator, the same at every try."""
        return random.Random(int(self.key, 16))


class JudgeUnavailable(RuntimeError):
    """The judge did not answer for good: the part it scores is unscored, never 0."""


class Judge(Protocol):
    """A language model that scores; reached through what `contracts` promises, wherever it runs."""

    async def ask(self, messages: list[Message], *, model: str = "default", max_tokens: int = 1024) -> str:
        """The judge's answer as text. `model` names an entry of the run's `judges`. Raises JudgeUnavailable."""
        ...
