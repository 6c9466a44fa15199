"""A world for commands: Temporal, a database and a scripted engine, named by the environment as a person would."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from atropos.cli.main import app
from typer.testing import CliRunner, Result

from ..support.world import World, scripted_world

Atropos = Callable[..., Any]


def says_in_colour(prompt: str, turn: int) -> str:
    """With a control sequence, which no terminal may get to see."""
    return f"\x1b[31mturn {turn}"


@pytest.fixture(scope="module")
async def world(
    temporal_address: str, database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("model")
    async with scripted_world(temporal_address, database_url, folder, "Answers", says_in_colour) as world:
        yield world


@pytest.fixture
def atropos(world: World, temporal_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Atropos:
    """Run a command as a person would; the answer is (exit code, stdout, stderr)."""
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal_address)
    monkeypatch.setenv("TEMPORAL_NAMESPACE", world.client.namespace)
    monkeypatch.setenv("DATABASE_URL", world.database)
    monkeypatch.setenv("ATROPOS_HOME", str(tmp_path / "home"))

    async def run(*arguments: str) -> tuple[int, str, str]:
        result: Result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


@pytest.fixture
def run_file(world: World, tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(world.document("Answers")))
    return path
