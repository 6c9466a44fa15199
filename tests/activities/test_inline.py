"""Where inline code runs: in place until two workers died over it; then local calls are refused, others run apart."""

import dataclasses
import logging
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from atropos.activities.inline import RUNS_APART, InlineCode
from atropos.contracts.reasons import RunAt
from atropos.db.deaths import Death, InlineCall, record_death
from atropos.db.store import Store, open_store
from atropos.environments.faults import BadEnvironment
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ..db.samples import new_run


@pytest.fixture(scope="module")
async def store(database_url: str) -> AsyncIterator[Store]:
    opened = await open_store(database_url)
    yield opened
    await opened.close()


async def runs_apart(inline: InlineCode, call: InlineCall, placed: RunAt, *, local: bool) -> bool:
    async def body() -> bool:
        async with inline.running(call, placed) as apart:
            return apart

    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(environment.info, is_local=local)
    return await environment.run(body)


async def test_two_deaths_refuse_a_local_call_and_move_the_scheduled_one_apart(store: Store) -> None:
    run_id = await new_run(store)
    call = InlineCall(run_id, "e0", "turn 0, call 0", "sums.look")
    for _ in range(2):
        for local in (True, False):
            assert not await runs_apart(InlineCode(store), call, RunAt.INLINE, local=local)
        await record_death(store, Death(uuid.uuid4().hex, (call,)))
    with pytest.raises(ApplicationError, match=r"sums\.look runs in a process of its own") as refused:
        await runs_apart(InlineCode(store), call, RunAt.INLINE, local=True)
    assert (refused.value.type, refused.value.non_retryable) == (RUNS_APART, True)
    assert await runs_apart(InlineCode(store), call, RunAt.INLINE, local=False)
    assert not await runs_apart(InlineCode(store), call, RunAt.PROCESS, local=False)


async def test_a_scheduled_call_knows_of_a_death_at_once(store: Store) -> None:
    run_id = await new_run(store)
    call = InlineCall(run_id, "e0", "score", "sums.right")
    inline = InlineCode(store)
    assert not await runs_apart(inline, call, RunAt.INLINE, local=True)
    for _ in range(2):
        await record_death(store, Death(uuid.uuid4().hex, (call,)))
    assert await runs_apart(inline, call, RunAt.INLINE, local=False)


async def test_a_worker_without_a_folder_to_write_in_says_so_and_serves(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file")
    inline = InlineCode(store)
    with caplog.at_level(logging.WARNING):
        await inline.open(tmp_path / "home" / "inline", "postgresql://here/db")
    assert "set ATROPOS_HOME to a folder of yours" in caplog.text
    call = InlineCall(await new_run(store), "e0", "score", "sums.right")
    assert not await runs_apart(inline, call, RunAt.INLINE, local=True)
    await inline.close()


def dead_over_an_import(folder: Path, database: str, run_id: str) -> None:
    """A worker of the folder that is killed while it imports."""
    owner = subprocess.run(
        [sys.executable, "-c", _DIES, str(folder), database, run_id], capture_output=True, text=True, check=False
    )
    assert owner.returncode == -signal.SIGKILL, owner.stderr


_DIES = """
import asyncio, os, signal, sys
from pathlib import Path
from atropos.activities.inline import InlineCode
from atropos.db.store import open_store

async def main(folder, database, run_id):
    inline = InlineCode(await open_store(database))
    await inline.open(Path(folder), database)
    with await inline.importing(run_id, "sums", "sums.py:Sums"):
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("registered", [False, True])
async def test_an_import_that_killed_two_workers_is_refused_to_all_that_come_after(
    store: Store, database_url: str, tmp_path: Path, registered: bool
) -> None:
    """Also where the run has no row that could say so; another run's import is tried."""
    run_id = await new_run(store) if registered else f"run/{uuid.uuid4().hex}"
    for _ in range(2):
        dead_over_an_import(tmp_path, database_url, run_id)
    for _ in range(2):
        inline = InlineCode(store)
        await inline.open(tmp_path, database_url)
        with pytest.raises(BadEnvironment, match=r"importing the environment sums \(sums.py:Sums\) ended 2 workers"):
            await inline.importing(run_id, "sums", "sums.py:Sums")
        tried = []
        for other in ((run_id, "words"), ("run/another", "sums")):
            with await inline.importing(*other, "sums.py:Sums"):
                tried.append(other)
        assert len(tried) == 2
        await inline.close()
