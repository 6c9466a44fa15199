"""Inline code that kills or holds its worker: it costs two lives at most, and the author is told what to do."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.queues import WorkerRole
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.records import EpisodeFacts
from atropos.contracts.states import EpisodeState, RunState
from atropos.contracts.workflows import RunResult
from atropos.db.episodes import load_episode
from atropos.db.events import INLINE_APART, INLINE_DEATH, INLINE_SLOW
from atropos.db.store import open_store

from ..support.lives import ENDED_ABRUPTLY
from ..support.world import ROLES, World
from .conftest import MakeWorld

ENDS_WITHIN_S = 120.0
DYING = [WorkerRole.WORKFLOWS, WorkerRole.TOOLS]
"""The process that dies serves both: a call that left the one for the other would be seen to die there."""


@dataclass
class Ended:
    """A run with deadly code that has ended."""

    world: World
    result: RunResult
    folder: Path

    @property
    def deaths(self) -> int:
        return (self.folder / "log").read_text().count(ENDED_ABRUPTLY)

    def events(self, kind: str) -> list[str]:
        return events(self.world, self.result.run_id, kind)

    async def episode(self, member: int) -> EpisodeFacts:
        store = await open_store(self.world.database)
        facts = await load_episode(store, EpisodeKey(run_id=self.result.run_id, group_no=0, member=member))
        await store.close()
        assert facts is not None
        return facts


def events(world: World, run_id: str, kind: str) -> list[str]:
    with psycopg.connect(world.database) as connection:
        found = connection.execute("SELECT text FROM events WHERE run_id = %s AND kind = %s", (run_id, kind))
        return [text for (text,) in found]


def deadly(world: World, where: str, members: int = 3) -> dict[str, Any]:
    environment = {"group_size": members, "args": {"where": where}}
    counts = {"min_valid": 1, "top_up": 0}
    return world.document("Deadly", environment=environment, budget={"groups": 1}, group=counts)


async def play(world: World, where: str, folder: Path) -> Ended:
    others = [role for role in ROLES if role not in DYING]
    async with world.process(DYING, folder), world.workers(others):
        result = await asyncio.wait_for(world.run(deadly(world, where)), ENDS_WITHIN_S)
    return Ended(world, result, folder)


@pytest.fixture(scope="module")
async def ended(make_world: MakeWorld, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Both at once: most of the time is Temporal noticing a death."""
    async with asyncio.TaskGroup() as group:
        tasks = {
            where: group.create_task(play(await make_world(), where, tmp_path_factory.mktemp(where)))
            for where in ("look", "alive")
        }
    return {where: task.result() for where, task in tasks.items()}


@pytest.mark.parametrize("where", ["look", "alive"])
async def test_code_that_kills_its_process_costs_two_workers_and_then_runs_apart(
    ended: dict[str, Ended], where: str
) -> None:
    run = ended[where]
    assert run.result.state is RunState.COMPLETED
    assert run.deaths == 2
    assert len(run.events(INLINE_DEATH)) == 2
    (told,) = run.events(INLINE_APART)
    assert f"Deadly.{where} killed its worker twice" in told
    assert "it now runs in a process of its own" in told
    assert list((run.folder / "home" / "inline").iterdir()) == []


@pytest.mark.parametrize("where", ["look", "alive"])
async def test_the_other_episodes_complete(ended: dict[str, Ended], where: str) -> None:
    for member in (1, 2):
        facts = await ended[where].episode(member)
        assert (facts.status, facts.stop, facts.reward) == (EpisodeState.DONE, StopReason.ANSWERED, 1.5)


async def test_a_tool_that_kills_its_process_is_answered_by_an_error(ended: dict[str, Ended]) -> None:
    facts = await ended["look"].episode(0)
    first, second = facts.calls
    assert first.error is not None
    assert "the process running look of" in first.error
    assert "ended (exit code 70)" in first.error
    assert second.content == "nothing at 1."
    assert (facts.status, facts.stop, facts.state["calls"]) == (EpisodeState.DONE, StopReason.ANSWERED, 1)


async def test_a_reward_that_kills_its_process_is_the_environments_failure(ended: dict[str, Ended]) -> None:
    facts = await ended["alive"].episode(0)
    assert (facts.status, facts.failure, facts.reward) == (EpisodeState.FAILED, FailureKind.ENVIRONMENT, None)
    with psycopg.connect(ended["alive"].world.database) as connection:
        (reason,) = connection.execute("SELECT reason FROM episodes WHERE member = 0").fetchall()
    assert "the process running alive of" in reason[0]


async def test_cancelling_a_run_ends_it_while_its_code_kills_workers(make_world: MakeWorld, tmp_path: Path) -> None:
    world = await make_world()
    others = [role for role in ROLES if role not in DYING]
    async with world.process(DYING, tmp_path), world.workers(others):
        handle = await world.start(deadly(world, "look", members=1))
        while ENDED_ABRUPTLY not in (tmp_path / "log").read_text():  # noqa: ASYNC110 - another process says so
            await asyncio.sleep(0.05)
        await handle.execute_update("cancel", "enough")
        result = await asyncio.wait_for(handle.result(), ENDS_WITHIN_S)
    run = Ended(world, result, tmp_path)
    facts = await run.episode(0)
    assert result.state is RunState.CANCELLED
    assert run.deaths <= 2
    assert (facts.failure, facts.calls) == (FailureKind.CANCELLED, ())


async def test_code_that_holds_the_loop_is_told_once(world: World, tmp_path: Path) -> None:
    async with world.workers():
        document = world.document("Slow", environment={"args": {"folder": str(tmp_path)}}, budget={"groups": 1})
        result = await asyncio.wait_for(world.run(document), ENDS_WITHIN_S)
    assert result.state is RunState.COMPLETED
    assert {path.name for path in tmp_path.iterdir()} == {"slept.0", "slept.1"}
    (told,) = events(world, result.run_id, INLINE_SLOW)
    assert "Slow.look held its worker" in told
    assert 'run="process"' in told
