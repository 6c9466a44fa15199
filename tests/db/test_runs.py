"""Runs, groups, engines: states move along the arrows only, and what is counted is what happened."""

import asyncio

import pytest
from atropos.contracts.engines import EngineConfig, EngineKind
from atropos.contracts.episode import Score
from atropos.contracts.ids import GroupKey
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.records import BadRecord
from atropos.contracts.runfile import RunFileError
from atropos.contracts.states import EngineState, EpisodeState, GroupState, IllegalTransition, RunState
from atropos.db.engines import engine_id, engines_of, put_engines, put_version, set_engine_state, versions
from atropos.db.episodes import finish_episode, load_episode, save_turn, start_episode
from atropos.db.errors import Refused, RunExists, Unknown
from atropos.db.groups import close_group, fail_orphans, load_group, open_groups
from atropos.db.runs import create_run, get_run, list_runs, run_summary, set_run_state, set_waiting, tune_run
from atropos.db.store import Store
from atropos.tests.db.samples import (
    LABEL,
    admitted,
    beginning,
    mixture,
    new_run,
    rows,
    run_config,
    turn,
)


async def test_the_same_run_twice_is_one_run_and_another_document_is_refused(store: Store) -> None:
    first, second = await asyncio.gather(*(create_run(store, "run/twin", run_config(), mixture()) for _ in range(2)))
    assert first == second == await get_run(store, "run/twin")
    assert (first.state, first.concurrency, first.weights) == (RunState.RUNNING, 16, {LABEL: 1.0})
    assert first.config == run_config()
    with pytest.raises(RunExists, match="another run file"):
        await create_run(store, "run/twin", run_config(seed=3), mixture())
    assert (await list_runs(store, limit=1))[0].run_id == "run/twin"


async def test_a_run_file_that_postgres_cannot_hold_is_refused(store: Store) -> None:
    bad = run_config(environments=[{"id": LABEL, "args": {"text": "a\x00"}}])
    with pytest.raises(RunFileError, match="NUL"):
        await create_run(store, "run/bad", bad, mixture())
    assert await get_run(store, "run/bad") is None


async def test_run_states_move_along_arrows_and_one_racer_wins(store: Store) -> None:
    run_id = await new_run(store)
    assert await set_run_state(store, run_id, RunState.PAUSED, "lunch") is RunState.PAUSED
    assert await set_run_state(store, run_id, RunState.PAUSED, "again") is RunState.PAUSED
    row = await get_run(store, run_id)
    assert row is not None
    assert (row.reason, row.ended_at) == ("lunch", None)
    ends = await asyncio.gather(
        *(set_run_state(store, run_id, state, None) for state in (RunState.COMPLETED, RunState.CANCELLED)),
        return_exceptions=True,
    )
    assert sorted(type(end).__name__ for end in ends) == ["IllegalTransition", "RunState"]
    with pytest.raises(IllegalTransition, match="cannot become running"):
        await set_run_state(store, run_id, RunState.RUNNING, None)
    with pytest.raises(Unknown, match="run list"):
        await set_run_state(store, "run/none", RunState.PAUSED, None)
    with pytest.raises(Refused, match="only a live run"):
        await tune_run(store, run_id, 3, {})


async def test_a_live_run_is_tuned_or_refused_whole(store: Store) -> None:
    run_id = await new_run(store, "sums", "words")
    row = await tune_run(store, run_id, 3, {"words": 2.5})
    assert (row.concurrency, row.weights) == (3, {"sums": 1.0, "words": 2.5})
    for concurrency, weights in ((0, {}), (None, {"nowhere": 1.0}), (5, {"sums": float("nan")}), (7, {"none": 2.0})):
        with pytest.raises(Refused):
            await tune_run(store, run_id, concurrency, weights)
    assert await get_run(store, run_id) == row


