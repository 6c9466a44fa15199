"""`atropos run`: check a run file, start it, watch it and steer it.

Invariant: what can be known to be wrong is said before anything is started or changed. RUN may be any unambiguous
beginning or end of a run's id.
"""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..contracts.base import MOST
from ..contracts.runfile import RunConfig, RunFileError, parse_run
from ..contracts.states import LONGEST_REASON, RunState, is_live
from ..contracts.text import printable
from ..settings import Settings, load_settings
from . import access
from .documents import read_run_file
from .errors import CommandError
from .stack.addresses import resolve_addresses

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Check, start, watch and steer runs."
)

_File = Annotated[Path, typer.Option("-f", "--file", help="The run file, YAML or JSON; - is standard input.")]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a field: path=value, such as sampling.temperature=0.7. May be repeated."),
]
_Engine = Annotated[
    list[str] | None, typer.Option("--engine", help="Address of an engine, in place of the file's. May be repeated.")
]
_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or an unambiguous beginning or end of it.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _short(reason: str) -> str:
    if len(reason) > LONGEST_REASON:
        raise typer.BadParameter(f"it has {len(reason)} characters; {LONGEST_REASON} at most, others read it on a line")
    return reason


_Reason = Annotated[
    str,
    typer.Option(callback=_short, help=f"Why, for others to read; {LONGEST_REASON} characters at most."),
]


def config_from(file: Path, changes: list[str] | None, engines: list[str] | None) -> RunConfig:
    """The validated run file. Raises RunFileError, each problem with the file's name."""
    document = read_run_file(file, changes or (), engines or ())
    try:
        return parse_run(document)
    except RunFileError as error:
        name = "standard input" if str(file) == "-" else file
        raise RunFileError([f"{name}: {problem}" for problem in error.problems]) from None


@app.command()
def check(file: _File, changes: _Set = None, engines: _Engine = None) -> None:
    """Check a run file and show what the run will be, its first prompts as tokens."""
    from ..db.errors import StoreError
    from .run_check import check_run, show_check

    config, settings = config_from(file, changes, engines), load_settings()
    if resolve_addresses(settings).database.value is not None:
        try:
            asyncio.run(_refuse_taken(settings, None, config))
        except StoreError as problem:
            _say(f"Whether its engines are free could not be looked up: {problem}")
    show_check(config, asyncio.run(check_run(config, Path.cwd())), Console())


@app.command()
def render(file: _File, changes: _Set = None, engines: _Engine = None) -> None:
    """Print the run as JSON, for `temporal workflow start --input-file`."""
    from .run_start import document_of

    typer.echo(json.dumps(document_of(config_from(file, changes, engines)), indent=2, ensure_ascii=False))


@app.command()
def start(
    file: _File,
    changes: _Set = None,
    engines: _Engine = None,
    name: Annotated[str | None, typer.Option("--id", help="The run's id; default: run/NAME-xxxx.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the run has ended.")] = False,
) -> None:
    """Start a run."""
    from .run_start import new_run_id, start_run
    from .run_watch import watch_run

    config = config_from(file, changes, engines)
    run_id = new_run_id(config.name, name)
    settings = load_settings()
    handed_over: list[str] = []

    async def go() -> RunState | None:
        client = await access.temporal_client(settings)
        if resolve_addresses(settings).database.value is not None:
            await _refuse_taken(settings, run_id, config)
        started = await start_run(client, config, run_id, lambda: handed_over.append(run_id))
        typer.echo(started.run_id)
        _say(f"Started. {started.note}" if started.note else "Started.")
        _say(f"  atropos run why {run_id}\n  atropos run show {run_id}")
        link = access.ui_link(settings, run_id)
        if link is not None:
            _say(f"  {link}")
        return await watch_run(settings, client, run_id) if wait else None

    try:
        ended = asyncio.run(go())
    except KeyboardInterrupt:
        if handed_over:
            _say(f"{run_id} goes on without this terminal.")
            _say(f"  atropos run show {run_id}     how far it is\n  atropos run cancel {run_id}   ends it")
        raise
    if ended is not None and ended is not RunState.COMPLETED:
        raise CommandError(f"{run_id} ended as {ended}; `atropos run show {run_id}` says more.")


async def _refuse_taken(settings: Settings, run_id: str | None, config: RunConfig) -> None:
    from ..db.registration import engine_taken
    from ..db.runs import get_run
    from .run_start import id_taken

    async with access.opened_store(settings) as store:
        if run_id is not None and await get_run(store, run_id) is not None:
            raise id_taken(run_id)
        taken = await engine_taken(store, config)
        if taken is not None:
            raise CommandError(f"{taken}.")


@app.command()
def fork(
    run: _Run,
    version: Annotated[
        int | None,
        typer.Option("--from-version", min=0, max=MOST, help="The version to begin with; default: the newest."),
    ] = None,
    changes: _Set = None,
    engines: _Engine = None,
    name: Annotated[str | None, typer.Option("--id", help="The new run's id; default: run/NAME-xxxx.")] = None,
) -> None:
    """Start a new run that begins with the weights of a version of this one."""
    from .run_fork import forked
    from .run_start import new_run_id, start_run

    settings = load_settings()

    async def go() -> None:
        async with access.opened_store(settings) as store:
            row = await access.find_run(store, run)
            config = await forked(store, row, version, changes or (), engines or ())
            run_id = new_run_id(config.name, name)
            client = await access.temporal_client(settings)
            await _refuse_taken(settings, run_id, config)
            started = await start_run(client, config, run_id)
            typer.echo(started.run_id)
            _say(f"Begun with the weights of {row.run_id}. {started.note or ''}".rstrip())

    asyncio.run(go())


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, the newest first.")] = 20,
    as_json: _Json = False,
) -> None:
    """List runs, the newest first."""
    from ..db.runs import list_runs
    from .run_show import list_facts, render_list

    async def read() -> Any:
        async with access.opened_store(load_settings()) as store:
            return await list_runs(store, limit=limit)

    rows = asyncio.run(read())
    if as_json:
        _print_json(list_facts(rows))
    else:
        render_list(rows, Console())


