"""A group that was played elsewhere is stored whole or not at all, once, and reads like one that was played here."""

import asyncio
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from atropos.contracts.episode import Score
from atropos.contracts.messages import assistant, user
from atropos.contracts.reasons import StopReason
from atropos.contracts.records import STEP_INDEX, BadRecord
from atropos.contracts.states import GroupState
from atropos.db.audit import audit_run
from atropos.db.engines import put_version
from atropos.db.episodes import episode_scores, finish_episode, load_episode, save_calls, save_turn, start_episode
from atropos.db.errors import Refused, StoreError, Unknown
from atropos.db.groups import close_group, load_group
from atropos.db.ingest import PlayedEpisode, store_group
from atropos.db.store import Store
from atropos.tests.db.samples import admitted, beginning, call, new_group, new_run, turn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NASTY = "NUL \x00, half a pair \ud83d, <script>"


async def run_of(store: Store) -> str:
    run_id = await new_run(store)
    await put_version(store, run_id, 0, "base")
    return run_id


def score(value: float | None, name: str = "right") -> Score:
    return Score(name=name, value=value, weight=1.0, metric=False)


def episode(**changes: Any) -> PlayedEpisode:
    """Two turns, of which the first calls a tool; a state that is large; text that JSONB cannot hold."""
    large = {"notes": "x" * 5000}
    known = PlayedEpisode(
        prompt=(user(NASTY),),
        state={"calls": 0},
        environment_version="v1",
        turns=[turn(0), turn(1, message=assistant(NASTY))],
        calls=[call(0, 0, state=large), call(1, STEP_INDEX, call=None, content="", reward=0.5, done=True)],
        stop=StopReason.DONE,
        scores=[score(1.0), Score(name="tries", value=2.0, weight=1.0, metric=True)],
        scorer_version="v1",
    )
    return replace(known, **changes)


async def lived(store: Store, run_id: str, episodes: list[PlayedEpisode]) -> Any:
    """The same group as workers would have stored it."""
    [group] = await admitted(store, run_id, size=len(episodes))
    members = [group.key.episode(member) for member in range(len(episodes))]
    for key, one in zip(members, episodes, strict=True):
        await start_episode(store, beginning(key, prompt=tuple(one.prompt), state=one.state))
        for number, record in enumerate(one.turns):
            await save_turn(store, key, record)
            await save_calls(store, key, [answer for answer in one.calls if answer.turn == number])
        reward = sum(part.value or 0.0 for part in one.scores if not part.metric)
        await finish_episode(
            store, key, stop=one.stop, failure=None, reason=None, reward=reward, scores=list(one.scores),
            scorer_version="v1",
        )  # fmt: skip
    await close_group(store, group.key, members, GroupState.SEALED, None, None)
    return group.key


async def test_it_reads_like_a_group_that_was_played_here(store: Store) -> None:
    run_id, other = await run_of(store), await run_of(store)
    episodes = [episode(), episode(scores=[score(0.0)])]
    there = await store_group(store, run_id, new_group(0, size=2), episodes)
    here = await lived(store, other, episodes)
    for member in range(2):
        ours = await load_episode(store, there.key.episode(member))
        theirs = await load_episode(store, here.episode(member))
        assert ours is not None
        assert theirs is not None
        assert replace(ours, key=theirs.key) == theirs
        assert await episode_scores(store, ours.key) == await episode_scores(store, theirs.key)
    whole, other_whole = await load_group(store, there.key), await load_group(store, here)
    assert (whole.valid, whole.mean_reward, whole.group.state) == (2, 0.5, GroupState.SEALED)
    assert [replace(one, key=here.episode(0)) for one in whole.members] == [
        replace(one, key=here.episode(0)) for one in other_whole.members
    ]
    for run in (run_id, other):
        assert (await audit_run(store, run)).violations == ()