async def test_waiting_for_writes_only_changes(store: Store) -> None:
    run_id = await new_run(store)
    await set_waiting(store, run_id, "engines down")
    before = await rows(store, "SELECT xmin::text, waiting_for FROM runs WHERE run_id = %s", run_id)
    await set_waiting(store, run_id, "engines down")
    assert before == await rows(store, "SELECT xmin::text, waiting_for FROM runs WHERE run_id = %s", run_id)
    await set_run_state(store, run_id, RunState.CANCELLED, None)
    await set_waiting(store, run_id, "too late")
    row = await get_run(store, run_id)
    assert row is not None
    assert row.waiting_for is None


async def test_a_group_is_closed_once_over_the_members_that_count(store: Store) -> None:
    run_id = await new_run(store)
    [group] = await admitted(store, run_id)
    for member, reward in enumerate((1.0, 0.5, None)):
        key = group.key.episode(member)
        await start_episode(store, beginning(key))
        await save_turn(store, key, turn())
        await finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=reward)
    lost, again = group.key.episode(3), group.key.episode(3, attempt=1)
    await start_episode(store, beginning(lost))
    await finish_episode(store, lost, stop=StopReason.FAILED, failure=FailureKind.ENGINE, reason="gone", reward=None)
    await start_episode(store, beginning(again))
    await save_turn(store, again, turn())
    facts = await load_group(store, group.key)
    assert [(member.key.attempt, member.state) for member in facts.members] == [
        (0, EpisodeState.DONE),
        (0, EpisodeState.DONE),
        (0, EpisodeState.DONE),
        (1, EpisodeState.RUNNING),
    ]
    members = [member.key for member in facts.members]
    closings = await asyncio.gather(
        close_group(store, group.key, members, GroupState.SEALED, None, None),
        close_group(store, group.key, members[:1], GroupState.SEALED, None, None),
        close_group(store, group.key, [], GroupState.FAILED, FailureKind.ENGINE, "late"),
    )
    assert len({closing.model_dump_json() for closing in closings}) == 1
    [(tokens,)] = await rows(store, "SELECT sampled_tokens FROM groups WHERE run_id = %s", run_id)
    assert tokens == 12
    ended = await load_episode(store, again)
    assert ended is not None
    assert (ended.status, ended.failure is None) == (EpisodeState.FAILED, False)
    assert (await load_group(store, group.key)).members[3].sampled_tokens == 3


async def test_the_mean_is_over_valid_scored_members(store: Store) -> None:
    [group] = await admitted(store, await new_run(store))
    keys = [group.key.episode(member) for member in range(4)]
    for key, reward, failure in zip(keys, (1.0, 0.0, None, 9.0), (None, None, None, FailureKind.TOOL), strict=True):
        await start_episode(store, beginning(key))
        await finish_episode(store, key, stop=StopReason.ANSWERED, failure=failure, reason=None, reward=reward)
    result = await close_group(store, group.key, keys, GroupState.SEALED, None, None)
    assert (result.state, result.valid, result.mean_reward) == (GroupState.SEALED, 3, 0.5)
    with pytest.raises(BadRecord):
        await close_group(store, group.key, keys, GroupState.FAILED, None, None)
    with pytest.raises(BadRecord):
        await close_group(store, group.key, [keys[0].model_copy(update={"group_no": 9})], GroupState.SEALED, None, None)
    with pytest.raises(Unknown):
        await load_group(store, GroupKey(run_id=group.key.run_id, group_no=9))


async def test_only_a_failure_of_its_own_quarantines_a_task(store: Store) -> None:
    run_id = await new_run(store)
    own, cancelled, orphan, _ = await admitted(store, run_id, 4)
    await close_group(store, own.key, [], GroupState.FAILED, FailureKind.ENVIRONMENT, "raises\x00")
    await close_group(store, cancelled.key, [], GroupState.FAILED, FailureKind.CANCELLED, None)
    await start_episode(store, beginning(orphan.key.episode(0)))
    assert await fail_orphans(store, [orphan.key, own.key], "its worker was lost") == 1
    quarantined = "SELECT task_key, quarantine_reason FROM tasks WHERE run_id = %s AND quarantined_at IS NOT NULL"
    assert await rows(store, quarantined, run_id) == [(own.task_key, "raises\ufffd")]
    assert [group.draw for group in await open_groups(store, run_id)] == [3]
    failures = await rows(store, "SELECT failure FROM groups WHERE run_id = %s AND draw < 3 ORDER BY draw", run_id)
    assert failures == [("environment",), ("cancelled",), ("infrastructure",)]


