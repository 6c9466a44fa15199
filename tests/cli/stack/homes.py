"""Homes of stacks that tests start, and what a stack in one says of itself."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from atropos.cli.stack.files import StackHome
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.process import ProcessId
from atropos.cli.stack.state import StackState, read_state
from pydantic import SecretStr

BOTH = StackOptions(migrate=False, workers=False)
ONLY_POSTGRES = BOTH.model_copy(update={"temporal": False})


def new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="atropos-stack-", dir="/tmp"))
    folder.chmod(0o755)
    return folder


def query(url: SecretStr | None, statement: str) -> object:
    assert url is not None
    with psycopg.connect(url.get_secret_value(), autocommit=True) as connection:
        cursor = connection.execute(statement)
        row = cursor.fetchone() if cursor.description else None
    return row[0] if row else None


def process_of(state: StackState, name: str) -> ProcessId:
    process = next(part.process for part in state.parts if part.name == name)
    assert process is not None
    return process


def eventually(home: Path, wanted: Callable[[StackState], bool]) -> StackState:
    for _ in range(600):
        state = read_state(StackHome(home))
        if state is not None and wanted(state):
            return state
        time.sleep(0.05)
    raise AssertionError(f"never came to pass; last state: {state}")


def restarted(name: str) -> Callable[[StackState], bool]:
    return lambda state: any(p.name == name and p.restarts and p.status == "ready" for p in state.parts)
