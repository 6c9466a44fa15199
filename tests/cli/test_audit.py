"""A run's rows are held against real workflows: what ended behind their back is named, and a live run is sound."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from atropos.cli.audit import audit
from atropos.cli.temporal import prepare
from atropos.contracts.ids import (
    EpisodeKey,
    GroupKey,
    evaluation_workflow_id,
    rollout_workflow_id,
    trainer_workflow_id,
)
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.sampling import Sampling
from atropos.contracts.states import RunState
from atropos.db.audit import Audit
from atropos.db.endings import finish_episode
from atropos.db.episodes import start_episode
from atropos.db.evaluations import start_evaluation
from atropos.db.lives import lives_of
from atropos.db.runs import get_run, set_run_state
from atropos.db.store import Store, open_store
from atropos.tests.db.ledger import ledger
from atropos.tests.db.samples import LABEL, admitted, beginning
from atropos.workflows.group import search_attributes
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker

from ..support.world import World, new_namespace
from .conftest import Atropos

OPEN = 9
"""The group of the ledger that is still played, with one member."""
QUICK_S = 0.0
"""Of a contradiction that nobody will resolve."""


@pytest.fixture(scope="module")
async def store(world: World) -> AsyncIterator[Store]:
    """The world's store, after its Temporal was made fit."""
    await prepare(world.client)
    opened = await open_store(world.database)
    yield opened
    await opened.close()


async def begun(client: Client, run_id: str, workflow_id: str) -> None:
    """A workflow that nobody will work on."""
    await client.start_workflow(
        "Nothing", id=workflow_id, task_queue="nobody", search_attributes=search_attributes(run_id)
    )


async def mirrored(world: World, store: Store) -> str:
    """A ledger with an open group and evaluation, and for each of its rows a workflow that is as open as the row."""
    run_id = await ledger(store)
    [group] = await admitted(store, run_id)
    await start_episode(store, beginning(group.key.episode(0)))
    await start_evaluation(
        store, run_id, "held out", environment=LABEL, split="eval", tasks=1, samples=1, sampling=Sampling()
    )
    lives = await lives_of(store, run_id)
    rows = {run_id: True, rollout_workflow_id(run_id): True, trainer_workflow_id(run_id): True}
    rows |= {evaluation_workflow_id(run_id, name): is_open for name, is_open in lives.evaluations.items()}
    rows |= {GroupKey(run_id=run_id, group_no=number).workflow_id: is_open for number, is_open in lives.groups.items()}
    rows |= {episode(run_id, *place): is_open for place, is_open in lives.episodes.items()}
    await asyncio.gather(*(begun(world.client, run_id, workflow_id) for workflow_id in rows))
    await asyncio.gather(*(terminated(world, workflow_id) for workflow_id, is_open in rows.items() if not is_open))
    return run_id


def episode(run_id: str, group: int, member: int = 0, attempt: int = 0) -> str:
    return EpisodeKey(run_id=run_id, group_no=group, member=member, attempt=attempt).workflow_id


async def terminated(world: World, workflow_id: str) -> None:
    await world.client.get_workflow_handle(workflow_id).terminate()


def found(one: Audit) -> list[tuple[str, str]]:
    return [(violation.check, violation.row) for violation in one.violations]


async def test_rows_and_workflows_that_agree_are_no_contradiction(world: World, store: Store) -> None:
    run_id = await mirrored(world, store)
    seen = await audit(store, world.client, run_id)
    assert (found(seen), seen.unknown) == ([], 0)
    assert seen.checked["workflows"] == 3 + 1 + 10 + 19


@pytest.mark.parametrize(
    ("suffix", "row"),
    [
        ("", "run"),
        ("/rollout", "rollout"),
        ("/trainer", "trainer"),
        ("/evaluation/held out", "evaluation held out"),
        (f"/group/{OPEN}", f"group {OPEN}"),
        (f"/group/{OPEN}/episode/0", f"episode {OPEN}/0/0"),
    ],
)
async def test_a_workflow_that_ended_behind_the_store_s_back_is_named(
    world: World, store: Store, suffix: str, row: str
) -> None:
    run_id = await mirrored(world, store)
    await terminated(world, run_id + suffix)
    assert found(await audit(store, world.client, run_id, QUICK_S)) == [("workflow_over", row)]


async def test_a_row_that_is_open_again_while_its_workflow_is_over_is_named(world: World, store: Store) -> None:
    run_id = await mirrored(world, store)
    opened = "state = 'running', closed_at = NULL, valid = NULL, mean_reward = NULL"
    await changed(store, f"UPDATE groups SET {opened} WHERE run_id = %s AND group_no = 8", run_id)
    assert found(await audit(store, world.client, run_id, QUICK_S)) == [("workflow_over", "group 8")]