async def test_the_summary_counts_what_happened(store: Store) -> None:
    run_id = await new_run(store)
    first, second = await admitted(store, run_id, 2)
    for member in range(3):
        key = first.key.episode(member)
        await start_episode(store, beginning(key))
        await save_turn(store, key, turn(0))
        await save_turn(store, key, turn(1))
    done, failed = first.key.episode(0), first.key.episode(1)
    part = [Score(name="right", value=0.5)]
    await finish_episode(store, done, stop=StopReason.DONE, failure=None, reason=None, reward=0.5, scores=part)
    await finish_episode(store, failed, stop=StopReason.FAILED, failure=FailureKind.TOOL, reason=None, reward=None)
    await close_group(store, second.key, [], GroupState.SEALED, None, None)
    await set_waiting(store, run_id, "engines down")
    summary = await run_summary(store, run_id)
    assert (summary.turns, summary.sampled_tokens, summary.open_groups) == (6, 18, 1)
    assert {(count.kind, count.state): count.count for count in summary.groups} == {
        ("train", GroupState.RUNNING): 1,
        ("train", GroupState.SEALED): 1,
    }
    train = summary.episodes["train"]
    assert train.states == {EpisodeState.DONE: 1, EpisodeState.FAILED: 1, EpisodeState.RUNNING: 1}
    assert (train.stops, train.failures) == ({StopReason.DONE: 1, StopReason.FAILED: 1}, {FailureKind.TOOL: 1})
    assert (train.mean_reward, train.scored, summary.waiting_for) == (0.5, 1, "engines down")
    with pytest.raises(Unknown):
        await run_summary(store, "run/none")


async def test_engines_keep_their_state_when_they_are_registered_again(store: Store) -> None:
    run_id = await new_run(store)
    url = "http://user:pw@gpu0:8000/v1"
    await put_engines(store, run_id, (EngineConfig(url=url), EngineConfig(url="http://gpu1:8000")))
    name = engine_id(url)
    assert name == engine_id(url + "/")
    assert "pw" not in name
    await set_engine_state(store, run_id, name, EngineState.DOWN, "no answer")
    await set_engine_state(store, run_id, name, EngineState.READY, None, "step-1", "boot-2")
    await set_engine_state(store, run_id, name, EngineState.QUARANTINED, "wrong weights")
    with pytest.raises(IllegalTransition, match="cannot become down"):
        await set_engine_state(store, run_id, name, EngineState.DOWN, None)
    with pytest.raises(Unknown):
        await set_engine_state(store, run_id, "elsewhere", EngineState.DOWN, None)
    await put_engines(store, run_id, (EngineConfig(url=url, kind=EngineKind.DEV, concurrency=2),))
    [engine] = [record for record in await engines_of(store, run_id) if record.engine_id == name]
    assert (engine.state, engine.reason, engine.weight_label, engine.incarnation) == (
        EngineState.QUARANTINED,
        "wrong weights",
        "step-1",
        "boot-2",
    )
    assert (engine.kind, engine.concurrency) == (EngineKind.DEV, 2)


async def test_a_label_names_one_version_for_ever(store: Store) -> None:
    run_id = await new_run(store)
    racing = await asyncio.gather(*(put_version(store, run_id, 0, f"base-{n}") for n in range(3)))
    assert sorted(racing, key=str) == [0, None, None]
    assert await put_version(store, run_id, 1, "step-1", "/weights/1") == 1
    assert await put_version(store, run_id, 2, "step-1") == 1
    assert list((await versions(store, run_id)).values()) == [0, 1]
