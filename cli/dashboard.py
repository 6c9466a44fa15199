"""`atropos dashboard`: runs, groups and episodes in a browser.

Invariant: without a token it listens where only this machine can reach it.
"""

import asyncio
from importlib.util import find_spec
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer
from pydantic import SecretStr

from ..dashboard.html import ServedLinks
from ..settings import SHORTEST_TOKEN, Settings, load_settings, temporal_profile
from . import access
from .errors import CommandError

INSTALL: Final = "pip install 'atropos-durable[dashboard]'"


def installed() -> bool:
    """Whether there is what the dashboard needs; asked without importing it."""
    return find_spec("panel") is not None


def command(
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")] = 5006,
    address: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            help="What people enter to be let in; ATROPOS_DASHBOARD_TOKEN does not show in lists of processes."
        ),
    ] = None,
    temporal_ui: Annotated[
        str | None, typer.Option(help="Address of Temporal's UI, http://host:port; default: the running stack's.")
    ] = None,
) -> None:
    """Serve the dashboard until stopped."""
    if not installed():
        raise CommandError(f"The dashboard is not installed; run: {INSTALL}")
    from ..dashboard.server import is_loopback, serve

    if token is not None and len(token) < SHORTEST_TOKEN:
        raise CommandError(f"--token is not usable: it needs at least {SHORTEST_TOKEN} characters.")
    settings = load_settings(**({} if token is None else {"dashboard_token": SecretStr(token)}))
    held = None if settings.dashboard_token is None else settings.dashboard_token.get_secret_value()
    if held is None and not is_loopback(address):
        raise CommandError(
            f"Whoever reaches {address} would read every run: set ATROPOS_DASHBOARD_TOKEN, or listen on 127.0.0.1."
        )

    workflows = _workflows(settings, temporal_ui)

    def started(port: int) -> None:
        host = f"[{address}]" if ":" in address else address
        typer.echo(f"The dashboard is at http://{host}:{port}/runs")

    async def run() -> None:
        async with access.opened_store(settings, connections=settings.database_pool) as store:
            links = ServedLinks(workflows)
            await serve(store, links, address=address, port=port, token=held, started=started)

    try:
        asyncio.run(run())
    except OSError as error:
        raise CommandError(f"{address}:{port} cannot be listened on: {error.strerror or error}.") from None


def _workflows(settings: Settings, ui: str | None) -> str | None:
    """The address below which Temporal's UI has the pages of workflows; None where it is not known."""
    if ui is not None and urlsplit(ui).scheme not in ("http", "https"):
        raise CommandError(f"--temporal-ui must look like http://host:port, not {ui!r}.")
    page = access.ui_link(settings, "") if ui is None else access.workflow_page(ui, "", temporal_profile().namespace)
    return None if page is None else page.rstrip("/")
