"""`atropos db`: the care of the trajectory store.

Invariant: what only looks changes nothing, and what removes something says first what that would be and does it only
with `--yes`. Exit codes of `check` are those of `audit`: 0 is sound, 1 is not, 2 says that it could not be looked at.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..contracts.base import MOST
from ..contracts.text import one_line
from ..settings import load_settings
from . import access
from .db_options import age_of, size_of
from .errors import CommandError, tell
from .stack.addresses import resolve_addresses

if TYPE_CHECKING:
    from ..db.care_prune import Candidate
    from ..db.store import Store

app = typer.Typer(no_args_is_help=True, help="Care for the trajectory store.", rich_markup_mode=None)

_NAMED: Final = 5
Runs = Annotated[list[str] | None, typer.Option("--run", metavar="RUN", help="Only this run; repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def upgrade() -> None:
    """Bring the schema to that of this build, as `atropos up` does; rows stay."""
    from ..db.migrate import revisions
    from ..db.migrate import upgrade as migrate

    url = _url()
    before, head = revisions(url)
    migrate(url)
    after, _ = revisions(url)
    if before == after:
        typer.echo(f"The schema is {head} already.")
    elif before is None:
        typer.echo(f"The tables were made: schema {after}.")
    else:
        typer.echo(f"The schema was {before} and is {after} now.")


@app.command()
def check(
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the audit of every run.")] = False,
) -> None:
    """Check the schema, its constraints and the ledger of every run; show what each table takes."""
    try:
        found = asyncio.run(_checked(quick))
    except Exception as error:
        if not tell(error):
            raise
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _show_check(found, Console())
    if not found["sound"]:
        raise typer.Exit(1)


@app.command()
def prune(
    runs: Runs = None,
    older: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Only runs that ended before: 90d, 12h, 4w.")
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep-last", min=0, max=MOST, help="So many of the newest ended runs stay, whatever else.")
    ] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it; without this nothing is removed.")] = False,
) -> None:
    """Remove ended runs that nothing needs any more; without --yes, show what would go."""
    if runs is None and older is None and not keep:
        raise CommandError("Say what may go: --older-than 90d, --keep-last 20, --run RUN, or several of these.")
    age = None if older is None else age_of(older)
    asyncio.run(_pruned(runs, age, keep, yes))


@app.command()
def dump(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    runs: Runs = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write runs, or all of the store, to a file that `restore` reads."""
    with _target(file, force) as target:
        rows = asyncio.run(_dumped(target, runs))
    _say(f"{rows} rows in {one_line(str(file))} ({size_of(file.stat().st_size)}).")


@app.command()
def restore(file: Annotated[Path, typer.Argument(metavar="FILE", help="File that `dump` wrote.")]) -> None:
    """Write the runs of a dump into the store, all or none."""
    if not file.is_file():
        raise CommandError(f"There is no file {one_line(str(file))}.")
    for run_id in asyncio.run(_restored(file)):
        typer.echo(run_id)


def _url() -> str:
    url = resolve_addresses(load_settings()).database.value
    if url is None:
        raise CommandError("No database is known: start the stack with `atropos up`, or set DATABASE_URL.")
    return url.get_secret_value()


async def _checked(quick: bool) -> dict[str, Any]:
    from ..db.care import audits, table_sizes, unproved
    from ..db.migrate import revisions

    _, head = await asyncio.to_thread(revisions, _url())
    async with access.opened_store(load_settings(), long=True) as store:
        problems = await unproved(store)
        sizes = [asdict(size) for size in await table_sizes(store)]
        runs = []
        if not quick:
            async for run_id, audit in audits(store):
                rows = [f"{one.check}: {one.row}" for one in audit.violations]
                runs.append({"run": run_id, "checked": dict(audit.checked), "contradictions": rows})
    sound = not problems and not any(run["contradictions"] for run in runs)
    return {"sound": sound, "schema": head, "problems": problems, "runs": runs, "audited": not quick, "tables": sizes}


