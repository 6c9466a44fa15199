"""An environment whose import hangs or kills its worker: it costs two lives, and then the run is refused."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from atropos.cli.run_steer import why_unregistered
from atropos.contracts.activities import BAD_RUN_FILE
from atropos.contracts.queues import WorkerRole
from atropos.contracts.states import RunState
from atropos.db.events import IMPORT_DEATH
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError

from ..support.world import ROLES, World
from .conftest import MakeWorld

ENDS_WITHIN_S = 120.0
STUCK_S = 3.0
IMPORTING = [WorkerRole.CONTROL]
"""The role of the process that registers, and dies."""
GOOD = """
from atropos.tests.support.environments import Effects

class Chosen(Effects):
    pass
"""
LOOPS = "while True:\n    pass\n"
BAD = {
    "sleeps": "import time\n\ntime.sleep(10**6)\n",
    "exits": "import os\n\nos._exit(70)\n",
    "crashes": "import ctypes\n\nctypes.string_at(0)\n",
}
BEGUN = "begins to import"
"""Said by each try, in the worker's log."""


def module(folder: Path, top_level: str) -> Path:
    """A module whose import says so, and then does this."""
    path = folder / "chosen.py"
    path.write_text(f'import sys\n\nprint("{BEGUN}", file=sys.stderr, flush=True)\n{top_level}{GOOD}')
    return path


def document(world: World, path: Path, **changes: Any) -> dict[str, Any]:
    return world.document("Effects", environment={"id": f"{path}:Chosen"}, budget={"groups": 1}, **changes)


@dataclass
class Refused:
    """What became of a run whose import ends its worker. `said`: what `run why` said before and after a death."""

    run_id: str
    error: ApplicationError
    path: Path
    tries: int
    said: tuple[str, str]
    rows: list[Any]
    after: RunState
    """How another run ended on the same worker, once the file was right."""


async def refused(world: World, top_level: str, folder: Path) -> Refused:
    path, log = module(folder, top_level), folder / "log"
    others = [role for role in ROLES if role not in IMPORTING]
    async with world.process(IMPORTING, folder, stuck_s=STUCK_S), world.workers(others):
        handle = await world.start(document(world, path))
        said = [await until_said(world, handle.id, "A worker is registering it", "It tries register_run again")]
        said.append(await until_said(world, handle.id, "It tries register_run again"))
        with pytest.raises(WorkflowFailureError) as caught:
            await asyncio.wait_for(handle.result(), ENDS_WITHIN_S)
        tries = log.read_text().count(BEGUN)
        module(folder, "")
        after = await asyncio.wait_for(world.run(document(world, path)), ENDS_WITHIN_S)
    with psycopg.connect(world.database) as connection:
        rows = connection.execute("SELECT FROM runs WHERE run_id = %s", (handle.id,)).fetchall()
    assert isinstance(caught.value.cause, ApplicationError)
    return Refused(handle.id, caught.value.cause, path, tries, (said[0], said[1]), rows, after.state)


async def until_said(world: World, run_id: str, *words: str) -> str:
    """What `run why` says once it says one of these."""
    async with asyncio.timeout(60):
        while True:
            said = " ".join(await why_unregistered(world.client, run_id))
            if any(one in said for one in words):
                return said
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
async def runs(make_world: MakeWorld, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refused]:
    """All at once: most of the time is Temporal noticing a death."""
    async with asyncio.TaskGroup() as group:
        tasks = {
            name: group.create_task(refused(await make_world(), code, tmp_path_factory.mktemp(name)))
            for name, code in BAD.items()
        }
    return {name: task.result() for name, task in tasks.items()}


@pytest.mark.parametrize("name", BAD)
async def test_an_import_that_ends_its_worker_costs_two_and_the_run_is_refused_with_a_sentence(
    runs: dict[str, Refused], name: str
) -> None:
    run = runs[name]
    assert run.tries == 2
    assert run.error.type == BAD_RUN_FILE
    assert run.error.message.startswith(f"importing the environment Chosen ({run.path}:Chosen) ended 2 workers: ")
    assert f"`atropos env check {run.path}:Chosen` imports it" in run.error.message
    assert run.rows == []


@pytest.mark.parametrize("name", BAD)
async def test_the_worker_serves_the_next_run_once_the_file_is_right(runs: dict[str, Refused], name: str) -> None:
    assert runs[name].after is RunState.COMPLETED


@pytest.mark.parametrize("name", BAD)
async def test_why_says_what_becomes_of_the_registration(runs: dict[str, Refused], name: str) -> None:
    first, later = runs[name].said
    assert "no worker has taken it up" not in first
    assert "its worker gives no sign of life (it died, hangs, or cannot reach Temporal)" in later


async def test_a_run_whose_environment_begins_to_hang_is_paused_and_goes_on_once_it_is_put_right(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    """It has a row: its deaths are rows, and a person who resumes it has begun anew."""
    world = await make_world()
    path, once = module(tmp_path, ""), [role for role in ROLES if role not in IMPORTING]
    async with world.workers(once):
        world.engine.down = True
        async with world.process(IMPORTING, tmp_path, stuck_s=STUCK_S):
            handle = await world.start(document(world, path))
            await until_row(world, "SELECT FROM runs WHERE waiting_for IS NOT NULL")
        module(tmp_path, LOOPS)
        world.engine.down = False
        async with world.process(IMPORTING, tmp_path, stuck_s=STUCK_S):
            await until_row(world, "SELECT FROM runs WHERE state = 'paused' AND reason LIKE '%%ended 2 workers%%'")
            with psycopg.connect(world.database) as connection:
                deaths = connection.execute("SELECT text FROM events WHERE kind = %s", (IMPORT_DEATH,)).fetchall()
            assert deaths == [("a worker died while it imported the environment Chosen",)] * 2
            module(tmp_path, "")
            await handle.execute_update("resume")
            result = await asyncio.wait_for(handle.result(), ENDS_WITHIN_S)
    assert result.state is RunState.COMPLETED


async def until_row(world: World, query: str) -> None:
    async with asyncio.timeout(ENDS_WITHIN_S):
        while True:
            with psycopg.connect(world.database) as connection:
                if connection.execute(query, ()).fetchall():
                    return
            await asyncio.sleep(0.1)
