"""A home for each test, and nothing of the surroundings in it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from atropos.cli.stack.commands import down
from atropos.cli.stack.files import StackHome
from atropos.cli.stack.running import running_stack
from atropos.cli.stack.state import read_kept, write_kept

from .homes import ONLY_POSTGRES, new_folder


@pytest.fixture
def empty_home() -> Iterator[Path]:
    folder = new_folder()
    yield folder
    down(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def seed() -> Iterator[Path]:
    """A home whose Postgres is initialised, to be copied: initdb is most of what a first start costs."""
    folder = new_folder()
    with running_stack(folder, ONLY_POSTGRES):
        pass
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def home(empty_home: Path, seed: Path) -> Path:
    """A home that was up before."""
    subprocess.run(["cp", "-a", str(seed / "postgres"), str(empty_home)], check=True)
    kept = read_kept(StackHome(seed)).model_copy(update={"ports": {}})
    write_kept(StackHome(empty_home), kept)
    return empty_home


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("TEMPORAL_", "DATABASE_URL", "ATROPOS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", "/nonexistent/temporal.toml")
