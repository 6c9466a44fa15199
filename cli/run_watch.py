"""Watching a run from outside until it ends: a live line at a terminal, a plain one every few seconds elsewhere.

Invariant: watching only reads rows; a store that is away for a while is shown as such and watching goes on. Whether the
run has ended is Temporal's word, since a row may have ended before its workflow has.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from ..contracts.runfile import RunConfig
from ..contracts.states import EpisodeState, RunState
from ..settings import Settings
from .access import opened_store
from .run_show import episodes_in, wall_seconds
from .run_start import run_ends
from .stack.addresses import resolve_addresses
from .text import one_line

if TYPE_CHECKING:
    from temporalio.client import Client

    from ..db.store import Store
    from ..db.summary import RunSummary

_LIVE_S: Final = 1.0
_PLAIN_S: Final = 5.0


class Display(Protocol):
    """Where progress goes; `every_s` is how often it wants to be told."""

    every_s: float

    def show(self, summary: "RunSummary") -> None: ...
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
        with _display(console, expected_episodes(row.config) if row is not None else None) as display:
            while not ended.done():
                await _tell(store, run_id, display)
                await asyncio.wait([ended], timeout=display.every_s)
            await _tell(store, run_id, display)
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


async def _tell(store: "Store", run_id: str, display: Display) -> None:
    from ..db.errors import StoreError
    from ..db.summary import run_summary

    try:
        display.show(await run_summary(store, run_id))
    except StoreError as error:
        display.away(str(error))


@contextmanager
def _display(console: Console, total: int | None) -> Iterator[Display]:
    if not console.is_terminal:
        yield _Lines(console, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=False)),
    )
    with Progress(*columns, console=console) as bar:
        yield _Live(bar, total)


class _Live:
    every_s = _LIVE_S

    def __init__(self, bar: Progress, total: int | None) -> None:
        self._bar = bar
        self._row = bar.add_task("episodes", total=total, facts="")

    def show(self, summary: "RunSummary") -> None:
        ended = episodes_in(summary, EpisodeState.DONE, EpisodeState.FAILED)
        self._bar.update(self._row, completed=ended, facts=Text(_facts(summary)).markup)

    def away(self, reason: str) -> None:
        self._bar.update(self._row, facts=Text(one_line(reason)).markup)


class _Lines:
    every_s = _PLAIN_S

    def __init__(self, console: Console, total: int | None) -> None:
        self._console = console
        self._total = total
        self._last = ""

    def show(self, summary: "RunSummary") -> None:
        ended = episodes_in(summary, EpisodeState.DONE, EpisodeState.FAILED)
        of = "" if self._total is None else f" of {self._total}"
        self._print(f"{ended}{of} episodes, {_facts(summary)}")

    def away(self, reason: str) -> None:
        self._print(one_line(reason))

    def _print(self, line: str) -> None:
        if line != self._last:
            self._console.print(Text(line), soft_wrap=True)
        self._last = line


def _facts(summary: "RunSummary") -> str:
    seconds = wall_seconds(summary)
    running = episodes_in(summary, EpisodeState.RUNNING)
    parts = [f"{running} in flight", f"{summary.turns / seconds if seconds > 0 else 0:.1f} turns/s"]
    for kind, totals in summary.episodes.items():
        if totals.mean_reward is not None:
            parts.append(f"{'reward' if kind == 'train' else 'evaluation'} {totals.mean_reward:.3f}")
    if summary.state is not RunState.RUNNING:
        parts.append(summary.state)
    elif summary.waiting_for is not None:
        parts.append(f"waits: {summary.waiting_for}")
    return one_line(", ".join(parts))