async def test_the_second_one_for_a_position_changes_nothing_also_when_both_come_at_once(
    store: Store, database_url: str
) -> None:
    run_id = await run_of(store)
    group = new_group(3, size=1)
    found = await asyncio.gather(*(store_group(store, run_id, group, [episode()]) for _ in range(4)))
    assert sorted(one.new for one in found) == [False, False, False, True]
    assert len({one.key for one in found}) == 1
    again = await store_group(store, run_id, group, [episode(scores=[score(0.0)])])
    assert (again.new, again.key) == (False, found[0].key)
    with psycopg.connect(database_url) as connection:
        row = connection.execute(
            "SELECT count(*), (SELECT next_group_no FROM runs WHERE run_id = %(run)s),"
            " (SELECT next_draw FROM environments WHERE run_id = %(run)s) FROM turns WHERE run_id = %(run)s",
            {"run": run_id},
        ).fetchone()
    assert row == (2, 1, 4)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"scores": [score(float("nan"))]}, BadRecord),
        ({"scores": [score(float("inf"))]}, BadRecord),
        ({"turns": []}, StoreError),  # its calls answer turns that are not there
        ({"turns": [turn(0), turn(0)]}, StoreError),
        ({"turns": [turn(0), turn(2, segment=4)]}, StoreError),
        ({"state": {"notes": "x" * 300_000}}, BadRecord),
    ],
    ids=["NaN", "infinity", "calls without turns", "a turn twice", "no such segment", "a state too large"],
)
async def test_what_contradicts_itself_is_refused_whole(
    store: Store, changes: dict[str, Any], refused: type[Exception]
) -> None:
    run_id = await run_of(store)
    bad = Score.model_construct(name="bad", value=float("nan"), weight=1.0, metric=False)
    changes = {"scores": [bad]} if refused is BadRecord and "scores" in changes else changes
    with pytest.raises(refused):
        await store_group(store, run_id, new_group(0, size=2), [episode(), episode(**changes)])
    assert (await audit_run(store, run_id)).checked["groups"] == 0
    stored = await store_group(store, run_id, new_group(0, size=2), [episode(), episode()])
    assert (stored.new, stored.key.group_no) == (True, 0)


async def test_an_empty_group_an_unknown_run_and_an_unknown_environment_are_refused(store: Store) -> None:
    run_id = await run_of(store)
    with pytest.raises(BadRecord, match="has 0 episodes and should have 4, at least one"):
        await store_group(store, run_id, new_group(0), [])
    with pytest.raises(BadRecord, match="has 1 episodes and should have 2"):
        await store_group(store, run_id, new_group(0, size=2), [episode()])
    with pytest.raises(Unknown):
        await store_group(store, "run/nobody", new_group(0, size=1), [episode()])
    with pytest.raises(Refused, match="no environment called 'other'"):
        await store_group(store, run_id, new_group(0, size=1, environment="other"), [episode()])
    assert (await audit_run(store, run_id)).checked["groups"] == 0


WORDS = st.text(max_size=20)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=WORDS,
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30),
    rewards=st.lists(st.none() | st.floats(-5, 5), min_size=1, max_size=4),
)
async def test_any_words_ids_and_rewards_come_back_as_they_were(
    store: Store, words: str, ids: list[int], rewards: list[float | None]
) -> None:
    run_id = await run_of(store)
    said = turn(0, len(ids), sampled=ids, message=assistant(words))
    episodes = [
        episode(prompt=(user(words),), turns=[said], calls=[], stop=StopReason.ANSWERED, scores=[score(reward)])
        for reward in rewards
    ]
    stored = await store_group(store, run_id, new_group(0, size=len(rewards)), episodes)
    for member, reward in enumerate(rewards):
        facts = await load_episode(store, stored.key.episode(member))
        assert facts is not None
        assert (facts.prompt[0].text, facts.turns[0].message.text, facts.reward) == (words, words, reward)
        assert (facts.turns[0].sampled, facts.turns[0].mask) == (ids, [1] * len(ids))
    assert (await audit_run(store, run_id)).violations == ()
