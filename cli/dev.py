"""`atropos up`, `down` and `status`: the dev stack as commands.

Invariant: `up` leaves a stack that can run the examples at once: the tiny policy is made first where an engine is to
serve it and nobody named a model or an engine of their own.
"""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..contracts.base import MOST
from ..contracts.text import printable
from ..settings import load_settings
from .dashboard import INSTALL, installed
from .errors import CommandError
from .stack import commands
from .stack.addresses import resolve_addresses
from .stack.apps import check_model
from .stack.files import StackHome, explain_os_errors
from .stack.options import StackOptions
from .stack.render import render_down, render_status, render_up, say_beginning, show_progress
from .up_options import kept_by_running, refuse_contradictions, refuse_idle

_Port = typer.Option(min=1, max=65_535, help="Default: a free port, kept for the next time.")


def up(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of the model to serve; default: a tiny policy made on first use."),
    ] = None,
    engine: Annotated[bool, typer.Option(help="Start the dev engine.")] = True,
    workers: Annotated[bool, typer.Option(help="Start workers.")] = True,
    dashboard: Annotated[bool, typer.Option(help="Start the dashboard, where it is installed.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Seed of the tiny policy, where it has to be made.")] = 0,
    temporal_port: Annotated[int | None, _Port] = None,
    ui_port: Annotated[int | None, _Port] = None,
    postgres_port: Annotated[int | None, _Port] = None,
    engine_port: Annotated[int | None, _Port] = None,
    dashboard_port: Annotated[int | None, _Port] = None,
) -> None:
    """Start the stack, or find it running."""
    settings = load_settings()
    given = {name: value for name, value in context.params.items() if _typed(context, name)}
    refuse_contradictions(given)
    if not installed() and (given.get("dashboard") or "dashboard_port" in given):
        raise CommandError(f"The dashboard is not installed; run: {INSTALL}")
    options = StackOptions(
        engine_model=model,
        workers=workers,
        dashboard=dashboard and installed(),
        temporal_port=temporal_port,
        ui_port=ui_port,
        postgres_port=postgres_port,
        engine_port=engine_port,
        dashboard_port=dashboard_port,
    )
    if model is not None:
        check_model(model)
    addresses = resolve_addresses(settings)
    refuse_idle(given, addresses)
    said = Console(stderr=True)
    say_beginning(StackHome(settings.home), said)
    if engine and model is None and addresses.engine.value is None:
        from .progress import tiny_policy

        said.print("  the tiny policy is looked for, and made on first use …", style="dim", highlight=False)
        options = options.model_copy(update={"engine_model": tiny_policy(settings.home, seed)})
    options = commands.only_missing(options, addresses)
    try:
        result = commands.up(settings.home, options, progress=show_progress(said))
    except KeyboardInterrupt:
        typer.echo("Interrupted: what was started is stopped again.", err=True)
        raise
    if options.engine_model is not None and not result.already_running:
        link_model(settings.home, options.engine_model)
    render_up(result, Console())
    kept = kept_by_running(given, StackHome(settings.home), result.state) if result.already_running else None
    if kept is not None:
        typer.echo(f"Note: {printable(kept)}", err=True)


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def link_model(home: Path, model: Path) -> None:
    """Let `<home>/model` name what the engine serves, so that a run file can say so without knowing the folder."""
    link, fresh = home / "model", home / f".model-{os.getpid()}"
    with explain_os_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        fresh.symlink_to(model.absolute())
        fresh.replace(link)


def down() -> None:
    """Stop the stack; with nothing to stop this is a success too."""
    render_down(commands.down(load_settings().home), Console())


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the stack; the exit code is 1 where none is running, or something that should answer does not."""
    found = commands.status(load_settings())
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        render_status(found, Console())
    if not found.there:
        raise CommandError(f"No stack is running in {found.home}; `atropos up` starts one.")
    if not found.healthy:
        raise typer.Exit(1)
