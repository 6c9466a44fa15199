"""`atropos demo`: a small model learns to use a tool, with everything embedded; one line of JSON says how it went.

Invariant: the demo uses its own Temporal, Postgres, engine and workers in `<home>/demo`, whatever the environment
names, and stops them however it ends; one demo at a time has that folder. What it reports is read from rows, and it
fails where the model did not learn, where its control did, or where rows contradict each other or Temporal.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from ..contracts.runfile import RunConfig
from ..contracts.states import RunState, is_live
from ..settings import load_settings
from . import access
from .demo_run import EPISODES, STEPS, control_run, demo_run, demo_size
from .errors import CommandError
from .stack.files import StackHome, explain_os_errors, hold_lock
from .stack.options import StackOptions
from .stack.render import show_progress
from .stack.running import AlreadyRunning, RunningStack, running_stack
from .stack.state import read_state

if TYPE_CHECKING:
    from temporalio.client import Client

    from ..db.store import Store
    from .chaos.beside import Chaos
    from .demo_report import RunReport

_SEEDS: Final = 2**31


def command(
    steps: Annotated[
        int | None, typer.Option(min=1, max=1000, help=f"Train steps; {STEPS} unless given. Fewer show less.")
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help=f"Training episodes, about; {EPISODES} unless given. Fewer show less."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=_SEEDS - 1, help="Seed of policy, order of tasks and trainer; random unless given."),
    ] = None,
    chaos: Annotated[
        bool,
        typer.Option("--chaos", help="Kill every component while it works, at moments that the seed decides."),
    ] = False,
    json_only: Annotated[bool, typer.Option("--json-only", help="Print nothing but the JSON line.")] = False,
) -> None:
    """Run the demo and print what came of it; the last line of output is one JSON object."""
    from .chaos.beside import Chaos
    from .chaos.plan import plan
    from .demo_show import say_where, show_runs
    from .demo_verdict import judge, last_line
    from .progress import tiny_policy

    began = time.monotonic()
    # Addresses of the environment are no business of the demo's, not even to be refused.
    settings = load_settings(database_url=None, engine_url=None, engine_api_key=None)
    console, size = Console(stderr=True, quiet=json_only), demo_size(steps, episodes)
    chosen = secrets.randbelow(_SEEDS) if seed is None else seed
    home = settings.home / "demo"
    with _alone(home):
        console.print(Text(f"Seed {chosen}; `atropos demo --seed {chosen}` begins the same way."))
        policy = tiny_policy(settings.home, chosen)
        console.print(Text("Starting Temporal, Postgres, an engine and workers …"))
        with running_stack(home, StackOptions(engine_model=policy), progress=show_progress(console)) as stack:
            engine = stack.engine_url or ""
            configs = (demo_run(policy, engine, size, chosen), control_run(policy, engine, size, chosen))
            page = None if json_only else Console()
            kills = Chaos(plan(chosen, size.steps), console) if chaos else None
            run, control = asyncio.run(_play(stack, configs, console, page, kills))
    verdict = judge(run, control, size, kills.report if kills is not None else None)
    if not json_only:
        show_runs(run, control, verdict, Console())
        say_where(home, run, Console())
    line = last_line(run, control, verdict, chosen, time.monotonic() - began)
    if kills is not None and kills.report is not None:
        line |= kills.report.figures() | {"episodes_in_doubt": run.in_doubt}
    typer.echo(json.dumps(line))
    if verdict.failures:
        raise CommandError("; ".join(verdict.failures))


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Hold the demo's folder. Raises CommandError at once where another demo, or a stack, has it."""
    refusal = CommandError(
        f"A demo or a stack runs in {home} already; end it with Ctrl-C, or with `ATROPOS_HOME={home} atropos down`."
    )
    place = StackHome(home)
    place.prepare()
    with ExitStack() as until_the_end:
        with explain_os_errors(place.root):
            alone = until_the_end.enter_context(hold_lock(place, place.demo_lock))
        state = read_state(place)
        if not alone or (state is not None and state.supervised()):
            raise refusal
        try:
            yield
        except AlreadyRunning:
            raise refusal from None


async def _play(
    stack: RunningStack,
    configs: tuple[RunConfig, RunConfig],
    console: Console,
    page: Console | None,
    kills: "Chaos | None",
) -> "tuple[RunReport, RunReport]":
    """The run and its control on this stack, one after the other. Raises CommandError where one failed."""
    from temporalio.client import Client

    from ..db.store import open_store
    from ..workflows.plugin import AtroposPlugin
    from .demo_show import show_sample

    if stack.temporal_address is None or stack.database_url is None:
        raise CommandError("The demo's stack has no Temporal or no Postgres; see its logs.")
    # Not through the settings: a profile or TEMPORAL_ADDRESS of the user's would win there.
    client = await Client.connect(stack.temporal_address, plugins=[AtroposPlugin()])
    store = await open_store(stack.database_url.get_secret_value(), pool_size=2)
    try:
        await _end_earlier(store, client)
        run = await _one(stack, store, client, configs[0], console, kills)
        console.print(Text("The control: the same with learning rate 0."))
        control = await _one(stack, store, client, configs[1], console)
        if page is not None:
            await show_sample(store, run, page)
        return run, control
    finally:
        await store.close()


async def _one(
    stack: RunningStack,
    store: "Store",
    client: "Client",
    config: RunConfig,
    console: Console,
    kills: "Chaos | None" = None,
) -> "RunReport":
    from .audit import audit
    from .demo_report import read_report
    from .run_start import new_run_id, start_run
    from .run_watch import follow

    started = await start_run(client, config, new_run_id(config.name, None))
    console.print(Text(f"{started.run_id} has begun{f': {started.note}' if started.note else '.'}"))
    if stack.temporal_ui is not None:
        link = access.workflow_page(stack.temporal_ui, started.run_id)
        console.print(Text(f"Watch it while it runs: {link}"), soft_wrap=True)
    async with kills.beside(stack, store, client, started.run_id) if kills is not None else nullcontext():
        state = await follow(store, client, started.run_id, console)
    if state is not RunState.COMPLETED:
        raise CommandError(f"{started.run_id} ended as {state}; see the logs in {stack.home.logs}.")
    return await read_report(store, started.run_id, config, await audit(store, client, started.run_id))


async def _end_earlier(store: "Store", client: "Client") -> None:
    """Cancel what an interrupted demo left unfinished: this one's workers would go on with it beside their own."""
    from ..db.runs import RunRow, list_runs
    from .run_steer import cancel

    for row in await list_runs(store):
        if isinstance(row, RunRow) and is_live(row.state):
            await cancel(store, client, row, "another demo was started")
