"""`atropos rescore`: apply new or changed scorers to stored episodes.

Invariant: the work is a workflow's, so it goes on without this command. Its id says what is done: the same command
given twice at once watches one workflow, and given later does only what is missing.
"""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from ..contracts.queues import WORKFLOWS
from ..contracts.rescoring import RESCORE_WORKFLOW, Rescored, RescoreInput, RescoreProgress, Rescoring
from ..settings import load_settings
from . import access
from .errors import CommandError

if TYPE_CHECKING:
    from temporalio.client import Client, WorkflowHandle

    from ..db.runs import RunRow

_EVERY_S: Final = 2.0


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or an unambiguous beginning or end of it.")],
    scorers: Annotated[
        list[str] | None,
        typer.Option("--scorer", metavar="NAME", help="A reward, metric or group reward; all of them unless given."),
    ] = None,
    environment: Annotated[
        list[str] | None, typer.Option("--environment", help="Only episodes of this environment of the run.")
    ] = None,
    using: Annotated[
        str | None,
        typer.Option("--using", metavar="ENV", help="Scorers of this environment (a name, module:Class or file)."),
    ] = None,
    args: Annotated[
        list[str] | None, typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the --using environment.")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--as", metavar="VERSION", help="Version the scores get; the environment's unless given."),
    ] = None,
    unscored: Annotated[bool, typer.Option("--unscored", help="Only episodes that have no reward.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
) -> None:
    """Score stored episodes again, by a workflow that goes on without this command.

    Scores are written under their scorer's version beside those that are there, and none is changed. A reward that was
    missing is filled in; others stay as they are, and `--scores` of exports and `trainer.scores` of a run file choose.
    """
    asyncio.run(_run(run, scorers or [], environment or [], using, _arguments(args or []), version, unscored, detach))


async def _run(
    run: str,
    scorers: list[str],
    environments: list[str],
    using: str | None,
    args: dict[str, Any],
    version: str | None,
    unscored: bool,
    detach: bool,
) -> None:
    if args and using is None:
        raise CommandError("--arg is for the environment that --using names.")
    settings = load_settings()
    async with access.opened_store(settings) as store:
        row = await access.find_run(store, run)
    client = await access.temporal_client(settings)
    failed = 0
    for label in _labels(row, environments):
        try:
            asked = Rescoring(
                run_id=row.run_id, environment=label, code=_code(using), args=args, scorers=tuple(scorers),
                version=version, unscored=unscored,
            )  # fmt: skip
        except ValidationError:
            raise CommandError(
                "--as is a word of at most 100 characters without spaces, and neither `first` nor `latest`."
            ) from None
        handle = await started(client, asked)
        if detach:
            typer.echo(f"{handle.id} runs; `temporal workflow result --workflow-id {handle.id}` waits for it.")
            continue
        done = await _followed(client, handle, label)
        typer.echo(_summary(label, done))
        failed += done.failed
    if failed:
        raise typer.Exit(1)


def _arguments(given: list[str]) -> dict[str, Any]:
    """KEY=VALUE as in a run file. Raises CommandError."""
    found = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise CommandError(f"--arg {one!r} is not KEY=VALUE.")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise CommandError(f"--arg {one!r}: the value is not YAML.") from None
    return found


def _code(using: str | None) -> str | None:
    """A file's path made absolute, since workers have folders of their own."""
    path, colon, name = (using or "").partition(":")
    return f"{Path(path).resolve()}{colon}{name}" if path.endswith(".py") else using


def _labels(row: "RunRow", wanted: list[str]) -> list[str]:
    known = [one.label for one in row.config.environments]
    for label in wanted:
        if label not in known:
            raise CommandError(f"{row.run_id} has no environment {label!r}; it has {', '.join(known)}.")
    return wanted or known


async def started(client: "Client", asked: Rescoring) -> "WorkflowHandle[Any, Rescored]":
    """The workflow that does it, which may be running already."""
    from temporalio.common import WorkflowIDConflictPolicy

    digest = hashlib.sha256(json.dumps(asked.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:8]
    return await client.start_workflow(
        RESCORE_WORKFLOW,
        RescoreInput(rescoring=asked),
        id=f"{asked.run_id}/rescore/{digest}",
        task_queue=WORKFLOWS,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        result_type=Rescored,
        static_summary=f"score {asked.environment} again",
    )


async def _followed(client: "Client", handle: "WorkflowHandle[Any, Rescored]", label: str) -> Rescored:
    """Its result, with progress on stderr meanwhile. Raises CommandError with its reason where it failed."""
    from .run_start import outcome_of
    from .run_steer import no_worker, query

    console = Console(stderr=True)
    ended = asyncio.create_task(outcome_of(handle, Rescored))
    told = ""
    try:
        while not ended.done():
            await asyncio.wait([ended], timeout=_EVERY_S)
            progress = None if ended.done() else await query(handle, "progress", RescoreProgress)
            line = told if progress is None else _progress(label, progress)
            if line != told:
                console.print(line, highlight=False, markup=False)
                told = line
            elif progress is None and not ended.done():
                console.print(await no_worker(client) or f"{label}: no worker has answered", markup=False)
        return await ended
    except asyncio.CancelledError:
        console.print(f"{handle.id} goes on; the same command watches it again.", markup=False)
        raise
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)


def _progress(label: str, progress: RescoreProgress) -> str:
    of = "" if progress.total is None else f" of {progress.total}"
    return f"{label}: {progress.so_far.groups}{of} groups, {progress.so_far.written} scores written"


def _summary(label: str, done: Rescored) -> str:
    parts = [f"{done.written} scores written over {done.groups} groups"]
    parts += [f"{done.known} were there already"] if done.known else []
    parts += [f"{done.unscored} left unscored (a judge is away, or a group is too small)"] if done.unscored else []
    parts += [f"{done.leased} groups left out, since a trainer holds them: run it again later"] if done.leased else []
    parts += [f"{done.failed} failed, first: {done.reason}"] if done.failed else []
    return f"{label}: {'; '.join(parts)}."
