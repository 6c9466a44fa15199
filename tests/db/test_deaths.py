"""Deaths of workers: counted once each, by call; two over one call move it apart, two such calls their function."""

import uuid

import pytest
from atropos.contracts.states import RunState
from atropos.db.deaths import (
    Apart,
    Death,
    Import,
    InlineCall,
    import_deaths,
    judged,
    record_death,
    record_import_death,
    runs_apart,
)
from atropos.db.events import ADVICE, INLINE_SLOW, add_event_once, event_texts
from atropos.db.runs import set_run_state
from atropos.db.store import Store
from hypothesis import given
from hypothesis import strategies as st

from .samples import new_run

calls = st.builds(
    InlineCall,
    st.just("run/r"),
    st.sampled_from(["e0", "e1"]),
    st.sampled_from(["0", "1"]),
    st.sampled_from(["f", "g"]),
)
deaths = st.lists(st.builds(Death, st.sampled_from("abcd"), st.lists(calls, max_size=4).map(tuple)), max_size=8)


def call(run_id: str, owner: str = "e0", function: str = "sums.look") -> InlineCall:
    return InlineCall(run_id, owner, "turn 0, call 0", function)


def a_death(*running: InlineCall) -> Death:
    return Death(uuid.uuid4().hex, running)


@given(deaths)
def test_a_call_runs_apart_from_its_second_death_on_and_never_before(told: list[Death]) -> None:
    apart = judged(told)
    for one in {one for death in told for one in death.running}:
        died = {death.name for death in told if one in death.running}
        assert (one in apart.calls) == (len(died) >= 2)


@given(deaths, deaths)
def test_the_order_of_deaths_and_telling_them_twice_change_nothing(some: list[Death], more: list[Death]) -> None:
    assert judged([*some, *more]) == judged([*more, *some, *more])


@given(deaths, deaths)
def test_what_runs_apart_stays_apart(some: list[Death], more: list[Death]) -> None:
    before, after = judged(some), judged([*some, *more])
    assert before.calls <= after.calls
    assert before.functions <= after.functions


async def test_the_second_death_over_a_call_is_told_and_moves_it_alone(store: Store) -> None:
    run_id = await new_run(store)
    killer, other = call(run_id), call(run_id, "e1")
    await record_death(store, a_death(killer, other))
    assert await runs_apart(store, run_id) == Apart()
    assert await event_texts(store, run_id, ADVICE) == []
    await record_death(store, a_death(killer))
    apart = await runs_apart(store, run_id)
    assert killer in apart
    assert other not in apart
    (text,) = await event_texts(store, run_id, ADVICE)
    assert text.startswith("inline code of sums.look killed its worker twice (turn 0, call 0 of e0); it now runs in a")


async def test_a_death_told_twice_counts_once(store: Store) -> None:
    run_id = await new_run(store)
    death = a_death(call(run_id))
    await record_death(store, death)
    await record_death(store, death)
    assert await runs_apart(store, run_id) == Apart()


async def test_a_function_that_kills_over_two_calls_runs_apart_in_all(store: Store) -> None:
    run_id = await new_run(store)
    for owner in ("e0", "e0", "e1", "e1"):
        await record_death(store, a_death(call(run_id, owner)))
    apart = await runs_apart(store, run_id)
    assert call(run_id, "e7") in apart
    assert call(run_id, "e7", "sums.other") not in apart
    assert "all its calls in this run" in (await event_texts(store, run_id, ADVICE))[-1]


async def test_a_death_is_told_to_every_run_that_the_store_knows(store: Store) -> None:
    runs = [await new_run(store), "run/none", await new_run(store)]
    for _ in range(2):
        await record_death(store, a_death(*(call(run_id) for run_id in runs)))
    for run_id in (runs[0], runs[2]):
        assert (await runs_apart(store, run_id)).calls == {call(run_id)}


async def test_deaths_over_an_import_count_by_worker_and_environment_since_the_run_was_last_changed(
    store: Store,
) -> None:
    one = Import(await new_run(store), "sums")
    other = Import(one.run_id, "words")
    for name in ("a", "b", "b"):
        assert await record_import_death(store, name, one)
    assert await record_import_death(store, "a", other)
    assert (await import_deaths(store, one), await import_deaths(store, other)) == (2, 1)
    assert await runs_apart(store, one.run_id) == Apart()
    for state in (RunState.PAUSED, RunState.RUNNING):
        await set_run_state(store, one.run_id, state, None)
    assert await import_deaths(store, one) == 0


@pytest.mark.parametrize(("run_id", "label"), [("run/none", "sums"), ("run/no\0ne", "sums"), ("run/none", "su\0ms")])
async def test_an_import_of_a_run_without_a_row_cannot_be_told_of(store: Store, run_id: str, label: str) -> None:
    one = Import(run_id, label)
    assert not await record_import_death(store, "a", one)
    assert await import_deaths(store, one) is None


async def test_the_same_advice_is_given_once(store: Store) -> None:
    run_id = await new_run(store)
    for text in ("slow", "slow", "slower"):
        await add_event_once(store, run_id, INLINE_SLOW, text)
    assert await event_texts(store, run_id, ADVICE) == ["slow", "slower"]
