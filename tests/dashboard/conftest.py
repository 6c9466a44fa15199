"""A dashboard as a person starts it, over the module's own database, and a browser to look at it."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from atropos.contracts.ids import EpisodeKey
from atropos.db.store import Store, open_store
from playwright.async_api import Browser

from ..support.scripted import make_model
from ..support.world import World, scripted_world
from .browser import chromium
from .hostile import hostile_run

_STARTS_S = 60.0
_WRONG = ("cannot be read", "RuntimeError", "KeyError", "WebSocketClosedError", "Failed sending", "Invalid unicode")
"""Never in a log: whoever closes a tab or mistypes a token has done nothing wrong."""


@dataclass(frozen=True)
class Dashboard:
    url: str


Serve = Callable[..., AbstractAsyncContextManager[Dashboard]]


def says_its_turn(prompt: str, turn: int) -> str:
    return f"turn {turn}"


@pytest.fixture(scope="module")
async def world(
    temporal_address: str, database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("model")
    async with scripted_world(temporal_address, database_url, folder, "Placed", says_its_turn) as world:
        yield world


@pytest.fixture(scope="module")
async def store(database_url: str) -> AsyncIterator[Store]:
    opened = await open_store(database_url)
    yield opened
    await opened.close()


@pytest.fixture(scope="module")
async def hostile(store: Store, tmp_path_factory: pytest.TempPathFactory) -> EpisodeKey:
    """An episode of a run in which every text is hostile; beside it one that failed."""
    return await hostile_run(store, make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def serve(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts `atropos dashboard` for a block."""
    home = tmp_path_factory.mktemp("home")

    @asynccontextmanager
    async def served(*arguments: str, **settings: str) -> AsyncIterator[Dashboard]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = Path(home) / f"{port}.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "atropos.cli.main", "dashboard", "--port", str(port), *arguments,
                env=os.environ | {"DATABASE_URL": database_url, "ATROPOS_HOME": str(home)} | settings,
                stdout=out, stderr=out,
            )  # fmt: skip
        try:
            dashboard = Dashboard(f"http://127.0.0.1:{port}")
            await _answers(dashboard, process, log)
            yield dashboard
            text = log.read_text()
            wrong = (
                "cannot be read",
                "RuntimeError",
                "KeyError",
                "WebSocketClosedError",
                "Failed sending",
                "Invalid unicode",
            )
            assert not [word for word in wrong if word in text], text
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

    return served


@pytest.fixture(scope="module")
async def dashboard(serve: Serve) -> AsyncIterator[Dashboard]:
    async with serve("--temporal-ui", "http://ui.example:8233") as found:
        yield found


async def _answers(dashboard: Dashboard, process: asyncio.subprocess.Process, log: Path) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(_STARTS_S):
        while True:
            assert process.returncode is None, log.read_text()
            try:
                if (await client.get(f"{dashboard.url}/health")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.1)
