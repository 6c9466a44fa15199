"""`atropos engine`: the inference servers of a run, listed, asked, added and taken out while it lives.

Invariant: rows say what is wanted, and workers follow within seconds; nothing here talks to Temporal, and only `probe`
talks to an engine, never by sampling from it.
"""

import asyncio
import json
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..contracts.engines import EngineApi, EngineConfig, EngineKind
from ..contracts.runfile import RunFileError, parse_run
from ..contracts.states import EngineState, is_live
from ..contracts.text import one_line
from ..settings import load_settings, secret_from_environment
from . import access
from .errors import CommandError

if TYPE_CHECKING:
    from ..contracts.records import EngineRecord
    from ..db.runs import RunRow
    from ..inference.engines import MessageEngine, TokenEngine

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="List, ask, add and take out engines."
)

_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or an unambiguous beginning or end of it.")]
_Engine = Annotated[
    str, typer.Argument(metavar="ENGINE", help="An engine's address or id, or an unambiguous part of the id's ends.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_PROBE_S: Final = 10.0
_COLOURS: Final = {
    EngineState.READY: "green",
    EngineState.DOWN: "red",
    EngineState.DRAINING: "yellow",
    EngineState.DRAINED: "yellow",
    EngineState.QUARANTINED: "red",
    EngineState.REMOVED: "dim",
}


@app.command("list")
def list_(run: _Run, as_json: _Json = False) -> None:
    """List the engines of a run as its rows have them."""
    row, engines = asyncio.run(_read(run))
    if as_json:
        typer.echo(json.dumps([_facts(record) for record in engines], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("engine", "kind", "address", "at once", "state", "weights", "why"):
        table.add_column(column, overflow="fold")
    for record in engines:
        table.add_row(
            Text(one_line(record.engine_id)),
            Text(record.kind),
            Text(one_line(record.url)),
            Text(str(record.concurrency)),
            Text(record.state, style=_COLOURS[EngineState(record.state)]),
            Text(one_line(record.weight_label or "")),
            Text(one_line(record.reason or "")),
        )
    console = Console()
    console.print(Text(f"Engines of {row.run_id}:"))
    console.print(table)


@app.command()
def probe(
    run: _Run,
    engine: Annotated[str | None, typer.Argument(metavar="ENGINE", help="One of them; all unless given.")] = None,
    as_json: _Json = False,
) -> None:
    """Ask engines whether they are up and what they hold, without sampling. Ends with 1 where one does not answer."""
    _, engines = asyncio.run(_read(run))
    chosen = [record for record in engines if record.state != EngineState.REMOVED]
    if engine is not None:
        chosen = [_the_engine(engines, engine)]
    found = asyncio.run(_probe(chosen))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for one in found:
            typer.echo(f"{one['url']}: {one['says']}")
    if not all(one["up"] for one in found):
        raise typer.Exit(1)


@app.command()
def add(
    run: _Run,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where it listens, as workers reach it.")],
    kind: Annotated[EngineKind, typer.Option(help="What speaks there.")] = EngineKind.VLLM,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests in flight at once.")] = 64,
    api_key_env: Annotated[
        str | None, typer.Option(help="Variable of the workers' environment that holds its key.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of kind openai: what the provider calls the model.")] = None,
    api: Annotated[EngineApi | None, typer.Option(help="Of kind openai: which of its APIs.")] = None,
) -> None:
    """Give a live run another engine, change one it has, or put one back. It gets work once it has been asked, and in
    a run that trains once it holds the run's weights."""
    from ..db.events import add_event
    from ..db.registration import add_engine

    hosted = {name: value for name, value in {"api": api, "model": model}.items() if value is not None}
    document: dict[str, Any] = {"kind": kind, "url": url, "concurrency": concurrency, "api_key_env": api_key_env}
    document |= {"hosted": hosted} if hosted else {}

    async def go() -> str:
        async with access.opened_store(load_settings()) as store:
            row = _live(await access.find_run(store, run))
            added = await add_engine(store, row.run_id, row.config, _checked(row, document))
            await add_event(store, row.run_id, "engine", f"{url} was added", {"engine": added})
            return f"{added} belongs to {row.run_id} now; it gets work once it has been asked."

    typer.echo(asyncio.run(go()))


@app.command()
def drain(run: _Run, engine: _Engine) -> None:
    """Take an engine out: what is in flight ends, and it gets nothing until `engine add` puts it back."""
    typer.echo(asyncio.run(_take_out(run, engine, EngineState.DRAINED)))


@app.command()
def remove(run: _Run, engine: _Engine) -> None:
    """Take an engine out for good, so that other runs may have it."""
    typer.echo(asyncio.run(_take_out(run, engine, EngineState.REMOVED)))


def _checked(row: "RunRow", document: dict[str, Any]) -> EngineConfig:
    """The engine, as the run's file would have it. Raises RunFileError."""
    from ..inference.engines import why_not_sampled

    config = parse_run(row.config.model_dump(mode="json") | {"engines": [document]})
    problems = why_not_sampled(config)
    if problems:
        raise RunFileError(problems)
    return config.engines[0]


async def _take_out(run: str, wanted: str, state: EngineState) -> str:
    from ..db.engines import engines_of, set_engine_state
    from ..db.events import add_event

    async with access.opened_store(load_settings()) as store:
        row = _live(await access.find_run(store, run))
        record = _the_engine(await engines_of(store, row.run_id), wanted)
        await set_engine_state(store, row.run_id, record.engine_id, state, "taken out by hand")
        await add_event(store, row.run_id, "engine", f"{record.url} is {state}", {"engine": record.engine_id})
        others = [one for one in await engines_of(store, row.run_id) if one.state == EngineState.READY]
    alone = "" if others else "; the run has no other that is ready, and waits"
    return f"{record.engine_id} is {state}: it gets no more work, and what is in flight ends{alone}."


async def _read(run: str) -> "tuple[RunRow, list[EngineRecord]]":
    from ..db.engines import engines_of

    async with access.opened_store(load_settings()) as store:
        row = await access.find_run(store, run)
        return row, await engines_of(store, row.run_id)


async def _probe(records: "list[EngineRecord]") -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(_probe_one(record) for record in records)))


async def _probe_one(record: "EngineRecord") -> dict[str, Any]:
    from ..inference.connect import connect_engine
    from ..inference.engines import EngineAddress
    from ..inference.errors import EngineFailure

    facts: dict[str, Any] = {"engine": record.engine_id, "url": record.url, "state": record.state}
    secret = secret_from_environment(record.api_key_env) if record.api_key_env else None
    if record.api_key_env and not secret:
        return facts | {"up": False, "says": f"its key is in {record.api_key_env}, which is not set here"}
    engine = connect_engine(EngineAddress.of(record, secret))
    began = time.monotonic()
    try:
        async with asyncio.timeout(_PROBE_S):
            await engine.health()
            seconds = round(time.monotonic() - began, 3)
            facts |= await _holds(engine)
    except EngineFailure as failure:
        return facts | {"up": False, "says": failure.message}
    except TimeoutError:
        return facts | {"up": False, "says": f"it did not answer within {_PROBE_S:g} s"}
    finally:
        await engine.close()
    told = [f"{name} {facts[name]}" for name in ("weights", "context", "waiting") if facts.get(name) is not None]
    return facts | {"up": True, "seconds": seconds, "says": ", ".join([f"up, answered within {seconds:g} s", *told])}


async def _holds(engine: "TokenEngine | MessageEngine") -> dict[str, Any]:
    """Which weights it holds, how long a conversation may be, and how many requests wait in it."""
    from ..inference.hosted import HostedEngine

    if isinstance(engine, HostedEngine):
        return {}
    held: TokenEngine = engine  # type: ignore[assignment]
    info = await held.weight_info()
    facts = {"weights": info.label, "incarnation": info.incarnation}
    return facts | {"context": await held.context_limit(), "waiting": await held.waiting()}


def _the_engine(engines: "list[EngineRecord]", wanted: str) -> "EngineRecord":
    by_url = {record.url.rstrip("/"): record for record in engines}
    if wanted.rstrip("/") in by_url:
        return by_url[wanted.rstrip("/")]
    ids = [record.engine_id for record in engines]
    near = [name for name in ids if wanted and (name.startswith(wanted) or name.endswith(wanted))]
    if len(near) != 1:
        known = ", ".join(record.url for record in engines)
        raise CommandError(
            f"{'several engines' if near else 'no engine'} of the run {'match' if near else 'is called'} "
            f"{wanted!r}; its engines: {known or 'none'}."
        )
    return next(record for record in engines if record.engine_id == near[0])


def _live(row: "RunRow") -> "RunRow":
    if not is_live(row.state):
        raise CommandError(f"{row.run_id} is {row.state}; its engines do nothing for it any more.")
    return row


def _facts(record: "EngineRecord") -> dict[str, Any]:
    names = ("engine_id", "kind", "url", "concurrency", "api_key_env", "state", "reason", "weight_label", "incarnation")
    return {name: getattr(record, name) for name in names}
