"""`atropos demo`: everything embedded, a few hundred real episodes, and one line of JSON that says how it went.

Invariant: the demo uses its own Temporal, Postgres, engine and workers in `<home>/demo`, whatever the environment
names, and stops them however it ends. What it reports is read from rows, and it fails where an episode is missing,
unfinished or without tokens.
"""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from ..contracts.runfile import RunConfig, parse_run
from ..contracts.states import RunState
from ..settings import load_settings
from . import access
from .errors import CommandError
from .stack.options import StackOptions
from .stack.render import show_progress
from .stack.running import AlreadyRunning, RunningStack, running_stack

if TYPE_CHECKING:
    from temporalio.client import Client

    from ..db.store import Store
    from .demo_report import Report

_ENVIRONMENT: Final = "calculator"
_GROUP: Final = 8
_EVALUATED: Final = 64
_AT_ONCE: Final = 64
"""Requests in flight: what the engine batches on a few cores without starving the workers beside it."""
_COMPLETION: Final = 48
"""Tokens of one completion; a correct call of the tool has about 14."""


def command(
    episodes: Annotated[int, typer.Option(min=1, max=100_000, help="Training episodes, in groups of 8.")] = 512,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the policy and of the order of tasks.")] = 0,
    json_only: Annotated[bool, typer.Option("--json-only", help="Print nothing but the JSON line.")] = False,
) -> None:
    """Run the demo and print what came of it; the last line of output is one JSON object."""
    from .progress import tiny_policy

    began = time.monotonic()
    # Addresses of the environment are no business of the demo's, not even to be refused.
    settings = load_settings(database_url=None, engine_url=None, engine_api_key=None)
    console = Console(stderr=True, quiet=json_only)
    policy = tiny_policy(settings.home, seed)
    console.print(Text("Starting Temporal, Postgres, an engine and workers …"))
    home = settings.home / "demo"
    try:
        with running_stack(home, StackOptions(engine_model=policy), progress=show_progress(console)) as stack:
            config = demo_run(policy, stack.engine_url or "", episodes, seed)
            report = asyncio.run(_play(stack, config, console, None if json_only else Console()))
    except AlreadyRunning:
        raise CommandError(
            f"A demo runs in {home} already; wait for its end, or stop it with `ATROPOS_HOME={home} atropos down`."
        ) from None
    if not json_only:
        _say_where(home, report, Console())
    typer.echo(json.dumps(report.line(time.monotonic() - began)))
    if report.problems:
        raise CommandError("; ".join(report.problems))


def demo_run(policy: Path, engine: str, episodes: int, seed: int) -> RunConfig:
    """The demo's run: whole groups, then an evaluation on tasks that no group was drawn from."""
    size = min(_GROUP, episodes)
    document: dict[str, Any] = {
        "name": "demo",
        "seed": seed,
        "model": {"path": str(policy)},
        "engines": [{"kind": "dev", "url": engine, "concurrency": _AT_ONCE}],
        "environments": [{"id": _ENVIRONMENT, "group_size": size}],
        "sampling": {"temperature": 1.0, "max_tokens": _COMPLETION},
        "budget": {"groups": -(-episodes // size)},
        "eval": {"at_end": True, "sets": [{"id": _ENVIRONMENT, "split": "eval", "tasks": _EVALUATED, "samples": 1}]},
    }
    return parse_run(document)


async def _play(stack: RunningStack, config: RunConfig, console: Console, page: Console | None) -> "Report":
    """Run it on this stack. Raises CommandError where the run failed."""
    from temporalio.client import Client

    from ..db.store import open_store
    from ..workflows.plugin import AtroposPlugin
    from .demo_report import read_report
    from .run_start import new_run_id, start_run
    from .run_watch import follow

    if stack.temporal_address is None or stack.database_url is None:
        raise CommandError("The demo's stack has no Temporal or no Postgres; see its logs.")
    # Not through the settings: a profile or TEMPORAL_ADDRESS of the user's would win there.
    client = await Client.connect(stack.temporal_address, plugins=[AtroposPlugin()])
    store = await open_store(stack.database_url.get_secret_value(), pool_size=2)
    try:
        await _end_earlier(store, client)
        started = await start_run(client, config, new_run_id(config.name, None))
        console.print(Text(f"{started.run_id} has begun{f': {started.note}' if started.note else '.'}"))
        if stack.temporal_ui is not None:
            link = access.workflow_page(stack.temporal_ui, started.run_id)
            console.print(Text(f"Watch it while it runs: {link}"), soft_wrap=True)
        state = await follow(store, client, started.run_id, console)
        if state is not RunState.COMPLETED:
            raise CommandError(f"{started.run_id} ended as {state}; see the logs in {stack.home.logs}.")
        report = await read_report(store, started.run_id, config)
        if page is not None:
            await _show_sample(store, report, page)
        return report
    finally:
        await store.close()


async def _end_earlier(store: "Store", client: "Client") -> None:
    """Cancel what an interrupted demo left unfinished: this one's workers would go on with it beside their own."""
    from ..db.runs import list_runs
    from .run_steer import ENDED, cancel

    for row in await list_runs(store):
        if row.state not in ENDED:
            await cancel(store, client, row, "another demo was started")


async def _show_sample(store: "Store", report: "Report", page: Console) -> None:
    """One conversation in full, a successful one where there is one."""
    from ..db.runs import get_run
    from .episode import load_shown
    from .episode_show import render_episode

    row = await get_run(store, report.run)
    if row is None or report.sample is None:
        return
    page.print()
    render_episode(await load_shown(store, row, report.sample), None, page)


def _say_where(home: Path, report: "Report", page: Console) -> None:
    """What was stopped, and how to look at it again."""
    prefix = f"ATROPOS_HOME={home} atropos"
    say: Callable[[str], None] = lambda text: page.print(Text(text), soft_wrap=True)  # noqa: E731
    say("")
    say("All parts of the demo are stopped; what happened is kept. To look at it again:")
    say(f"  {prefix} up --no-engine        Temporal's pages and the database, as they were")
    say(f"  {prefix} run show {report.run}")
    if report.sample is not None:
        say(f"  {prefix} episode show {report.sample.workflow_id} --tokens")
    say("A stack of your own: `atropos up`, then `atropos run start -f examples/run.yaml --engine URL`.")
