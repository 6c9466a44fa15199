"""What a model call is given: the prompt's ids, or the conversation so far.

Invariant: a prompt continues its segment to the letter, ids that were sent and sampled before it, or opens a new one;
whatever answered a turn is told in the order of its calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..contracts.flow import Spent, completion_budget
from ..contracts.messages import Message, ToolSpec, preview, tool_result
from ..contracts.records import STEP_INDEX, EpisodeFacts, TurnRecord
from ..contracts.runfile import RunConfig
from ..environments.loaded import LoadedEnvironment
from ..inference.tokens import TokenRenderer

_UNLIMITED: Final = 2**31


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a turn sends: the whole segment so far, and which part of it is new."""

    ids: list[int]
    delta: list[int]
    segment: int
    opens: bool


def token_budget(
    config: RunConfig, facts: EpisodeFacts, environment: LoadedEnvironment, prompt: int, known_limit: int | None = None
) -> int:
    """Tokens the next completion may have; none of them: it would not fit. `known_limit`: the model's own context."""
    limits = environment.spec.limits.tightened(config.environment(facts.environment).limits)
    spent = Spent(turns=len(facts.turns), tokens=sum(turn.tokens for turn in facts.turns))
    context = config.model.context or known_limit or _UNLIMITED
    return completion_budget(limits, spent, config.sampling_for(facts.evaluation).max_tokens, prompt, context)


def build_prompt(facts: EpisodeFacts, renderer: TokenRenderer, tools: Sequence[ToolSpec]) -> Prompt:
    """The next prompt: the segment's exact ids and what answers add, or a new segment where that cannot be."""
    if not facts.turns:
        ids = renderer.open(facts.prompt, tools)
        return Prompt(ids, ids, segment=0, opens=True)
    last = facts.turns[-1]
    previous = _segment_prompt(facts.turns)
    delta = renderer.extend(previous, last.sampled, answers(facts, last.turn), tools)
    if delta is not None:
        return Prompt(previous + last.sampled + delta, delta, last.segment, opens=False)
    conversation = list(facts.prompt)
    for turn in facts.turns:
        conversation += [turn.message, *answers(facts, turn.turn)]
    ids = renderer.open(conversation, tools)
    return Prompt(ids, ids, last.segment + 1, opens=True)


def _segment_prompt(turns: Sequence[TurnRecord]) -> list[int]:
    """The prompt that the last turn was sampled from: its segment up to its own sampled ids."""
    last = turns[-1]
    ids: list[int] = []
    for turn in turns:
        if turn.segment == last.segment:
            ids += turn.prompt_delta
            if turn is not last:
                ids += turn.sampled
    return ids


def answers(facts: EpisodeFacts, turn: int) -> list[Message]:
    """What tools and `step` answered to a turn, in order."""
    messages: list[Message] = []
    calls = sorted((call for call in facts.calls if call.turn == turn), key=lambda call: call.index)
    for record in calls:
        if record.index != STEP_INDEX and record.call is not None:
            messages.append(tool_result(record.content, record.call))
    for record in calls:
        messages.extend(record.replies)
    return messages


def spoken(message: Message) -> str:
    """A message as one line: its text, then its calls."""
    calls = [
        f"{call.name or '?'}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"
        for call in message.tool_calls
    ]
    return preview(" ".join([message.text, *calls]).strip() or "(nothing)")
