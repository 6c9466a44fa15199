"""`atropos run check`: everything that registering a run would refuse, found before anything is started.

Invariant: what passes here passes on a worker with the same code and files: environments load with their arguments,
splits share no task and are large enough, judges are there where they are asked for, and messages become tokens.
Prompts shown are those of the first tasks that the run will draw.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import Console
from rich.text import Text

from ..contracts.admission import task_index
from ..contracts.context import Context
from ..contracts.messages import Message
from ..contracts.runfile import EnvironmentConfig, RunConfig, RunFileError
from ..contracts.tasks import Task
from ..contracts.text import one_line, printable
from ..environments.faults import EnvironmentFault
from ..environments.loaded import LoadedEnvironment
from ..environments.registry import load
from ..environments.splits import check_disjoint, require_size
from ..inference.engines import why_not_sampled
from ..inference.tiny_policy import demonstration
from ..inference.tokens import TokenRenderer, TokensError, load_renderer

SHOWN_TASKS: Final = 3
_SHOWN_TOKENS: Final = 400
"""Tokens of one prompt that are shown: enough for its shape, where a long system prompt would fill pages."""
_PROMPT: Final = ("dim", "dim underline")
"""Styles of neighbouring tokens, so that their borders can be seen."""
_TRAINS: Final = ("bold green", "bold green underline")


@dataclass(frozen=True)
class ShownPrompt:
    """The beginning of one episode as tokens; `mask` 1 where the model speaks, which is what trains.

    For engines that take messages there are no tokens, only `said`.
    """

    task: Task[Any]
    ids: list[int]
    mask: list[int]
    demonstrated: bool
    """The environment's own demonstration follows the prompt."""
    said: tuple[Message, ...] = ()


async def check_run(config: RunConfig, base: Path) -> dict[str, list[ShownPrompt]]:
    """Check everything; returns the first prompts by environment label.

    Raises RunFileError, EnvironmentProblem, TokensError: one sentence each.
    """
    problems = why_not_sampled(config)
    if problems:
        raise RunFileError(problems)
    renderer = await asyncio.to_thread(load_renderer, config.model) if config.tokens else None
    shown = {}
    for chosen in config.environments:
        environment = await _checked(config, chosen, base)
        try:
            shown[chosen.label] = [prompt async for prompt in _prompts(config, environment, renderer)]
        finally:
            await environment.close()
    return shown


async def _checked(config: RunConfig, chosen: EnvironmentConfig, base: Path) -> LoadedEnvironment:
    environment = load(chosen.id, dict(chosen.args), base)
    environment.check_judges(config.judges)
    await check_disjoint(environment)
    await require_size(environment, "train", 1)
    for wanted in config.eval.sets:
        if config.environment(wanted.id) is chosen:
            await require_size(environment, wanted.split, wanted.tasks)
    return environment


async def _prompts(
    config: RunConfig, environment: LoadedEnvironment, renderer: TokenRenderer | None
) -> AsyncIterator[ShownPrompt]:
    size = await environment.size("train")
    for draw in range(min(SHOWN_TASKS, size or SHOWN_TASKS)):
        task = await environment.make_task("train", task_index(draw, size, config.seed))
        context = Context(f"run/{config.name}", task.key, 0, 0, "start")
        prompt, state = await environment.start(task, context)
        tools = environment.spec.tool_specs()
        try:
            ids = [] if renderer is None else renderer.open(prompt, tools)
        finally:
            if environment.spec.has_cleanup:
                await environment.cleanup(task, state, context)
        shown = ShownPrompt(task, ids, [0] * len(ids), demonstrated=False, said=tuple(prompt))
        if renderer is not None and environment.spec.has_demonstrations:
            # A run needs no demonstrations: one that cannot be shown is no reason to refuse it.
            with contextlib.suppress(EnvironmentFault, TokensError):
                answers = environment.demonstrate(task, random.Random(f"{config.seed}/{draw}"))
                ids, mask = demonstration(renderer, prompt, answers, tools)
                shown = ShownPrompt(task, ids, mask, demonstrated=True)
        yield shown


def show_check(config: RunConfig, shown: dict[str, list[ShownPrompt]], console: Console) -> None:
    """The run as it will be, and its first prompts with what trains in colour."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    console.print(Text(printable(text).rstrip()), soft_wrap=True)
    renderer = load_renderer(config.model) if config.tokens else None
    for label, prompts in shown.items():
        for number, prompt in enumerate(prompts):
            console.print()
            title = f"{label}, task {number + 1} of {len(prompts)} ({prompt.task.key[:12]}): {_counts(prompt)}"
            console.print(Text(title, style="bold"), soft_wrap=True)
            console.print(_messages(prompt) if renderer is None else _tokens(prompt, renderer), soft_wrap=True)
    console.print()
    if renderer is not None:
        console.print(Text.assemble("Colours: ", ("prompt and answers", "dim"), ", ", ("trains", _TRAINS[0])))
    for sentence in _summary(config):
        console.print(Text(sentence), soft_wrap=True)


def _counts(prompt: ShownPrompt) -> str:
    trains = sum(prompt.mask)
    if not prompt.ids:
        return f"{len(prompt.said)} messages; what the model says after them is kept, and trains nothing"
    if prompt.demonstrated:
        return f"{len(prompt.ids)} tokens of a demonstrated episode, {trains} of them train"
    return f"{len(prompt.ids)} tokens of prompt; what the model says after them trains"


def _messages(prompt: ShownPrompt) -> Text:
    lines = [f"{message.role}: {one_line(message.text)}\n" for message in prompt.said]
    return Text("".join(lines), style=_PROMPT[0]).append("▸ the model speaks", style=_TRAINS[0])


def _tokens(prompt: ShownPrompt, renderer: TokenRenderer) -> Text:
    text = Text()
    for index, token in enumerate(prompt.ids[:_SHOWN_TOKENS]):
        styles = _TRAINS if prompt.mask[index] else _PROMPT
        text.append(_token_text(renderer.decode([token])), style=styles[index % 2])
    if len(prompt.ids) > _SHOWN_TOKENS:
        text.append(f" … {len(prompt.ids) - _SHOWN_TOKENS} more tokens")
    if not prompt.demonstrated:
        text.append("▸ the model speaks", style=_TRAINS[0])
    return text


def _token_text(text: str) -> str:
    """A token on the page: a newline is shown as such and breaks the line."""
    return one_line(text).replace("↵", "↵\n")


def _summary(config: RunConfig) -> Iterator[str]:
    budget = config.budget
    limits = [
        f"{budget.groups} groups" if budget.groups is not None else "",
        f"{budget.sampled_tokens:.3g} sampled tokens" if budget.sampled_tokens is not None else "",
        f"{budget.hours:g} hours" if budget.hours is not None else "",
    ]
    yield f"The run ends after {' or '.join(limit for limit in limits if limit)}; {config.concurrency} groups at once."
    total = sum(environment.weight for environment in config.environments)
    for environment in config.environments:
        share = environment.weight / total
        yield f"  {environment.label}: {share:.0%} of the groups, {environment.group_size} episodes each"
    for when in ("start", "end"):
        for name, chosen in config.evaluations(when).items():
            yield f"  evaluation {name}: {chosen.tasks} tasks, samples of each: {chosen.samples}"
    yield "Nothing was started. Engines were not asked; the run waits for them, with a reason that `run why` shows."
