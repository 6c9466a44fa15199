"""`run why`, as a person would ask it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from atropos.cli.main import app
from temporalio.client import Client
from typer.testing import CliRunner, Result

Why = Callable[[str, Client, str], Awaitable[str]]


@pytest.fixture
def why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Why:
    """(run, client, URL of the database) → what the command says, be it that it cannot say."""
    monkeypatch.setenv("ATROPOS_HOME", str(tmp_path / "home"))

    async def ask(run_id: str, client: Client, database: str) -> str:
        monkeypatch.setenv("TEMPORAL_ADDRESS", client.service_client.config.target_host)
        monkeypatch.setenv("TEMPORAL_NAMESPACE", client.namespace)
        monkeypatch.setenv("DATABASE_URL", database)
        result: Result = await asyncio.to_thread(CliRunner().invoke, app, ["run", "why", run_id])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    return ask


async def until_said(why: Why, words: str, run_id: str, client: Client, database: str) -> str:
    """Ask until it says so; the whole answer."""
    said = ""
    for _ in range(150):
        said = await why(run_id, client, database)
        if words in said:
            return said
        await asyncio.sleep(0.2)
    raise AssertionError(f"never said {words!r}, but {said!r}")
