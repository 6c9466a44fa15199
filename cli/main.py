"""`atropos`: every command of the project under one name.

Invariant: a command's module is imported when it is run, not before, so `atropos --help` and `atropos env try` need
neither Temporal nor torch. Errors for people end as `atropos: sentence` and exit code 1, wrong usage as 2, Ctrl-C as
130.
"""

import contextlib
import os
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from .errors import PACKAGE, tell

_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "demo": ("cli.demo:command", "Watch a small model work through a few hundred episodes; everything embedded."),
    "up": ("cli.dev:up", "Start the dev stack: Temporal, Postgres, an engine and workers."),
    "down": ("cli.dev:down", "Stop the dev stack."),
    "status": ("cli.dev:status", "Show each part of the stack, its address and health; ends with 1 where none runs."),
    "env": ("cli.env:app", "Try and check environments in the terminal."),
    "run": ("cli.run:app", "Check, start, watch and steer runs."),
    "engine": ("cli.engine:app", "List, ask, add and take out the engines of a run."),
    "episode": ("cli.episode:app", "Read episodes: the conversation, its tokens and its reward."),
    "dashboard": ("cli.dashboard:command", "Serve runs, groups and episodes to a browser."),
    "view": ("cli.view:command", "Write a run or an episode as HTML pages that need no server."),
    "audit": ("cli.audit:command", "Prove a run's ledger: its rows against each other and against Temporal."),
    "rescore": ("cli.rescore:command", "Apply new or changed scorers to stored episodes."),
    "sft-gen": ("cli.export:sft_gen", "Write scored episodes as JSON lines or Parquet for supervised fine-tuning."),
    "dpo-gen": ("cli.export:dpo_gen", "Write pairs of answers as JSON lines or Parquet for preference optimisation."),
    "import": ("cli.importing:command", "Import groups and chats from JSON lines into a run of their own."),
    "db": ("cli.db:app", "Care for the store: upgrade, check, prune, dump and restore it."),
    "policy": ("cli.policy:app", "Make the tiny policy of the dev stack, or a tied model ready for vLLM."),
    "worker": ("cli.worker:command", "Serve workflows and activities until stopped (the same as atropos-worker)."),
}
"""Name → where it is defined, and its line in the help."""


class Commands(TyperGroup):
    """The root of all commands: stand-ins with a name and a line of help, of which the one that is run is loaded."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=line) for name, (_, line) in _COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, load(name) if name is not None and found is not None else None, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except Exception as error:
            if not tell(error):
                raise
            raise typer.Exit(1) from None


def load(name: str) -> Any:
    """Import a command. It is defined as a function, or as a Typer of its own."""
    module, _, attribute = _COMMANDS[name][0].partition(":")
    found = getattr(import_module(f"{PACKAGE}.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name, help=_COMMANDS[name][1])(found)
        found = single
    command = typer.main.get_command(found)
    command.name = name
    return command


app = typer.Typer(
    name="atropos",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reinforcement learning of language models in multi-turn environments, where no rollout is ever lost.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"atropos {version('atropos-durable')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


def run_to_exit(program: typer.Typer, name: str) -> None:
    """Run a command line and leave by `os._exit`: the SDK's runtime may crash an interpreter that is shutting down."""
    code = 0
    try:
        program(prog_name=name)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def main() -> None:
    """Entry point of `atropos`."""
    run_to_exit(app, "atropos")


if __name__ == "__main__":
    main()
