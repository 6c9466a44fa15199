"""Admission: capacity is never exceeded, numbers have no gaps, each draw is made once."""

import asyncio
import math
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.records import NewGroup
from atropos.contracts.sampling import Sampling
from atropos.contracts.states import GroupState, RunState
from atropos.db.admission import (
    AdmissionState,
    admission_state,
    admit,
    insert_evaluation_groups,
    left_a_place,
)
from atropos.db.endings import finish_episode
from atropos.db.episodes import start_episode
from atropos.db.errors import Refused, Unknown
from atropos.db.evaluations import start_evaluation
from atropos.db.groups import close_group, open_groups
from atropos.db.runs import set_run_state
from atropos.db.store import Store
from atropos.db.tasks import StoredTask, load_task
from atropos.tests.db.samples import LABEL, admitted, beginning, new_group, new_run, rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW
@given(data=st.data())
async def test_racing_admissions_never_exceed_capacity(store: Store, data: st.DataObject) -> None:
    run_id = await new_run(store, "sums", "words")
    concurrency, budget = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    seen = []

    async def propose(state: AdmissionState) -> list[NewGroup]:
        room = max(0, min(concurrency - state.open, budget - state.counted))
        seen.append((state.open, room))
        loads = state.environments
        return [
            new_group(loads[n % 2].next_draw + n // 2, environment=loads[n % 2].label, key=f"{run_id}-{n}")
            for n in range(room)
        ]

    for _ in range(data.draw(st.integers(1, 4))):
        await asyncio.gather(*(admit(store, run_id, propose) for _ in range(4)))
        running = await open_groups(store, run_id)
        assert len(running) <= concurrency
        for group in running[: data.draw(st.integers(0, len(running)))]:
            failed = data.draw(st.booleans())
            state, kind = (GroupState.FAILED, FailureKind.CANCELLED) if failed else (GroupState.SEALED, None)
            await close_group(store, group.key, [], state, kind, None)
    assert all(running + room <= concurrency for running, room in seen)
    stored = await rows(store, "SELECT group_no, environment, draw, state FROM groups WHERE run_id = %s", run_id)
    assert sorted(row[0] for row in stored) == list(range(len(stored)))
    assert sum(row[3] != "failed" for row in stored) <= budget
    for label in ("sums", "words"):
        draws = sorted(row[2] for row in stored if row[1] == label)
        assert draws == list(range(len(draws)))


@SLOW
@given(data=st.data())
async def test_a_group_is_as_busy_as_its_episodes_that_are_not_done(store: Store, data: st.DataObject) -> None:
    run_id = await new_run(store)
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    members = [key for size in sizes for key in await _members(store, run_id, size)]
    worth = Fraction(len(sizes))
    for key in data.draw(st.permutations(members)):
        done = data.draw(st.booleans())
        await start_episode(store, beginning(key))
        failure = None if done else FailureKind.ENGINE
        stop = StopReason.ANSWERED if done else StopReason.FAILED
        await finish_episode(store, key, stop=stop, failure=failure, reason=None, reward=None)
        before, worth = worth, worth - Fraction(int(done), sizes[key.group_no])
        state = await admission_state(store, run_id)
        assert (state.busy, state.open) == (math.ceil(worth), len(sizes))
        if done:
            assert await left_a_place(store, key.group) == (math.ceil(worth) < math.ceil(before))


async def test_closed_groups_and_evaluations_leave_no_place_behind(store: Store) -> None:
    run_id = await new_run(store)
    [one], [other] = await _members(store, run_id, 1), await _members(store, run_id, 1)
    await close_group(store, one.group, [], GroupState.FAILED, FailureKind.CANCELLED, None)
    assert (await admission_state(store, run_id)).busy == 1
    [group] = await _evaluation(store, run_id, "aside", ["held-out"])
    assert (await admission_state(store, run_id)).busy == 2
    assert not await left_a_place(store, group.key)
    assert await left_a_place(store, other.group)


async def _members(store: Store, run_id: str, size: int) -> list[EpisodeKey]:
    [group] = await admitted(store, run_id, size=size)
    return [group.key.episode(member) for member in range(size)]


async def test_a_draw_that_leads_to_no_group_is_consumed(store: Store) -> None:
    run_id = await new_run(store)
    await _evaluation(store, run_id, "before", ["held-out"])
    [bad] = await admit(store, run_id, _proposing(new_group(0, key="poison")))
    await close_group(store, bad.key, [], GroupState.FAILED, FailureKind.ENVIRONMENT, "raises")
    seen: list[AdmissionState] = []

    async def propose(state: AdmissionState) -> list[NewGroup]:
        seen.append(state)
        assert await state.known(LABEL, ["held-out", "poison", "new"]) == {
            "held-out": "eval",
            "poison": "quarantined",
        }
        return [new_group(1, key="held-out"), new_group(2, key="poison"), new_group(3, key="new")]

    groups = await admit(store, run_id, propose)
    assert [(group.task_key, group.draw, group.key.group_no) for group in groups] == [("new", 3, 2)]
    after = await admit(store, run_id, _seeing(seen))
    assert after == []
    assert [state.environments[0].next_draw for state in seen] == [1, 4]
    assert (seen[1].open, seen[1].counted) == (2, 1)
    assert seen[1].environments[0].states == {GroupState.FAILED: 1, GroupState.ADMITTED: 1}


async def test_a_failed_proposal_moves_nothing(store: Store) -> None:
    run_id = await new_run(store)
    await admitted(store, run_id, 2)
    for groups, words in (
        ([new_group(1)], "would repeat"),
        ([new_group(2), new_group(2, key="x")], "would repeat"),
        ([new_group(2, environment="nowhere")], "no environment called 'nowhere'"),
        ([new_group(2, split="eval")], "by the evaluation"),
    ):
        with pytest.raises(Refused, match=words):
            await admit(store, run_id, _proposing(*groups))

    async def broken(state: AdmissionState) -> list[NewGroup]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await admit(store, run_id, broken)
    [group] = await admitted(store, run_id)
    assert (group.draw, group.key.group_no) == (2, 2)
    with pytest.raises(Unknown):
        await admit(store, "run/none", _proposing(new_group(0)))


async def test_a_paused_run_admits_nothing(store: Store) -> None:
    run_id = await new_run(store)
    await set_run_state(store, run_id, RunState.PAUSED, "lunch")
    assert await admitted(store, run_id, 3) == []
    await set_run_state(store, run_id, RunState.RUNNING, None)
    assert [group.draw for group in await admitted(store, run_id, 3)] == [0, 1, 2]


async def test_evaluation_groups_are_admitted_once_and_share_no_task_with_training(store: Store) -> None:
    run_id = await new_run(store)
    await admitted(store, run_id)
    groups = await _evaluation(store, run_id, "first", ["a", "b"])
    assert [(group.kind, group.draw, group.key.group_no) for group in groups] == [("eval", 0, 1), ("eval", 1, 2)]
    racing = await asyncio.gather(*(_evaluation(store, run_id, "first", ["a", "b", "c"][:2]) for _ in range(3)))
    assert all(found == groups for found in racing)
    assert [group.key.group_no for group in await admitted(store, run_id)] == [3]
    with pytest.raises(Refused, match="must not share tasks"):
        await _evaluation(store, run_id, "second", ["task-0"])
    assert Counter(group.kind for group in await open_groups(store, run_id)) == {"eval": 2, "train": 2}


async def test_a_task_is_stored_exactly(store: Store) -> None:
    run_id = await new_run(store)
    odd: dict[str, Any] = {"text": "a\x00\ud800", "large": 1e300}
    await admit(store, run_id, _proposing(new_group(0, task_data=odd, task_info={"source": "book"})))
    assert await load_task(store, run_id, LABEL, "task-0") == StoredTask(odd, {"source": "book"})
    with pytest.raises(Unknown):
        await load_task(store, run_id, LABEL, "task-1")


async def _evaluation(store: Store, run_id: str, name: str, keys: list[str]) -> list[Any]:
    await start_evaluation(
        store, run_id, name, environment=LABEL, split="eval", tasks=len(keys), samples=2, sampling=Sampling()
    )
    groups = [new_group(n, key=key, split="eval", size=2, evaluation=name) for n, key in enumerate(keys)]
    return await insert_evaluation_groups(store, run_id, name, groups)


def _proposing(*groups: NewGroup) -> Any:
    async def propose(state: AdmissionState) -> list[NewGroup]:
        return list(groups)

    return propose


def _seeing(seen: list[AdmissionState]) -> Any:
    async def propose(state: AdmissionState) -> list[NewGroup]:
        seen.append(state)
        return []

    return propose
