"""Episodes resume: whatever dies, what was said, done and paid for stays said, done and paid for once."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.queues import WorkerRole
from atropos.contracts.reasons import StopReason
from atropos.contracts.records import EpisodeFacts
from atropos.contracts.states import EpisodeState, RunState
from atropos.contracts.workflows import RunResult
from atropos.db.episodes import episode_scores, load_episode
from atropos.db.late import TAKEN
from atropos.db.store import Store, open_store

from ..support.boundaries import Boundaries
from ..support.scripted import Script, scripted_engine, tool_call
from ..support.world import ROLES, World, new_namespace
from .conftest import looks_twice

LONG_S = 280.0
MakeWorld = Callable[[Script], Awaitable[World]]


@pytest.fixture(scope="module")
async def make_world(temporal_address: str, fresh_database: Callable[[], str], model: Path) -> AsyncIterator[MakeWorld]:
    """Makes worlds that know nothing of each other."""
    async with AsyncExitStack() as stack:

        async def make(script: Script) -> World:
            engine = await stack.enter_async_context(scripted_engine(model, script))
            return World(await new_namespace(temporal_address), fresh_database(), engine)

        yield make


def reaches_twice(prompt: str, turn: int) -> str:
    """Two calls of the scheduled tool, then the answer."""
    return tool_call("reach", at=turn) if turn < 2 else "nothing"


# --- killed at every boundary ---------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Which process dies, around which activities, and every boundary that must have been reached."""

    environment: str
    script: Script
    roles: Sequence[WorkerRole]
    boundaries: frozenset[str]
    asked: list[int]
    """How often the engine is asked for each turn."""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def activities(self) -> list[str]:
        return sorted({name.split(".")[0] for name in self.boundaries} - {"effect"})


def around(*places: str) -> set[str]:
    return {f"{place}.{moment}" for place in places for moment in ("before", "after")}


EFFECTS = {"effect.0", "effect.1"}
"""Between an effect outside and the row that says so."""
PLANS = {
    "workflows": Plan(
        "Effects",
        looks_twice,
        [WorkerRole.WORKFLOWS, WorkerRole.TOOLS],
        frozenset(around("start_episode", "answer_turn.0", "answer_turn.1", "finish_episode", "close_group") | EFFECTS),
        [1, 1, 1],
    ),
    "model": Plan(
        "Effects",
        looks_twice,
        [WorkerRole.MODEL],
        frozenset(f"sample_turn.{turn}.{moment}" for turn in range(3) for moment in ("before", "paid", "after")),
        [2, 2, 2],
    ),
    "tools": Plan(
        "Far",
        reaches_twice,
        [WorkerRole.TOOLS],
        frozenset(around("run_tool.0.0", "run_tool.1.0", "score_episode") | EFFECTS),
        [1, 1, 1],
    ),
    "control": Plan(
        "Effects",
        looks_twice,
        [WorkerRole.CONTROL],
        frozenset(around("register_run", "reconcile", "admit_groups", "set_run_state")),
        [1, 1, 1],
    ),
    "evaluation": Plan(
        "Effects",
        looks_twice,
        [WorkerRole.CONTROL],
        frozenset(around("start_evaluation", "next_evaluation_groups", "finish_evaluation")),
        [1, 1, 1],
        {"eval": {"sets": [{"id": "Effects", "split": "eval", "tasks": 1}]}},
    ),
}


@dataclass
class Walk:
    """A run whose worker died at every boundary, and the same run undisturbed."""

    world: World
    calm: RunResult
    run: RunResult
    requests: list[str]
    """Ids of the requests that the engine got during the disturbed run."""
    folder: Path


async def walk(world: World, plan: Plan, folder: Path) -> Walk:
    def document(name: str, **args: str) -> dict[str, Any]:
        (folder / name).mkdir()
        environment = {"group_size": 1, "args": {"folder": str(folder / name), **args}}
        return world.document(plan.environment, environment=environment, budget={"groups": 1}, **plan.changes)

    async with world.workers():
        calm = await world.run(document("calm"))
    world.engine.requests.clear()
    deadly = {"boundaries": str(folder / "boundaries")} if plan.boundaries >= EFFECTS else {}
    disturbed = document("disturbed", **deadly)
    others = [role for role in ROLES if role not in plan.roles]
    async with world.process(plan.roles, folder, die_around=plan.activities), world.workers(others):
        run = await asyncio.wait_for(world.run(disturbed), LONG_S)
    return Walk(world, calm, run, [str(request["request_id"]) for request in world.engine.requests], folder)


