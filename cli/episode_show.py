"""An episode on the page: the conversation, how its tokens were sampled, and what it was worth.

Invariant: what a model, tool or environment said is shown as text and never interpreted (`contracts.text`). Tokens are
the stored ids; their text is the model's own decoding where its folder is here, and the ids themselves where it is not.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from ..contracts.episode import Score, ToolOutcome
from ..contracts.messages import Message, Role
from ..contracts.records import TurnRecord
from ..contracts.text import one_line, printable
from ..db.shown import Shown, content_text, mean_logprob, turn_facts
from ..inference.words import Decode, decoder

_ROLES: Final = {Role.SYSTEM: "dim", Role.USER: "cyan", Role.ASSISTANT: "green", Role.TOOL: "magenta"}
_WIDTH: Final = 11
"""Columns of the speaker's name."""
_SHADES: Final = ((0.9, "green"), (0.5, "cyan"), (0.1, "yellow"), (0.0, "red"))
"""From this probability on, a sampled token has this colour."""
_UNTRAINED: Final = "dim strike"
_GIVEN: Final = "dim"


def render_episode(shown: Shown, link: str | None, console: Console, *, tokens: bool = False) -> None:
    """Print an episode. `link`: its page in Temporal's UI, where that is known."""
    facts, episode = shown.facts, shown.episode
    kind = f"evaluation {facts.evaluation}" if facts.evaluation is not None else facts.kind
    console.print(Text(facts.key.workflow_id, style="bold"))
    _note(console, f"{facts.environment} (version {facts.environment_version}), task {facts.task_key[:12]}, {kind}")
    decode = decoder(shown.run.config.model) if tokens else None
    for message in facts.prompt:
        _say(console, message.role, content_text(message))
    for record, turn in zip(facts.turns, episode.turns, strict=True):
        console.print()
        _note(console, f"turn {record.turn}: {turn_facts(record)}")
        if decode is not None:
            _tokens(console, record, decode)
        _message(console, turn.message)
        for outcome in turn.outcomes:
            _outcome(console, outcome)
        for reply in turn.replies:
            _say(console, reply.role, content_text(reply))
        if turn.reward is not None:
            _note(console, f"step reward {turn.reward:g}")
    console.print()
    _ending(console, shown)
    if decode is not None:
        _legend(console)
    if link is not None:
        _note(console, link)


def _message(console: Console, message: Message) -> None:
    if message.reasoning:
        _say(console, message.role, message.reasoning, name="thinks", style="dim")
    if message.text or not message.tool_calls:
        _say(console, message.role, content_text(message))
    for call in message.tool_calls:
        arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        _say(console, message.role, call.raw if call.raw is not None else f"{call.name}({arguments})", name="calls")
        if call.problem is not None:
            _say(console, message.role, call.problem, name="problem", style="red")


def _outcome(console: Console, outcome: ToolOutcome) -> None:
    _say(console, Role.TOOL, outcome.content, style="red" if outcome.error is not None else None)
    if outcome.error is not None and outcome.error not in outcome.content:
        _say(console, Role.TOOL, outcome.error, name="error", style="red")


def _ending(console: Console, shown: Shown) -> None:
    facts = shown.facts
    sampled = sum(turn.tokens for turn in facts.turns)
    if facts.stop is None:
        console.print(Text(f"It is running: {len(facts.turns)} turns, {sampled} sampled tokens so far."))
    else:
        console.print(Text(f"Stopped: {facts.stop} after {len(facts.turns)} turns, {sampled} sampled tokens."))
    if facts.failure is not None:
        console.print(Text(f"Failed: {facts.failure}, {one_line(shown.reason or 'no reason was given')}", style="red"))
    for score in shown.scores:
        console.print(Text(f"  {_valued(score)}"))
    if facts.stop is not None:
        reward = "none (unscored)" if facts.reward is None else f"{facts.reward:g}"
        console.print(Text(f"Reward: {reward}", style="bold"))
    for version, score in shown.beside:
        console.print(Text(f"  beside it, by version {one_line(version)}: {_valued(score)}", style="dim"))


