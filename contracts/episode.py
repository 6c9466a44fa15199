"""An episode as scorers, stop conditions and judges see it: read from rows, immutable.

Invariant: everything a scorer can see is stored, so scoring the same episode again tomorrow sees the same thing.
"""

from typing import Any

from pydantic import Field

from .base import Wire
from .ids import EpisodeKey
from .messages import Message, Role, ToolCall
from .reasons import FinishReason, StopReason


class ToolOutcome(Wire):
    """What one tool call led to. `error` is set where the call failed or was malformed; the model saw `content`."""

    call: ToolCall
    content: str
    error: str | None = None


class Turn(Wire):
    """One model call and what answered it."""

    index: int
    message: Message
    outcomes: tuple[ToolOutcome, ...] = ()
    replies: tuple[Message, ...] = ()
    """Messages the environment's `step` answered with."""
    reward: float | None = None
    """The reward of `step` for this turn, None where there is no step or it gave none."""
    info: dict[str, Any] = Field(default_factory=dict)
    finish: FinishReason = FinishReason.STOP
    sampled_tokens: int = 0
    policy_version: int | None = None
    agent: str | None = None


class Score(Wire):
    """A named part of the reward. `value` None: unscored (a judge failed), which is not 0."""

    name: str
    value: float | None
    weight: float = 1.0
    metric: bool = False
    """Metrics are kept and shown, never part of the reward."""


class Episode(Wire):
    """A finished (or, for stop conditions, running) episode."""

    key: EpisodeKey
    prompt: tuple[Message, ...]
    turns: tuple[Turn, ...] = ()
    stop: StopReason | None = None
    scores: tuple[Score, ...] = ()
    """Filled for group rewards: the members' own scores."""
    reward: float | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation in order: prompt, answers, tool results, environment's replies."""
        out = list(self.prompt)
        for turn in self.turns:
            out.append(turn.message)
            out.extend(
                Message(role=Role.TOOL, content=o.content, tool_call_id=o.call.id, name=o.call.name or None)
                for o in turn.outcomes
            )
            out.extend(turn.replies)
        return tuple(out)

    @property
    def answer(self) -> str:
        """Text of the last message of the model that calls no tool; empty if there is none."""
        for turn in reversed(self.turns):
            if not turn.message.tool_calls:
                return turn.message.text.strip()
        return ""

    @property
    def step_rewards(self) -> tuple[float, ...]:
        """Rewards the environment's `step` gave, in turn order."""
        return tuple(turn.reward for turn in self.turns if turn.reward is not None)

    @property
    def outcomes(self) -> tuple[ToolOutcome, ...]:
        return tuple(outcome for turn in self.turns for outcome in turn.outcomes)


def total_reward(scores: tuple[Score, ...]) -> float | None:
    """Weighted sum of the reward parts; None as soon as one part is unscored, or when there is none."""
    parts = [score for score in scores if not score.metric]
    if not parts or any(score.value is None for score in parts):
        return None
    return sum(score.weight * score.value for score in parts if score.value is not None)
