"""Reading only what was added gives what reading everything would."""

from typing import Any

from atropos.activities.memory import EpisodeMemory
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.reasons import StopReason
from atropos.contracts.states import EpisodeState
from atropos.db.episodes import finish_episode, load_episode, refresh_episode, save_calls, save_turn
from atropos.db.store import Store
from hypothesis import given, settings
from hypothesis import strategies as st

from .samples import call, started, turn

STEPS = st.lists(st.sampled_from(["turn", "call", "state", "read"]), max_size=12)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
async def test_a_remembered_episode_is_the_stored_one(store: Store, steps: list[str]) -> None:
    key = await started(store)
    memory = EpisodeMemory(store)
    turns, calls = 0, 0
    for step in steps:
        if step == "turn":
            await save_turn(store, key, turn(turns, opens_segment=turns == 0))
            turns, calls = turns + 1, 0
        elif step in ("call", "state") and turns:
            state: dict[str, Any] = {"state": {"calls": turns, "at": calls}} if step == "state" else {}
            await save_calls(store, key, [call(turns - 1, calls, **state)])
            calls += 1
        elif step == "read":
            assert await memory.episode(key) == await load_episode(store, key)
    assert await memory.episode(key) == await load_episode(store, key)


async def test_an_ending_is_seen_and_an_unknown_episode_is_none(store: Store) -> None:
    key = await started(store)
    memory = EpisodeMemory(store)
    known = await memory.episode(key)
    assert known is not None
    await finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=0.5)
    ended = await refresh_episode(store, known)
    assert ended is not None
    assert (ended.status, ended.stop, ended.reward) == (EpisodeState.DONE, StopReason.ANSWERED, 0.5)
    assert await memory.episode(EpisodeKey(run_id="run/nowhere", group_no=0, member=0)) is None


async def test_memory_is_bounded_and_forgetting_costs_only_a_read(store: Store) -> None:
    memory = EpisodeMemory(store, tokens=200)
    keys = [await started(store) for _ in range(6)]
    for key in keys:
        assert await memory.episode(key) is not None
    assert len(memory._known) == 3
    assert [await memory.episode(key) for key in keys] == [await load_episode(store, key) for key in keys]