@pytest.mark.parametrize(
    ("suffix", "row"),
    [
        ("/group/3", "group 3"),
        ("/group/3/episode/1", "episode 3/1/0"),
        ("/group/99", "group 99"),
        ("/group/8/episode/0/attempt/4", "episode 8/0/4"),
    ],
)
async def test_a_workflow_that_goes_on_without_an_open_row_is_named(
    world: World, store: Store, suffix: str, row: str
) -> None:
    run_id = await mirrored(world, store)
    await begun(world.client, run_id, run_id + suffix)
    await listed(world.client, run_id + suffix)
    assert found(await audit(store, world.client, run_id, QUICK_S)) == [("workflow_open", row)]


async def test_workflows_of_a_run_that_has_ended_must_end(world: World, store: Store) -> None:
    run_id = await mirrored(world, store)
    await set_run_state(store, run_id, RunState.FAILED, "it had enough")
    seen = found(await audit(store, world.client, run_id, QUICK_S))
    assert seen == [("workflow_open", "run"), ("workflow_open", "rollout"), ("workflow_open", "trainer")]


@workflow.defn(name="Holds", sandboxed=False)
class Holds:
    @workflow.run
    async def run(self) -> None:
        await workflow.execute_activity("hold", start_to_close_timeout=timedelta(minutes=5))


async def test_a_run_that_has_ended_is_given_the_time_of_its_last_activity(world: World, store: Store) -> None:
    run_id = await mirrored(world, store)
    begun_holding, let_go = asyncio.Event(), asyncio.Event()

    @activity.defn
    async def hold() -> None:
        begun_holding.set()
        await let_go.wait()

    trainer = trainer_workflow_id(run_id)
    await terminated(world, trainer)
    async with Worker(world.client, task_queue=run_id, workflows=[Holds], activities=[hold]):
        handle = await world.client.start_workflow("Holds", id=trainer, task_queue=run_id)
        await asyncio.wait_for(begun_holding.wait(), 30)
        await set_run_state(store, run_id, RunState.COMPLETED, None)
        assert found(await audit(store, world.client, run_id, QUICK_S)) == []
        let_go.set()
        await handle.result()
    seen = found(await audit(store, world.client, run_id, QUICK_S))
    assert seen == [("workflow_open", "run"), ("workflow_open", "rollout")]


async def test_what_the_rows_do_not_speak_of_is_left_alone(world: World, store: Store) -> None:
    run_id = await mirrored(world, store)
    others = [f"/group/{OPEN}/episode/1", "/evaluation/just begun", "/group/x", "/notes"]
    await asyncio.gather(*(begun(world.client, run_id, run_id + suffix) for suffix in others))
    await asyncio.gather(*(listed(world.client, run_id + suffix) for suffix in others))
    seen = await audit(store, world.client, run_id, QUICK_S)
    assert (found(seen), seen.unknown) == ([], 0)


async def test_workflows_whose_histories_are_gone_are_unknown_and_no_contradiction(
    world: World, store: Store, temporal_address: str
) -> None:
    run_id = await mirrored(world, store)
    empty = await new_namespace(temporal_address)
    seen = await audit(store, empty, run_id, QUICK_S)
    assert (found(seen), seen.unknown, seen.checked["workflows"]) == ([], 33, 0)


async def test_a_row_that_follows_its_workflow_within_seconds_is_no_contradiction(world: World, store: Store) -> None:
    run_id = await mirrored(world, store)
    key = EpisodeKey(run_id=run_id, group_no=OPEN, member=0)
    await terminated(world, key.workflow_id)
    looking = asyncio.create_task(audit(store, world.client, run_id, 60.0))
    await asyncio.sleep(1.5)
    assert not looking.done()
    await finish_episode(
        store, key, stop=StopReason.FAILED, failure=FailureKind.INFRASTRUCTURE, reason="it was lost", reward=None
    )
    assert found(await asyncio.wait_for(looking, 30)) == []


async def test_a_run_is_sound_at_every_moment_of_its_life(world: World, store: Store) -> None:
    world.engine.delay_s = 0.05
    sets = [{"id": "Answers", "split": "eval", "tasks": 3, "samples": 2}]
    document = world.document("Answers", budget={"groups": 5}, eval={"sets": sets, "at_start": True})
    looks = 0
    try:
        async with world.workers():
            handle = await world.start(document)
            ended = asyncio.create_task(handle.result())
            await eventually_registered(store, handle.id)
            while not ended.done():
                seen = await audit(store, world.client, handle.id)
                assert seen.violations == ()
                looks += 1
            assert (await ended).state is RunState.COMPLETED
            seen = await audit(store, world.client, handle.id)
    finally:
        world.engine.delay_s = 0.0
    assert looks > 2
    assert (seen.violations, seen.unknown) == ((), 0)
    assert (seen.checked["groups"], seen.checked["episodes"], seen.checked["workflows"]) == (11, 22, 37)


