"""Watching a run from outside until it ends: a live line at a terminal, a plain one every few seconds elsewhere.

Invariant: watching only reads rows; a store that is away for a while is shown as such and watching goes on. Whether the
run has ended is Temporal's word, since a row may have ended before its workflow has.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from ..contracts.runfile import RunConfig
from ..contracts.states import EpisodeState, RunState
from ..contracts.text import one_line
from ..settings import Settings
from .access import opened_store
from .run_show import episodes_in, wall_seconds
from .run_start import run_ends
from .stack.addresses import resolve_addresses

if TYPE_CHECKING:
    from temporalio.client import Client

    from ..db.batches import StepRow
    from ..db.evaluations import EvaluationRow
    from ..db.store import Store
    from ..db.summary import RunSummary

_LIVE_S: Final = 1.0
_PLAIN_S: Final = 5.0
_MEASURED: Final = (("reward", "reward_mean"), ("loss", "loss"))


@dataclass(frozen=True)
class Seen:
    """A run at one moment."""

    summary: "RunSummary"
    step: "StepRow | None"
    """The newest train step; None: there is none."""
    evaluation: "EvaluationRow | None" = None
    """The newest evaluation that has ended with a reward; None: there is none."""


class Display(Protocol):
    """Where progress goes; `every_s` is how often it wants to be told."""

    every_s: float

    def show(self, seen: Seen) -> None: ...
    def away(self, reason: str) -> None: ...


async def watch_run(settings: Settings, client: "Client", run_id: str) -> RunState:
    """Wait for the end of a run, with progress on stderr where a store is known. Raises CommandError if it failed."""
    if resolve_addresses(settings).database.value is None:
        return await run_ends(client, run_id)
    async with opened_store(settings) as store:
        return await follow(store, client, run_id, Console(stderr=True))


async def follow(store: "Store", client: "Client", run_id: str, console: Console) -> RunState:
    """Show progress until the run has ended; its state then. Raises CommandError where its workflow failed."""
    from ..db.errors import StoreUnreachable
    from ..db.runs import get_run

    ended = asyncio.create_task(run_ends(client, run_id))
    try:
        row = None
        while row is None and not ended.done():
            with suppress(StoreUnreachable):  # it restarts, and so do we
                row = await get_run(store, run_id)
            await asyncio.wait([ended], timeout=0.0 if row is not None else 0.2)
        with _display(console, row.config if row is not None else None) as display:
            watch = _Watch(store, run_id, display)
            while not ended.done():
                await watch.tell()
                await asyncio.wait([ended], timeout=display.every_s)
            await watch.tell()
        return await ended
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)


def expected_episodes(config: RunConfig) -> int | None:
    """Episodes of a run that ends after a number of groups, evaluations included; None where that is open."""
    sizes = {environment.group_size for environment in config.environments}
    if config.budget.groups is None or len(sizes) != 1:
        return None
    sets = [*config.evaluations("start").values(), *config.evaluations("end").values()]
    return config.budget.groups * sizes.pop() + sum(chosen.tasks * chosen.samples for chosen in sets)


class _Watch:
    """Reads the rows, each train step once."""

    def __init__(self, store: "Store", run_id: str, display: Display) -> None:
        self._store, self._run_id, self._display = store, run_id, display
        self._step: StepRow | None = None

    async def tell(self) -> None:
        from ..db.batches import train_steps
        from ..db.errors import StoreError
        from ..db.evaluations import list_evaluations
        from ..db.summary import run_summary

        try:
            since = 0 if self._step is None else self._step.version
            steps = await train_steps(self._store, self._run_id, since)
            self._step = steps[-1] if steps else self._step
            evaluations = await list_evaluations(self._store, self._run_id)
            ended = [one for one in evaluations if one.outcome.mean_reward is not None]
            summary = await run_summary(self._store, self._run_id)
            self._display.show(Seen(summary, self._step, ended[-1] if ended else None))
        except StoreError as error:
            self._display.away(str(error))


@contextmanager
def _display(console: Console, config: RunConfig | None) -> Iterator[Display]:
    what = Extent.of(config)
    if not console.is_terminal:
        yield _Lines(console, what)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=False)),
    )
    with Progress(*columns, console=console) as bar:
        yield _Live(bar, what)


@dataclass(frozen=True)
class Extent:
    """What progress is counted in, `steps` or `episodes`, and how many there will be; None where that is open."""

    unit: str
    total: int | None

    @classmethod
    def of(cls, config: RunConfig | None) -> "Extent":
        if config is None:
            return cls("episodes", None)
        if config.trains:
            return cls("steps", config.trainer.steps)
        return cls("episodes", expected_episodes(config))

    def done(self, seen: Seen) -> int:
        if self.unit == "episodes":
            return _ended(seen.summary)
        return 0 if seen.step is None else seen.step.version


class _Live:
    every_s = _LIVE_S

    def __init__(self, bar: Progress, what: Extent) -> None:
        self._bar, self._what, self._rate = bar, what, Rate()
        self._row = bar.add_task(what.unit, total=what.total, facts="")

    def show(self, seen: Seen) -> None:
        facts = Text(_facts(seen, self._rate)).markup
        self._bar.update(self._row, completed=self._what.done(seen), facts=facts)

    def away(self, reason: str) -> None:
        self._bar.update(self._row, facts=Text(one_line(reason)).markup)


class _Lines:
    every_s = _PLAIN_S

    def __init__(self, console: Console, what: Extent) -> None:
        self._console, self._what, self._rate = console, what, Rate()
        self._last = ""

    def show(self, seen: Seen) -> None:
        done, total = self._what.done(seen), self._what.total
        of = "" if total is None else f" of {total}"
        name = f"step {done}{of}" if self._what.unit == "steps" else f"{done}{of} episodes"
        self._print(f"{name}, {_facts(seen, self._rate)}")

    def away(self, reason: str) -> None:
        self._print(one_line(reason))

    def _print(self, line: str) -> None:
        if line != self._last:
            self._console.print(Text(line), soft_wrap=True)
        self._last = line


class Rate:
    """Things a second over the last while, from how many there were when."""

    def __init__(self, over_s: float = 30.0) -> None:
        self._over_s = over_s
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, moment: float, count: int) -> float:
        """The rate at `moment`, when there were `count`."""
        self._seen.append((moment, count))
        while len(self._seen) > 2 and self._seen[1][0] <= moment - self._over_s:
            self._seen.popleft()
        since, before = self._seen[0]
        return (count - before) / (moment - since) if moment > since else 0.0


def _facts(seen: Seen, rate: Rate) -> str:
    summary = seen.summary
    running = f"{episodes_in(summary, EpisodeState.RUNNING)} in flight"
    parts = [running] if seen.step is None else _trained(seen.step)
    parts.append(f"{rate.at(wall_seconds(summary), _ended(summary)):.1f} episodes/s")
    reward = summary.episodes["train"].mean_reward
    if reward is not None and seen.step is None:
        parts.append(f"reward {reward:.3f}")
    if seen.evaluation is not None:
        parts.append(_evaluated(seen.evaluation))
    if summary.state is not RunState.RUNNING:
        parts.append(summary.state)
    elif summary.waiting_for is not None:
        parts.append(f"waits: {summary.waiting_for}")
    return one_line(", ".join(parts))


def _trained(step: "StepRow") -> list[str]:
    """The newest step: what the episodes closed since the one before it earned, and what it measured."""
    parts = [f"{name} {step.metrics[key]:.3f}" for name, key in _MEASURED if key in step.metrics]
    return [*parts, f"staleness {step.staleness}"]


def _evaluated(row: "EvaluationRow") -> str:
    """One evaluation: a mean over several would be one over versions of the weights."""
    of = row.name if row.policy_version is None else f"{row.name} of version {row.policy_version}"
    return f"evaluation {of} {row.outcome.mean_reward:.3f}"


def _ended(summary: "RunSummary") -> int:
    return episodes_in(summary, EpisodeState.DONE, EpisodeState.FAILED)
