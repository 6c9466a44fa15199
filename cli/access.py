"""What a command needs from outside: the store, Temporal, and which run a person means.

Invariant: nothing is looked for in a place of its own. Addresses come from `cli.stack.addresses`; where there is none,
a sentence says how to get one. A name that fits several runs is refused, never guessed.
"""

import asyncio
import difflib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from ..settings import Settings
from .errors import CommandError
from .stack.addresses import Addresses, Origin, resolve_addresses
from .stack.files import StackHome
from .stack.state import read_state

if TYPE_CHECKING:
    from temporalio.client import Client

    from ..db.runs import RunRow
    from ..db.store import Store

_LOOKED_AT: Final = 1000
"""Newest runs among which an abbreviation is looked for."""
_CONNECTIONS: Final = 2
"""Of a command: one for its work, and one for what it tells meanwhile."""


@asynccontextmanager
async def opened_store(
    settings: Settings, *, long: bool = False, connections: int = _CONNECTIONS
) -> AsyncIterator["Store"]:
    """The trajectory store, its schema checked. `long`: for what takes as long as there are rows.

    Raises CommandError where no database is known, else StoreError.
    """
    from ..db.limits import LONG, PAGES
    from ..db.migrate import check
    from ..db.store import open_store

    url = resolve_addresses(settings).database.value
    if url is None:
        raise CommandError("No database is known: start the stack with `atropos up`, or set DATABASE_URL.")
    await asyncio.to_thread(check, url.get_secret_value())
    store = await open_store(url.get_secret_value(), pool_size=connections, limits=LONG if long else PAGES)
    try:
        yield store
    finally:
        await store.close()


async def temporal_client(settings: Settings) -> "Client":
    """A client of the Temporal that is configured, running or found. Raises CommandError or TemporalUnready."""
    address = temporal_address(resolve_addresses(settings))
    from .temporal import connect

    return await connect(address)


def temporal_address(addresses: Addresses) -> str:
    """Its address. Raises CommandError where there is none."""
    if addresses.temporal.value is None:
        raise CommandError(
            "No Temporal is known: start the stack with `atropos up` (or `temporal server start-dev`), "
            "or set TEMPORAL_ADDRESS."
        )
    return addresses.temporal.value


def ui_link(settings: Settings, workflow_id: str) -> str | None:
    """The page of a workflow in Temporal's UI; None where the UI's address is not known."""
    state = read_state(StackHome(settings.home))
    if state is None or not state.supervised() or state.temporal_ui is None:
        return None
    if resolve_addresses(settings).temporal.origin is not Origin.STACK:
        return None
    return workflow_page(state.temporal_ui, workflow_id)


def workflow_page(ui: str, workflow_id: str, namespace: str = "default") -> str:
    """URL of a workflow's page below the UI's address."""
    return f"{ui.rstrip('/')}/namespaces/{quote(namespace, safe='')}/workflows/{quote(workflow_id, safe='')}"


class UnknownRun(CommandError):
    """The store has no such run."""


async def find_run(store: "Store", text: str) -> "RunRow":
    """The run called `text`, or the only one that begins or ends so.

    Raises UnknownRun, or CommandError where it fits several.
    """
    from ..db.runs import get_run, list_runs, readable

    wanted = text.strip().rstrip("/")
    for exact in (wanted, f"run/{wanted}"):
        found = await get_run(store, exact) if wanted else None
        if found is not None:
            return found
    runs = {row.run_id: row for row in await list_runs(store, limit=_LOOKED_AT)}
    return readable(runs[the_one(wanted, runs)])


def the_one(wanted: str, known: Iterable[str]) -> str:
    """The only id that `wanted` abbreviates, at its start (`run/` may be left out) or end.

    Raises UnknownRun, or CommandError where it fits several.
    """
    ids = list(known)
    if not ids:
        raise UnknownRun("There are no runs yet; start one with `atropos run start -f run.yaml`.")
    fits = [one for one in ids if wanted and _abbreviates(wanted, one)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        shown = ", ".join(fits[:5]) + (f" and {len(fits) - 5} more" if len(fits) > 5 else "")
        raise CommandError(f"{wanted!r} fits {len(fits)} runs ({shown}); write more of the one you mean.")
    near = difflib.get_close_matches(wanted.removeprefix("run/"), [one.removeprefix("run/") for one in ids], n=1)
    hint = f"did you mean run/{near[0]}?" if near else "`atropos run list` shows them"
    raise UnknownRun(f"There is no run {wanted!r}; {hint}")


def _abbreviates(text: str, run_id: str) -> bool:
    return run_id.startswith((text, f"run/{text}")) or run_id.endswith(text)
