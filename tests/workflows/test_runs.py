"""Whole runs: real Temporal, real Postgres, a real HTTP engine; only the model's words are scripted."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from atropos.activities.services import Services
from atropos.contracts import queues
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.records import EpisodeFacts
from atropos.contracts.states import LONGEST_REASON, EpisodeState, GroupState, RunState
from atropos.contracts.workflows import RUN_WORKFLOW
from atropos.db.episodes import episode_scores, load_episode
from atropos.db.groups import load_group, open_groups
from atropos.db.runs import get_run
from atropos.db.summary import run_summary
from atropos.workflows.plugin import WORKFLOWS, AtroposPlugin
from starlette.responses import JSONResponse, PlainTextResponse
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer

from ..support.scripted import NO_LIMIT, tool_call
from ..support.world import World
from .conftest import looks_twice


@pytest.fixture(scope="module")
async def services(world: World) -> AsyncIterator[Services]:
    async with world.workers() as services:
        yield services


@pytest.fixture(autouse=True)
def _usual_words(world: World) -> Iterator[None]:
    yield
    world.engine.script, world.engine.down, world.engine.delay_s = looks_twice, False, 0.0
    world.engine.context = NO_LIMIT
    world.engine.failures.clear()


async def episode(services: Services, run_id: str, group: int = 0, member: int = 0, attempt: int = 0) -> EpisodeFacts:
    key = EpisodeKey(run_id=run_id, group_no=group, member=member, attempt=attempt)
    facts = await load_episode(services.store, key)
    assert facts is not None, key
    return facts


async def scores(services: Services, key: EpisodeKey) -> dict[str, float | None]:
    return {score.name: score.value for score in await episode_scores(services.store, key)}


async def eventually(check: Any, timeout_s: float = 30.0) -> Any:
    """The first true answer of an async check."""
    async with asyncio.timeout(timeout_s):
        while not (answer := await check()):  # noqa: ASYNC110 - what is awaited is in rows
            await asyncio.sleep(0.1)
    return answer


async def test_every_episode_is_stored_with_tokens_versions_and_reward_parts(
    world: World, services: Services, tmp_path: Path
) -> None:
    result = await world.run(world.document("Effects", environment={"args": {"folder": str(tmp_path)}}))
    assert result.state is RunState.COMPLETED
    for group in range(2):
        assert (
            await load_group(services.store, EpisodeKey(run_id=result.run_id, group_no=group, member=0).group)
        ).group.state is GroupState.SEALED
        for member in range(2):
            facts = await episode(services, result.run_id, group, member)
            assert (facts.status, facts.stop, facts.reward) == (EpisodeState.DONE, StopReason.ANSWERED, 1.0)
            assert [len(turn.sampled) == len(turn.logprobs) > 0 for turn in facts.turns] == [True] * 3
            assert {turn.policy_version for turn in facts.turns} == {0}
            assert facts.state["calls"] == 2
            assert await scores(services, facts.key) == {"answered": 1.0, "calls": 2.0}


async def test_the_stored_stream_is_what_the_engine_was_sent_and_returned(world: World, services: Services) -> None:
    world.engine.requests.clear()
    result = await world.run(world.document("Effects", budget={"groups": 1}))
    for member in range(2):
        facts = await episode(services, result.run_id, 0, member)
        stream: list[int] = []
        for turn in facts.turns:
            stream += turn.prompt_delta
            sent = [r for r in world.engine.requests if r["request_id"] == turn.request_id]
            assert [request["token_ids"] for request in sent] == [stream]
            stream += turn.sampled


async def test_tools_and_scorers_run_where_they_are_placed(world: World, services: Services) -> None:
    words = [
        tool_call("slow", at=1) + "\n" + tool_call("far", at=2) + "\n" + tool_call("look", at=3),
        tool_call("broken"),
        "nothing",
    ]
    world.engine.script = lambda prompt, turn: words[turn]
    result = await world.run(world.document("Placed", budget={"groups": 1}))
    facts = await episode(services, result.run_id)
    assert [(c.turn, c.index, c.content, c.error) for c in facts.calls] == [
        (0, 0, "slow sees 1", None),
        (0, 1, "far sees 2 after 1", None),
        (0, 2, "2: nothing at 3.", None),
        (1, 0, "Error: RuntimeError: the lens is cracked", "RuntimeError: the lens is cracked"),
    ]
    assert facts.stop is StopReason.ANSWERED
    assert facts.reward == 1.0 + 0.5 * 4


async def test_a_stop_condition_ends_the_episode(world: World, services: Services) -> None:
    world.engine.script = lambda prompt, turn: tool_call("look", at=1) + "\n" + tool_call("look", at=2)
    result = await world.run(world.document("Placed", budget={"groups": 1}))
    facts = await episode(services, result.run_id)
    assert (facts.stop, len(facts.turns), facts.state["calls"]) == (StopReason.CONDITION, 3, 6)


async def test_a_malformed_call_goes_back_to_the_model_as_an_error(world: World, services: Services) -> None:
    words = ["<tool_call>\n{not json}\n</tool_call>", tool_call("lok", at=1), tool_call("look", at="x"), "nothing"]
    world.engine.script = lambda prompt, turn: words[turn]
    result = await world.run(world.document("Effects", budget={"groups": 1}))
    facts = await episode(services, result.run_id)
    assert facts.stop is StopReason.ANSWERED
    errors = [call.error for call in facts.calls]
    assert len(errors) == 3
    assert all(errors)
    assert "did you mean 'look'" in str(errors[1])
    assert facts.state["calls"] == 0


async def test_the_environment_may_answer_and_reward_each_turn(world: World, services: Services) -> None:
    world.engine.script = lambda prompt, turn: f"word {turn}"
    result = await world.run(world.document("Answers", budget={"groups": 1}))
    facts = await episode(services, result.run_id)
    assert (facts.stop, facts.reward, len(facts.turns)) == (StopReason.DONE, 0.75, 3)


async def test_group_rewards_add_to_the_members_own(world: World, services: Services) -> None:
    judges = {"default": {"url": world.engine.url, "model": "judge"}}
    result = await world.run(world.document("Judged", budget={"groups": 1}, judges=judges))
    found = [await scores(services, (await episode(services, result.run_id, 0, member)).key) for member in range(2)]
    assert found == [{"total": 0.75, "wins": 0.0}, {"total": 0.75, "wins": 1.0}]
    rewards = [(await episode(services, result.run_id, 0, member)).reward for member in range(2)]
    assert rewards == [0.75, 1.75]


async def test_a_reward_that_raises_is_the_environments_failure_and_no_number(world: World, services: Services) -> None:
    document = world.document("Faulty", budget={"groups": 1, "hours": 0.001}, group={"top_up": 1})
    result = await world.run(document)
    facts = await episode(services, result.run_id)
    assert (facts.status, facts.failure, facts.reward) == (EpisodeState.FAILED, FailureKind.ENVIRONMENT, None)
    again = await episode(services, result.run_id, attempt=1)
    assert again.failure is FailureKind.ENVIRONMENT
    group = await load_group(services.store, facts.key.group)
    assert (group.group.state, group.failure) == (GroupState.FAILED, FailureKind.ENVIRONMENT)


async def test_a_run_whose_groups_all_fail_pauses_and_says_what_they_died_of(world: World, services: Services) -> None:
    handle = await world.start(world.document("Faulty", budget={"groups": 1}, group={"top_up": 0}))

    async def paused() -> bool:
        row = await get_run(services.store, handle.id)
        return row is not None and row.state is RunState.PAUSED

    await eventually(paused, 60)
    row = await get_run(services.store, handle.id)
    assert row is not None
    assert row.waiting_for is not None
    assert row.waiting_for.startswith("the last 8 groups failed, the newest by environment")
    await handle.execute_update("cancel", "enough")
    assert (await asyncio.wait_for(handle.result(), 30)).state is RunState.CANCELLED


async def test_limits_end_an_episode_and_what_exists_is_scored(world: World, services: Services) -> None:
    world.engine.script = lambda prompt, turn: tool_call("look", at=turn)
    for limits, stop in (
        ({"turns": 2}, StopReason.MAX_TURNS),
        ({"tokens": 30}, StopReason.MAX_TOKENS),
        ({"context": 150}, StopReason.CONTEXT_OVERFLOW),
    ):
        result = await world.run(world.document("Effects", environment={"limits": limits}, budget={"groups": 1}))
        facts = await episode(services, result.run_id)
        assert facts.status is EpisodeState.DONE
        assert facts.stop in (stop, StopReason.LENGTH), (limits, facts.stop)
        assert facts.reward == 0.0


async def test_an_engine_with_less_context_than_its_model_ends_an_episode_and_pauses_no_run(
    world: World, services: Services
) -> None:
    world.engine.script = lambda prompt, turn: tool_call("look", at=turn)
    document = world.document("Effects", environment={"group_size": 1}, budget={"groups": 1})
    world.engine.requests.clear()
    await world.run(document)
    second = next(one for one in world.engine.requests if "/turn/1/" in one["request_id"])
    world.engine.context = len(second["token_ids"])
    result = await asyncio.wait_for(world.run(document), 30)
    facts = await episode(services, result.run_id)
    assert (result.state, facts.status, facts.stop) == (
        RunState.COMPLETED,
        EpisodeState.DONE,
        StopReason.CONTEXT_OVERFLOW,
    )
    assert (len(facts.turns), facts.reward) == (1, 0.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"buget": 1}, "buget: unknown field; did you mean 'budget'?"),
        ({"environment": {"id": "calculater"}}, "no environment 'calculater'; did you mean 'calculator'?"),
        ({"environment": {"args": {"foldr": "x"}}}, "unknown argument 'foldr'; did you mean 'folder'?"),
        ({"model": {"path": "/nowhere"}}, "the folder /nowhere does not exist"),
    ],
)
async def test_a_bad_run_file_fails_the_run_at_once_with_its_sentence(
    world: World, services: Services, change: dict[str, Any], sentence: str
) -> None:
    handle = await world.start(world.document("Effects", **change))
    with pytest.raises(WorkflowFailureError) as failed:
        await asyncio.wait_for(handle.result(), 20)
    assert isinstance(failed.value.cause, ApplicationError)
    assert sentence in failed.value.cause.message
    assert await get_run(services.store, handle.id) is None


async def test_a_run_file_of_rubbish_fails_at_once(world: World, services: Services) -> None:
    values: list[Any] = [None, 3, "text", [], {"a": {}}]
    for rubbish in values:
        handle = await world.start(rubbish)
        with pytest.raises(WorkflowFailureError):
            await asyncio.wait_for(handle.result(), 20)


async def test_a_paused_run_admits_nothing_and_says_why(world: World, services: Services) -> None:
    world.engine.delay_s = 0.2
    handle = await world.start(world.document("Effects", budget={"groups": 4}, rollout={"concurrency": 1}))
    await eventually(lambda: get_run(services.store, handle.id))
    assert await handle.execute_update("pause", "lunch") == RunState.PAUSED

    async def at_rest() -> bool:
        return not await open_groups(services.store, handle.id)

    await eventually(at_rest)
    before = await run_summary(services.store, handle.id)
    await asyncio.sleep(1)
    assert await run_summary(services.store, handle.id) == before
    row = await get_run(services.store, handle.id)
    assert row is not None
    assert row.waiting_for == "lunch"
    world.engine.delay_s = 0
    assert await handle.execute_update("resume") == RunState.RUNNING
    assert (await asyncio.wait_for(handle.result(), 30)).state is RunState.COMPLETED


async def test_a_cancelled_run_cancels_every_open_group(world: World, services: Services) -> None:
    world.engine.delay_s = 60
    handle = await world.start(world.document("Effects", budget={"groups": 4}))

    async def in_flight() -> bool:
        return len(await open_groups(services.store, handle.id)) == 4

    await eventually(in_flight)
    assert await handle.execute_update("cancel", "enough") == RunState.CANCELLED
    assert (await asyncio.wait_for(handle.result(), 30)).state is RunState.CANCELLED

    async def nothing_open() -> bool:
        return not await open_groups(services.store, handle.id)

    await eventually(nothing_open)
    group = await load_group(services.store, EpisodeKey(run_id=handle.id, group_no=0, member=0).group)
    assert (group.group.state, group.failure) == (GroupState.FAILED, FailureKind.CANCELLED)
    assert {member.failure for member in group.members} <= {FailureKind.CANCELLED}


async def test_an_outage_pauses_admission_and_invents_no_reward(world: World, services: Services) -> None:
    world.engine.delay_s = 0.1
    handle = await world.start(world.document("Effects", budget={"groups": 6}, rollout={"concurrency": 2}))

    async def admitted() -> bool:
        return bool(await open_groups(services.store, handle.id))

    await eventually(admitted)
    world.engine.down = True

    async def says_why() -> bool:
        row = await get_run(services.store, handle.id)
        return row is not None and row.waiting_for is not None and "no engine answers" in row.waiting_for

    await eventually(says_why, 90)
    world.engine.down = False
    assert (await asyncio.wait_for(handle.result(), 60)).state is RunState.COMPLETED
    summary = await run_summary(services.store, handle.id)
    assert summary.episodes["train"].failures == {}
    assert summary.episodes["train"].mean_reward == 1.0


async def test_an_engine_that_misbehaves_is_asked_again(world: World, services: Services) -> None:
    world.engine.failures += [
        PlainTextResponse("boom", 500),
        JSONResponse({"error": "slow down"}, 429, {"retry-after": "0"}),
        PlainTextResponse("{half", 200),
        JSONResponse({"choices": []}, 200),
    ]
    result = await world.run(world.document("Effects", budget={"groups": 1}))
    summary = await run_summary(services.store, result.run_id)
    assert summary.episodes["train"].failures == {}
    assert not world.engine.failures


async def test_an_evaluation_takes_the_first_tasks_of_its_split(world: World, services: Services) -> None:
    sets = [{"id": "Effects", "split": "eval", "tasks": 3, "samples": 2}]
    result = await world.run(world.document("Effects", eval={"at_start": True, "sets": sets}))
    assert [(o.name, o.episodes, o.mean_reward, o.pass_at) for o in result.evaluations] == [
        ("start-Effects-eval", 6, 1.0, {"1": 1.0, "2": 1.0}),
        ("end-Effects-eval", 6, 1.0, {"1": 1.0, "2": 1.0}),
    ]


async def test_an_episode_of_eight_turns_is_small_in_history_and_reads_as_a_conversation(
    world: World, services: Services
) -> None:
    world.engine.script = lambda prompt, turn: tool_call("look", at=turn) if turn < 7 else "nothing"
    result = await world.run(world.document("Effects", budget={"groups": 1}))
    key = EpisodeKey(run_id=result.run_id, group_no=0, member=0)
    history = await world.history(key)
    described = await world.client.get_workflow_handle(key.workflow_id).describe()
    assert described.raw_description.workflow_execution_info.history_size_bytes <= 24 * 1024
    scheduled = [e for e in history.events if e.HasField("activity_task_scheduled_event_attributes")]
    assert len(scheduled) == 8
    summaries = [json.loads(event.user_metadata.summary.data) for event in scheduled]
    assert summaries[0] == "→ model: What is at 0?"
    assert summaries[3] == "→ model: 3: nothing at 2."


async def test_no_payload_exceeds_16_kib_whatever_is_said(world: World, services: Services) -> None:
    long = "word " * 300
    world.engine.script = lambda prompt, turn: f"{long}{tool_call('look', at=turn)}" if turn < 2 else long
    result = await world.run(world.document("Effects", budget={"groups": 1}, environment={"limits": {"turns": 3}}))
    for number in range(2):
        key = EpisodeKey(run_id=result.run_id, group_no=0, member=number)
        history = await world.history(key)
        assert max(len(event.SerializeToString()) for event in history.events) <= 16 * 1024


async def test_histories_replay(world: World, services: Services) -> None:
    sets = [{"id": "Effects", "split": "eval", "tasks": 2}]
    result = await world.run(world.document("Effects", eval={"sets": sets}))
    replayer = Replayer(workflows=WORKFLOWS, plugins=[AtroposPlugin()])
    query = f'AtroposRun = "{result.run_id}"'

    async def all_visible() -> bool:
        return (await world.client.count_workflows(query)).count >= 13

    await eventually(all_visible)
    found = [execution async for execution in world.client.list_workflows(query)]
    for execution in found:
        handle = world.client.get_workflow_handle(execution.id, run_id=execution.run_id)
        await replayer.replay_workflow(await handle.fetch_history())


@pytest.mark.parametrize("inputs", [[{}, {}], [1, 2, 3]])
async def test_more_than_one_input_fails_with_a_sentence_instead_of_being_tried_for_ever(
    world: World, services: Services, inputs: list[Any]
) -> None:
    run = world.client.execute_workflow(
        RUN_WORKFLOW, args=inputs, id=f"run/twice-{uuid.uuid4().hex[:6]}", task_queue=queues.WORKFLOWS
    )
    with pytest.raises(WorkflowFailureError) as failed:
        await asyncio.wait_for(run, 30)
    assert f"one input, its run file; {len(inputs)} were given" in str(failed.value.cause)


@pytest.mark.parametrize("run_id", ["run/{}/rollout", "run/{}\x1b[2J", "{}" + "x" * 900, "run/{} x"])
async def test_an_id_that_no_run_can_have_fails_with_a_sentence(world: World, services: Services, run_id: str) -> None:
    run = world.client.execute_workflow(
        RUN_WORKFLOW, world.document("Effects"), id=run_id.format(uuid.uuid4().hex[:6]), task_queue=queues.WORKFLOWS
    )
    with pytest.raises(WorkflowFailureError) as failed:
        await asyncio.wait_for(run, 30)
    sentence = str(failed.value.cause)
    assert "cannot be used: after run/ it has up to 100 letters" in sentence
    assert "\x1b" not in sentence


async def test_a_reason_of_any_length_is_kept_short(world: World, services: Services) -> None:
    world.engine.down = True
    try:
        handle = await world.start(world.document("Effects"))
        await eventually(lambda: registered(services, handle.id))
        await handle.execute_update("pause", "why not \0" * 20_000)
        row = await get_run(services.store, handle.id)
        assert row is not None
        assert (row.state, len(row.reason or ""), (row.reason or "")[-1]) == (RunState.PAUSED, LONGEST_REASON, "…")
        await handle.execute_update("cancel", "x" * LONGEST_REASON)
        row = await get_run(services.store, handle.id)
        assert row is not None
        assert (row.state, row.reason) == (RunState.CANCELLED, "x" * LONGEST_REASON)
    finally:
        world.engine.down = False


async def registered(services: Services, run_id: str) -> bool:
    return await get_run(services.store, run_id) is not None


async def test_a_run_cancelled_while_it_is_registered_leaves_no_row_that_runs(
    world: World, services: Services, tmp_path: Path
) -> None:
    slow = tmp_path / "slow.py"
    here = Path(__file__).parents[1] / "support" / "environments.py"
    slow.write_text(f"import time\ntime.sleep(1.5)\nexec(compile(open({str(here)!r}).read(), {str(slow)!r}, 'exec'))\n")
    handle = await world.start(world.document("Effects", environment={"id": f"{slow}:Effects"}))
    await asyncio.sleep(0.8)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    await asyncio.sleep(2.0)
    row = await get_run(services.store, handle.id)
    assert row is None or row.state is RunState.CANCELLED