async def test_a_run_that_is_cancelled_is_sound_too(world: World, store: Store) -> None:
    world.engine.delay_s = 1.0
    try:
        async with world.workers():
            handle = await world.start(world.document("Answers", budget={"groups": 4}))
            await eventually_registered(store, handle.id, episodes=4)
            await handle.execute_update("cancel")
            assert found(await audit(store, world.client, handle.id)) == []
    finally:
        world.engine.delay_s = 0.0


async def test_an_episode_terminated_under_a_run_whose_workers_are_gone_is_named(world: World, store: Store) -> None:
    world.engine.delay_s = 8.0
    try:
        async with world.workers():
            handle = await world.start(world.document("Answers"))
            await eventually_registered(store, handle.id, episodes=4)
        await terminated(world, episode(handle.id, 1, 0))
        assert found(await audit(store, world.client, handle.id, 2.0)) == [("workflow_over", "episode 1/0/0")]
    finally:
        world.engine.delay_s = 0.0
        await terminated(world, handle.id)


async def eventually_registered(store: Store, run_id: str, episodes: int = 0) -> None:
    """Wait until a run has its row, and so many running episodes."""
    async with asyncio.timeout(60):
        while await get_run(store, run_id) is None:  # noqa: ASYNC110 - what is awaited is in rows
            await asyncio.sleep(0.1)
        while sum((await lives_of(store, run_id)).episodes.values()) < episodes:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def listed(client: Client, workflow_id: str) -> None:
    """Wait until visibility has a workflow that was just begun."""
    async with asyncio.timeout(30):
        query = f"WorkflowId = '{workflow_id}' AND ExecutionStatus = 'Running'"
        while not [one async for one in client.list_workflows(query)]:  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(0.1)


async def changed(store: Store, statement: str, *values: object) -> None:
    """Change rows past every trigger and foreign key."""
    async with store.direct() as connection, connection.transaction():
        await connection.execute("SET LOCAL session_replication_role = replica")
        assert (await connection.execute(statement.encode(), values)).rowcount > 0


async def test_the_command_proves_a_sound_run(world: World, store: Store, atropos: Atropos) -> None:
    run_id = await mirrored(world, store)
    code, out, err = await atropos("audit", run_id, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["run"], told["clean"], told["violations"], told["unknown"]) == (run_id, True, [], 0)
    assert (told["checked"]["groups"], told["checked"]["workflows"]) == (10, 33)
    code, out, err = await atropos("audit", run_id.removeprefix("run/"))
    assert (code, err) == (0, "")
    assert "ok       never_twice     no group is in two committed steps (10 groups)" in out
    assert "ok       workflow_over   no workflow is over whose row is open (33 workflows)" in out
    assert out.endswith(f"{run_id}: no contradiction.\n")


async def test_the_command_names_what_contradicts_and_lets_no_text_through(
    world: World, store: Store, atropos: Atropos
) -> None:
    run_id = await mirrored(world, store)
    await changed(
        store,
        "INSERT INTO scores (run_id, group_no, member, attempt, name, scorer_version, value, weight, metric)"
        " SELECT %s, 8, 7, n, %s, 'v1', 1, 1, false FROM generate_series(0, 24) AS n",
        run_id,
        "[red]\x1b[2J\nright",
    )
    code, out, _ = await atropos("audit", run_id)
    assert (code, "\x1b" in out) == (1, False)
    assert "VIOLATED no_orphans" in out
    assert "\n           score 8/7/0/[red]␛[2J↵right/v1\n" in out
    assert (out.count("score 8/7/"), "           and 5 more\n" in out) == (20, True)
    assert out.endswith(f"{run_id}: 25 contradictions.\n")
    code, out, _ = await atropos("audit", run_id, "--json")
    told = json.loads(out)
    assert (code, told["clean"], len(told["violations"])) == (1, False, 25)
    assert told["violations"][0] == {"check": "no_orphans", "row": "score 8/7/0/[red]\x1b[2J\nright/v1"}


async def test_an_audit_that_cannot_be_made_says_why_and_is_no_success(
    world: World, store: Store, atropos: Atropos, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await ledger(store)
    code, out, err = await atropos("audit", "nowhere")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("atropos: There is no run 'nowhere';")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    code, out, err = await atropos("audit", run_id)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "Temporal does not answer at 127.0.0.1:1" in err
    assert err.endswith("`--store-only` checks the rows alone.\n")
    code, out, err = await atropos("audit", run_id, "--store-only")
    assert (code, err) == (0, "")
    assert "Temporal was not looked at." in out
    assert "workflow_over" not in out
