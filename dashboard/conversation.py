"""An episode as a page shows it: who said what, and each token with its colours.

Invariant: texts are taken from the stored display copy as they are; making them harmless is the template's work. What
is left out because it is long is counted and said.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..contracts.episode import ToolOutcome, Turn
from ..contracts.messages import Message, Role
from ..contracts.records import TurnRecord
from ..db.shown import Shown, content_text, turn_facts
from ..inference.words import Decode

MOST_TOKENS: Final = 3000
"""Tokens of one turn that a page shows."""
MOST_TOKENS_IN_ALL: Final = 20_000
"""Sampled tokens of all turns that a page shows: each is an element of its own."""
MOST_TURNS: Final = 200
_SHADES: Final = (0.9, 0.5, 0.1)
"""From these probabilities on a sampled token is likely, fair, unlikely; below it is rare."""
_COLOURS: Final = 8
"""Colours of versions; they come round again."""


@dataclass(frozen=True)
class Said:
    """One thing that somebody said. `kind` is a class of the style sheet and never text of others."""

    kind: str
    who: str
    text: str


@dataclass(frozen=True)
class Token:
    """A sampled token. `style`: classes of the style sheet: how likely, trained or not, which version."""

    text: str
    style: str
    title: str


@dataclass(frozen=True)
class TurnShown:
    number: int
    facts: str
    given: str
    """The tokens that were appended before sampling, as text."""
    given_count: int
    tokens: tuple[Token, ...]
    left_out: int
    """Tokens beyond the most that a page shows."""
    said: tuple[Said, ...]
    reward: float | None


@dataclass(frozen=True)
class Conversation:
    prompt: tuple[Said, ...]
    turns: tuple[TurnShown, ...]
    left_out: int
    versions: tuple[tuple[int, int], ...]
    """Each version that sampled a token, with its colour."""
    sampled: int


def conversation_of(shown: Shown, decode: Decode) -> Conversation:
    """The page's view of an episode."""
    facts = shown.facts
    pairs = list(zip(facts.turns, shown.episode.turns, strict=True))[:MOST_TURNS]
    versions = sorted({span.version for record in facts.turns for span in record.spans})
    turns: list[TurnShown] = []
    room = MOST_TOKENS_IN_ALL
    for record, turn in pairs:
        turns.append(_turn(record, turn, decode, min(MOST_TOKENS, room)))
        room -= len(turns[-1].tokens)
    return Conversation(
        prompt=tuple(said for message in facts.prompt for said in _message(message)),
        turns=tuple(turns),
        left_out=max(0, len(facts.turns) - MOST_TURNS),
        versions=tuple((version, _colour(version)) for version in versions),
        sampled=sum(record.tokens for record in facts.turns),
    )


def answer_of(message: Message) -> tuple[Said, ...]:
    """What a message says and calls, without what answered it."""
    return tuple(_message(message))


def _turn(record: TurnRecord, turn: Turn, decode: Decode, most: int) -> TurnShown:
    said = [*_message(turn.message)]
    for outcome in turn.outcomes:
        said += _outcome(outcome)
    for reply in turn.replies:
        said += _message(reply)
    given = record.prompt_delta[:MOST_TOKENS]
    tokens = tuple(_tokens(record, decode, most))
    return TurnShown(
        number=record.turn,
        facts=turn_facts(record),
        given="".join(map(decode, given)),
        given_count=len(record.prompt_delta),
        tokens=tokens,
        left_out=len(record.sampled) - len(tokens) + len(record.prompt_delta) - len(given),
        said=tuple(said),
        reward=turn.reward,
    )


def _message(message: Message) -> Iterator[Said]:
    role = message.role.value
    who = role if message.agent is None else f"{role} {message.agent}"
    if message.reasoning:
        yield Said("thinks", f"{who} thinks", message.reasoning)
    text = content_text(message)
    if text or not (message.tool_calls or message.reasoning):
        yield Said(role, who, text)
    for call in message.tool_calls:
        raw = call.raw if call.raw is not None else f"{call.name}({_arguments(call.arguments)})"
        yield Said("calls", f"{who} calls", raw)
        if call.problem is not None:
            yield Said("problem", "problem", call.problem)


def _arguments(arguments: dict[str, object]) -> str:
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def _outcome(outcome: ToolOutcome) -> Iterator[Said]:
    who = f"{Role.TOOL.value} {outcome.call.name}".rstrip()
    yield Said("tool" if outcome.error is None else "tool problem", who, outcome.content)
    if outcome.error is not None and outcome.error not in outcome.content:
        yield Said("problem", "error", outcome.error)


def _tokens(record: TurnRecord, decode: Decode, most: int) -> Iterator[Token]:
    versions = _versions(record)
    drawn = zip(record.sampled, record.logprobs, record.mask, versions, strict=True)
    for _, (token, logprob, trains, version) in zip(range(most), drawn, strict=False):
        style = f"p{shade(logprob)} m{int(bool(trains))} v{_colour(version)}"
        yield Token(decode(token), style, f"{token}: {logprob:.3f}, version {version}")


def _versions(record: TurnRecord) -> Sequence[int]:
    return [span.version for span in record.spans for _ in range(span.start, span.end)]


def shade(logprob: float) -> int:
    """0 for a likely token, 3 for a rare one."""
    probability = math.exp(min(0.0, logprob))
    return next((shade for shade, least in enumerate(_SHADES) if probability >= least), len(_SHADES))


def _colour(version: int) -> int:
    return version % _COLOURS