@app.command()
def show(run: _Run, as_json: _Json = False) -> None:
    """Show a run at a glance."""
    from ..db.batches import training_progress
    from ..db.evaluations import list_evaluations
    from ..db.summary import run_summary
    from .run_show import render_run, run_facts

    settings = load_settings()

    async def read() -> Any:
        async with access.opened_store(settings) as store:
            row = await access.find_run(store, run)
            run_id = row.run_id
            evaluations = await list_evaluations(store, run_id)
            return row, await run_summary(store, run_id), evaluations, await training_progress(store, run_id)

    row, summary, evaluations, training = asyncio.run(read())
    if as_json:
        _print_json(run_facts(row, summary, evaluations, training))
    else:
        render_run(row, summary, evaluations, training, access.ui_link(settings, row.run_id), Console())


@app.command()
def why(run: _Run) -> None:
    """Say what a run waits for, or what it is doing."""
    from ..db.engines import engines_of
    from ..db.events import ADVICE, event_texts
    from . import run_steer
    from .temporal import TemporalUnready

    settings = load_settings()

    async def ask() -> list[str]:
        client, problem = None, []
        try:
            client = await access.temporal_client(settings)
        except (CommandError, TemporalUnready) as error:
            problem = [str(error)]
        try:
            async with access.opened_store(settings) as store:
                row = await access.find_run(store, run)
                noted = await event_texts(store, row.run_id, ADVICE)
                engines = run_steer.why_engines(await engines_of(store, row.run_id))
        except access.UnknownRun:
            run_id = None if client is None else await run_steer.unregistered(client, run)
            if client is None or run_id is None:
                raise
            return [f"{run_id}: {sentence}" for sentence in await run_steer.why_unregistered(client, run_id)]
        told = await run_steer.why(row, client)
        told += [*engines, *problem] if is_live(row.state) else []
        return [f"{row.run_id}: {sentence}" for sentence in (*told, *(f"Note: {text}." for text in noted))]

    for sentence in asyncio.run(ask()):
        typer.echo(printable(sentence))


@app.command()
def pause(run: _Run, reason: _Reason = "") -> None:
    """Admit nothing more; what is in flight finishes."""
    _update(run, "pause", [reason] if reason else [])


@app.command()
def resume(run: _Run) -> None:
    """Go on after a pause."""
    _update(run, "resume", [])


@app.command()
def cancel(run: _Run, reason: _Reason = "") -> None:
    """End a run now; also works while no worker runs."""
    from . import run_steer
    from .temporal import TemporalUnready

    settings = load_settings()

    async def do() -> tuple[str, str | None]:
        client = None
        with suppress(CommandError, TemporalUnready):
            client = await access.temporal_client(settings)
        async with access.opened_store(settings) as store:
            try:
                row = await access.find_run(store, run)
            except access.UnknownRun:
                run_id = None if client is None else await run_steer.unregistered(client, run)
                if client is None or run_id is None:
                    raise
                await client.get_workflow_handle(run_id).cancel()
                return run_id, "It had not begun yet."
            return row.run_id, await run_steer.cancel(store, client, row, reason or "cancelled by a person")

    run_id, note = asyncio.run(do())
    if note is not None:
        _say(note)
    typer.echo(f"{printable(run_id)} is cancelled.")


@app.command("abandon-batch")
def abandon_batch(run: _Run) -> None:
    """Take the batch being trained on away from its trainer; its groups are free for the next batch."""
    from .run_steer import abandon

    async def do() -> str:
        async with access.opened_store(load_settings()) as store:
            return await abandon(store, await access.find_run(store, run))

    typer.echo(asyncio.run(do()))


@app.command()
def concurrency(
    run: _Run, groups: Annotated[int, typer.Argument(min=1, max=2000, help="Groups in flight at once.")]
) -> None:
    """Change how many groups are in flight at once."""
    _update(run, "set_concurrency", [groups])


@app.command()
def weights(
    run: _Run, pairs: Annotated[list[str], typer.Argument(metavar="LABEL=WEIGHT...", help="Such as calculator=2.")]
) -> None:
    """Change the shares of a run's environments."""
    chosen = {}
    for pair in pairs:
        label, separator, number = pair.rpartition("=")
        with suppress(ValueError):
            chosen[label] = float(number)
        if not separator or not label or not 0 < chosen.get(label, 0) < float("inf"):
            raise CommandError(f"{pair!r} is no LABEL=WEIGHT with a weight above 0, such as calculator=2.")
    _update(run, "set_weights", [chosen])


def _update(run: str, name: str, arguments: list[Any]) -> None:
    from .run_steer import update

    settings = load_settings()

    async def do() -> tuple[str, RunState]:
        async with access.opened_store(settings) as store:
            row = await access.find_run(store, run)
        client = await access.temporal_client(settings)
        return row.run_id, await update(client, row, name, arguments)

    run_id, state = asyncio.run(do())
    typer.echo(f"{printable(run_id)} is {state}.")


def _say(text: str) -> None:
    """Words around the result go to standard error."""
    Console(stderr=True).print(Text(printable(text)), soft_wrap=True)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
