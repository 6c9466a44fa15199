"""Showing an episode of `atropos env try` in the terminal.

Invariant: what a model, a tool or an environment said is printed as text and never interpreted: not as rich markup, and
with control characters made visible, so that no output can colour, erase or retitle the reader's terminal.
"""

import json
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..contracts.activities import ScorerPlan
from ..contracts.episode import Episode, Score, ToolOutcome, Turn
from ..contracts.messages import ImagePart, Message, Role
from ..contracts.reasons import FinishReason
from ..contracts.text import printable
from ..environments.play import Reply, Watcher
from ..environments.spec import EnvironmentSpec

STYLES: Final = {Role.SYSTEM: "dim", Role.USER: "cyan", Role.ASSISTANT: "green", Role.TOOL: "magenta"}


class Printer(Watcher):
    """Prints a conversation as it happens."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def opened(self, prompt: Sequence[Message]) -> None:
        for message in prompt:
            self._line(message.role, content_of(message))

    def said(self, turn: int, reply: Reply) -> None:
        message = reply.message
        if message.reasoning:
            self._line(Role.ASSISTANT, message.reasoning, "thinks", style="dim")
        if message.text or not message.tool_calls:
            self._line(Role.ASSISTANT, content_of(message))
        for call in message.tool_calls:
            shown = call.raw if call.raw is not None else json.dumps(call.arguments, ensure_ascii=False)
            self._line(Role.ASSISTANT, f"{call.name} {shown}", "calls")
        notes = []
        if reply.prompt_tokens is not None or reply.sampled_tokens is not None:
            notes.append(f"turn {turn}: {reply.prompt_tokens} prompt + {reply.sampled_tokens} sampled tokens")
        if reply.finish is FinishReason.LENGTH:
            notes.append("cut at the token limit")
        if notes:
            self.console.print(Text(f"{'':>10}  {', '.join(notes)}", style="dim"))

    def called(self, outcome: ToolOutcome) -> None:
        self._line(Role.TOOL, outcome.content, style="red" if outcome.error is not None else None)

    def answered(self, turn: Turn) -> None:
        for message in turn.replies:
            self._line(message.role, content_of(message))
        if turn.reward is not None:
            self.console.print(Text(f"{'':>10}  step reward {turn.reward:g}", style="dim"))

    def ended(self, episode: Episode, condition: str | None) -> None:
        stop = episode.stop.value if episode.stop is not None else "unknown"
        why = f"{stop} ({condition})" if condition else stop
        tokens = sum(turn.sampled_tokens for turn in episode.turns)
        counted = f", {tokens} sampled tokens" if tokens else ""
        self.console.print()
        self.console.print(Text(f"stopped: {why} after {len(episode.turns)} turns{counted}", style="bold"))
        if episode.scores:
            self.console.print(score_table(episode.scores))
        reward = "unscored" if episode.reward is None else f"{episode.reward:g}"
        self.console.print(Text(f"reward: {reward}", style="bold"))

    def _line(self, role: Role, text: str, verb: str | None = None, *, style: str | None = None) -> None:
        label = f"{verb or role.value:>10}  "
        body = printable(text).replace("\n", "\n" + " " * len(label))
        self.console.print(Text.assemble((label, "bold"), (body, style or STYLES[role])), soft_wrap=True)


def content_of(message: Message) -> str:
    """Text of a message; images by their address."""
    if isinstance(message.content, str):
        return message.content
    return "".join(f"[image {part.url[:60]}]" if isinstance(part, ImagePart) else part.text for part in message.content)


def score_table(scores: Sequence[Score]) -> Table:
    table = Table("score", "value", "weight", box=None)
    for score in scores:
        value = "unscored" if score.value is None else f"{score.value:g}"
        table.add_row(Text(score.name), value, "metric" if score.metric else f"{score.weight:g}")
    return table


def spec_table(spec: EnvironmentSpec) -> Table:
    """What an environment has and where each part runs."""
    table = Table("part", "name", "runs", "timeout", box=None)
    rows: list[tuple[str, str, ScorerPlan | None]] = []
    rows += [("tool" + (" (state)" if tool.serial else ""), tool.spec.name, tool.plan) for tool in spec.tools]
    rows += [("step", "step", spec.step)] if spec.step else []
    rows += [("metric" if s.metric else f"reward * {s.weight:g}", s.name, s.plan) for s in spec.scorers]
    rows += [(f"group reward * {s.weight:g}", s.name, s.plan) for s in spec.group_scorers]
    rows += [("stop condition", name, None) for name in spec.stops]
    for part, name, plan in rows:
        run = "inline" if plan is None else plan.run.value + (f" on {plan.queue}" if plan.queue else "")
        table.add_row(part, Text(name), run, "" if plan is None else f"{plan.timeout_s:g} s")
    return table