def _show_check(found: dict[str, Any], console: Console) -> None:
    console.print(Text(f"Schema {found['schema']}, which is this build's."))
    for problem in found["problems"]:
        console.print(Text(f"VIOLATED {problem}", style="bold red"), soft_wrap=True)
    table = Table("table", "rows", "dead", "size", "indexes", box=None, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in found["tables"]:
        sizes = (size_of(one["bytes"]), size_of(one["indexes"]))
        table.add_row(one["name"], str(one["rows"]), str(one["dead"]), *sizes)
    console.print(table)
    console.print(Text("Rows are Postgres' estimate; dead ones are room that a vacuum gives back."), soft_wrap=True)
    broken = [run for run in found["runs"] if run["contradictions"]]
    for run in broken:
        rows = run["contradictions"]
        more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
        text = f"VIOLATED {one_line(run['run'])}: {'; '.join(map(one_line, rows[:_NAMED]))}{more}"
        console.print(Text(text, style="bold red"), soft_wrap=True)
    audited = f"{len(found['runs'])} runs audited, {len(broken)} with contradictions." if found["audited"] else ""
    console.print(Text(audited or "The ledgers of the runs were not looked at."))


async def _pruned(runs: Sequence[str] | None, age: timedelta | None, keep: int, yes: bool) -> None:
    from ..db.care_prune import candidates

    async with access.opened_store(load_settings(), long=True) as store:
        named = None if runs is None else [(await access.find_run(store, run)).run_id for run in runs]
        found = await candidates(store, runs=named, older=age, keep_last=keep)
        going = [one for one in found if not one.kept]
        for one in found:
            _show_candidate(one)
        missed = sorted(set(named or ()) - {one.run_id for one in found})
        for run_id in missed:
            _say(f"{one_line(run_id)} stays: it has not ended, is too young, or is one of the newest that stay.")
        if not going:
            typer.echo("Nothing goes.")
            return
        total = f"{len(going)} runs, {sum(one.rows for one in going)} rows, {size_of(sum(one.bytes for one in going))}"
        if not yes:
            typer.echo(f"{total} would go; --yes removes them.")
            return
        for one in going:
            await _remove(store, one, [other.run_id for other in going])
        typer.echo(f"{total} removed. Autovacuum makes room of them; `VACUUM` does so at once.")


def _show_candidate(one: "Candidate") -> None:
    if one.kept:
        _say(f"{one_line(one.run_id)} stays: {'; '.join(one.kept)}.")
        return
    parts = [f"{share.rows} {share.table}" for share in one.shares if share.rows]
    begun = " (a prune that broke off had begun with it)" if one.begun else ""
    typer.echo(f"{one_line(one.run_id)}{begun}: {size_of(one.bytes)} in {', '.join(parts)}")
    if one.folders:
        typer.echo(f"  its checkpoints stay on disk: {', '.join(map(one_line, one.folders[-_NAMED:]))}")


async def _remove(store: "Store", one: "Candidate", going: Sequence[str]) -> None:
    from ..db.care_prune import prune

    gone = 0
    async with aclosing(prune(store, one.run_id, going)) as steps:
        async for rows in steps:
            gone += rows
    _say(f"{one_line(one.run_id)}: {gone} rows removed")


async def _dumped(target: IO[bytes], runs: Sequence[str] | None) -> int:
    from ..db.care_dump import dump

    rows = 0
    async with access.opened_store(load_settings(), long=True) as store:
        named = None if runs is None else [(await access.find_run(store, run)).run_id for run in runs]
        async with aclosing(dump(store, target, named)) as streams:
            async for stream in streams:
                rows += stream.rows
                if stream.rows:
                    _say(f"{stream.table}: {stream.rows} rows, {size_of(stream.bytes)}")
    return rows


async def _restored(file: Path) -> tuple[str, ...]:
    from ..db.care_dump import read_manifest, restore

    manifest = read_manifest(file)
    async with access.opened_store(load_settings(), long=True) as store:
        with file.open("rb") as source:
            async with aclosing(restore(store, source, manifest)) as streams:
                async for stream in streams:
                    if stream.rows:
                        _say(f"{stream.table}: {stream.rows} rows, {size_of(stream.bytes)}")
    _say(f"{manifest.rows} rows of {len(manifest.runs)} runs restored, as they were at {manifest.made_at}.")
    return manifest.runs


@contextmanager
def _target(file: Path, force: bool) -> Iterator[IO[bytes]]:
    """The file to write to, which takes its name once it is whole. Raises CommandError."""
    if file.is_dir() or (file.exists() and not force):
        raise CommandError(f"{one_line(str(file))} is there already; name another file, or overwrite it with --force.")
    try:
        handle, made = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        temporary = Path(made)
        try:
            with os.fdopen(handle, "wb") as target:
                yield target
                target.flush()
                os.fsync(target.fileno())
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"{one_line(str(file))} cannot be written: {error.strerror}.") from None


def _say(text: str) -> None:
    Console(stderr=True).print(Text(text), soft_wrap=True)