def _valued(score: Score) -> str:
    value = "unscored" if score.value is None else f"{score.value:g}"
    return f"{one_line(score.name)}: {value} ({'metric' if score.metric else f'weight {score.weight:g}'})"


def _tokens(console: Console, record: TurnRecord, decode: Decode) -> None:
    """What a turn added to the stream: prompt tokens, then sampled ones by their probability."""
    text = Text()
    for token in record.prompt_delta:
        text.append(_printed(decode(token)), style=_GIVEN)
    for token, logprob, trains in zip(record.sampled, record.logprobs, record.mask, strict=True):
        text.append(_printed(decode(token)), style=_shade(logprob) if trains else _UNTRAINED)
    console.print(text, soft_wrap=True)


def _printed(token: str) -> str:
    return one_line(token).replace("↵", "↵\n")


def _shade(logprob: float) -> str:
    probability = math.exp(min(0.0, logprob))
    return next(style for least, style in _SHADES if probability >= least)


def _legend(console: Console) -> None:
    parts: list[Any] = ["Tokens: ", ("given", _GIVEN), ", sampled with probability "]
    for least, style in _SHADES:
        parts += [(f"≥ {least:g}" if least else "below", style), ", "]
    console.print(Text.assemble(*parts, ("not trained on", _UNTRAINED)), soft_wrap=True)


def _say(console: Console, role: Role, text: str, *, name: str | None = None, style: str | None = None) -> None:
    label = f"{name or role.value:>{_WIDTH}}  "
    body = printable(text).replace("\n", "\n" + " " * len(label))
    console.print(Text.assemble((label, "bold"), (body, style or _ROLES[role])), soft_wrap=True)


def _note(console: Console, text: str) -> None:
    console.print(Text(f"{'':>{_WIDTH}}  {one_line(text)}", style="dim"), soft_wrap=True)


def facts_of(shown: Shown, *, tokens: bool = False) -> dict[str, Any]:
    """The episode for programs; ids, logprobs and masks with `tokens`."""
    facts, episode = shown.facts, shown.episode
    return {
        "id": facts.key.workflow_id,
        "run": facts.key.run_id,
        "kind": facts.kind,
        "evaluation": facts.evaluation,
        "environment": facts.environment,
        "environment_version": facts.environment_version,
        "task": {"key": facts.task_key, "data": facts.task_data, "info": facts.task_info},
        "state": facts.status,
        "stop": facts.stop,
        "failure": facts.failure,
        "reason": shown.reason,
        "reward": facts.reward,
        "scores": [score.model_dump(mode="json") for score in shown.scores],
        "other_scores": [{"version": version, **score.model_dump(mode="json")} for version, score in shown.beside],
        "prompt": _plain(facts.prompt),
        "turns": [
            {
                "turn": record.turn,
                "segment": record.segment,
                "message": record.message.model_dump(mode="json"),
                "outcomes": [outcome.model_dump(mode="json") for outcome in turn.outcomes],
                "replies": _plain(turn.replies),
                "reward": turn.reward,
                "info": turn.info,
                "finish": record.finish,
                "sampled_tokens": record.tokens,
                "mean_logprob": mean_logprob(record),
                "spans": [list(astuple(span)) for span in record.spans],
                "temperature": record.temperature,
                "engine": record.engine_id,
                "incarnation": record.incarnation,
                **(_arrays(record) if tokens else {}),
            }
            for record, turn in zip(facts.turns, episode.turns, strict=True)
        ],
    }


def _arrays(record: TurnRecord) -> dict[str, Any]:
    return {
        "prompt_delta": record.prompt_delta,
        "sampled": record.sampled,
        "logprobs": record.logprobs,
        "mask": record.mask,
    }


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.model_dump(mode="json") for message in messages]