@pytest.fixture(scope="module")
async def walks(make_world: MakeWorld, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Walk]:
    """All of them at once: most of the time is Temporal noticing a death."""
    async with asyncio.TaskGroup() as group:
        tasks = {
            name: group.create_task(walk(await make_world(plan.script), plan, tmp_path_factory.mktemp(name)))
            for name, plan in PLANS.items()
        }
    return {name: task.result() for name, task in tasks.items()}


@pytest.fixture(params=list(PLANS))
def plan_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def walked(walks: dict[str, Walk], plan_name: str) -> Walk:
    return walks[plan_name]


@pytest.fixture
async def store(walked: Walk) -> AsyncIterator[Store]:
    store = await open_store(walked.world.database)
    yield store
    await store.close()


async def facts_of(store: Store, run_id: str, group: int = 0) -> EpisodeFacts:
    facts = await load_episode(store, EpisodeKey(run_id=run_id, group_no=group, member=0))
    assert facts is not None
    return facts


async def told(store: Store, run_id: str) -> dict[str, Any]:
    """What an episode came to, without what names the run or the try."""
    facts = await facts_of(store, run_id)
    scores = await episode_scores(store, facts.key)
    turns = [(t.turn, t.segment, t.prompt_delta, t.sampled, t.logprobs, t.spans, t.finish) for t in facts.turns]
    return {
        "end": (facts.status, facts.stop, facts.failure, facts.reward),
        "turns": turns,
        "calls": [(call.turn, call.index, call.content, call.error) for call in facts.calls],
        "count": facts.state["calls"],
        "scores": sorted((score.name, score.value) for score in scores),
    }


def test_the_worker_died_at_every_boundary(walked: Walk, plan_name: str) -> None:
    assert Boundaries(walked.folder / "boundaries").reached == PLANS[plan_name].boundaries


async def test_a_killed_episode_ends_as_an_undisturbed_one(walked: Walk, store: Store) -> None:
    disturbed, calm = await told(store, walked.run.run_id), await told(store, walked.calm.run_id)
    assert disturbed == calm
    assert disturbed["end"][:2] == (EpisodeState.DONE, StopReason.ANSWERED)
    assert walked.run.state is RunState.COMPLETED
    assert [o.mean_reward for o in walked.run.evaluations] == [o.mean_reward for o in walked.calm.evaluations]


async def test_each_effect_happened_once_however_often_it_was_tried(walked: Walk, store: Store, plan_name: str) -> None:
    facts = await facts_of(store, walked.run.run_id)
    folder = walked.folder / "disturbed"
    effects = {path.stem for path in folder.glob("*.effect")}
    tries = (folder / "tries").read_text().split()
    assert set(facts.state["seen"]) <= effects
    assert len(facts.state["seen"]) == len(facts.calls) == 2
    assert len(effects) == 2 * (1 + len(walked.run.evaluations))
    assert set(tries) == effects
    if PLANS[plan_name].boundaries >= EFFECTS:
        assert all(tries.count(key) >= 2 for key in effects)


async def test_each_model_call_is_stored_once_and_paid_again_only_where_it_was_not(
    walked: Walk, store: Store, plan_name: str
) -> None:
    facts = await facts_of(store, walked.run.run_id)
    prefix = f"{facts.key.workflow_id}/turn/"
    asked = [request.removeprefix(prefix) for request in walked.requests if request.startswith(prefix)]
    assert [sum(1 for one in asked if one.startswith(f"{turn}/")) for turn in range(3)] == PLANS[plan_name].asked
    for turn in facts.turns:
        last = [request for request in walked.requests if request.startswith(f"{prefix}{turn.turn}/")][-1]
        assert turn.request_id == last
    assert [turn.turn for turn in facts.turns] == [0, 1, 2]


def test_nothing_failed_and_nothing_was_written_twice(walked: Walk) -> None:
    disturbed, calm = walked.world.rows(walked.run.run_id), walked.world.rows(walked.calm.run_id)
    late = disturbed.pop("late_results")
    assert all(TAKEN in row for row in late)
    assert {table: len(rows) for table, rows in disturbed.items()} == {
        table: len(rows) for table, rows in calm.items() if table != "late_results"
    }
