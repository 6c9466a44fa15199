"""`atropos audit`: prove a run's ledger, its rows against each other and against Temporal.

Invariant: an audit changes nothing, and its exit code says whether it could look: 0 is a sound ledger, 1 one with a
contradiction, whose rows are named, 2 an audit that could not be made. A Temporal that is away never passes for one
that agrees.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text
from temporalio.client import Client

from ..contracts.text import one_line
from ..db.audit import CHECKS, Audit, audit_run
from ..db.store import Store
from ..settings import load_settings
from . import access
from .audit_temporal import LEFT, OVER, SETTLE_S, compare
from .errors import CommandError, tell
from .temporal import TemporalUnready

_SHOWN: Final = 20
"""Rows named of one check; `--json` names all."""
_WORKFLOWS: Final = (
    (OVER, "no workflow is over whose row is open"),
    (LEFT, "no workflow is open whose row is closed"),
)


async def audit(store: Store, client: Client, run_id: str, settle_s: float = SETTLE_S) -> Audit:
    """Check the rows of a run and hold them against Temporal, also while it runs.

    `settle_s`: how long a row and its workflow may disagree, since they cannot end at the same moment.
    """
    rows = await audit_run(store, run_id)
    found = await compare(store, client, run_id, settle_s)
    return replace(
        rows,
        violations=(*rows.violations, *found.violations),
        checked={**rows.checked, "workflows": found.known},
        unknown=found.unknown,
    )


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or an unambiguous beginning or end of it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    store_only: Annotated[
        bool, typer.Option("--store-only", help="Check the rows alone, where Temporal cannot be reached.")
    ] = False,
) -> None:
    """Check a run's rows against each other and against Temporal."""
    try:
        run_id, found = asyncio.run(_made(run, store_only))
    except Exception as error:
        if not tell(error):
            raise
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(facts(run_id, found)))
    else:
        render(run_id, found, Console())
    if found.violations:
        raise typer.Exit(1)


async def _made(run: str, store_only: bool) -> tuple[str, Audit]:
    settings = load_settings()
    async with access.opened_store(settings, long=True) as store:
        run_id = (await access.find_run(store, run)).run_id
        if store_only:
            return run_id, await audit_run(store, run_id)
        try:
            client = await access.temporal_client(settings)
        except (CommandError, TemporalUnready) as error:
            raise CommandError(f"{str(error).rstrip('.')}; `--store-only` checks the rows alone.") from None
        return run_id, await audit(store, client, run_id)


def facts(run_id: str, found: Audit) -> dict[str, Any]:
    """The audit for programs."""
    return {
        "run": run_id,
        "clean": not found.violations,
        "violations": [{"check": one.check, "row": one.row} for one in found.violations],
        "checked": dict(found.checked),
        "unknown": found.unknown,
    }


def render(run_id: str, found: Audit, console: Console) -> None:
    """Each check with what it proves and how much it looked at, and the rows that contradict it."""
    checks = [(check.name, check.proves, _looked_at(check.looks_at, found.checked)) for check in CHECKS]
    if "workflows" in found.checked:
        checks += [(name, proves, _looked_at("workflows", found.checked)) for name, proves in _WORKFLOWS]
    for name, proves, looked_at in checks:
        rows = [one.row for one in found.violations if one.check == name]
        line = Text("VIOLATED " if rows else "ok       ", style="bold red" if rows else "green")
        line.append(f"{name:<15}", style="bold")
        line.append(f" {proves} ({looked_at})", style="default")
        console.print(line, soft_wrap=True)
        for row in rows[:_SHOWN]:
            console.print(Text(f"           {one_line(row)}", style="red"), soft_wrap=True)
        if len(rows) > _SHOWN:
            console.print(Text(f"           and {len(rows) - _SHOWN} more", style="red"))
    for sentence in _summary(run_id, found):
        console.print(Text(sentence), soft_wrap=True)


def _looked_at(kind: str, checked: Mapping[str, int]) -> str:
    number = checked.get(kind)
    if number is None:
        number = sum(count for name, count in checked.items() if name not in ("spans", "workflows"))
    return f"{number} {kind}"


def _summary(run_id: str, found: Audit) -> list[str]:
    said = []
    if "workflows" not in found.checked:
        said.append("Temporal was not looked at.")
    elif found.unknown:
        said.append(
            f"Temporal does not know {found.unknown} workflows: they have not begun, or are kept no longer; "
            "nothing was said of them."
        )
    number = len(found.violations)
    verdict = f"{number} contradiction{'s' if number != 1 else ''}" if number else "no contradiction"
    return [*said, f"{one_line(run_id)}: {verdict}."]
