"""Turns of weights that are not proved yet wait for the proof, and share its outcome."""

import asyncio
from typing import Any

import pytest
from atropos.contracts.ids import EpisodeKey, weight_label
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.records import PartialTurn, Sampled, VersionSpan
from atropos.contracts.states import EngineState, EpisodeState, GroupState, PublicationState
from atropos.db.batches import lease_batch
from atropos.db.endings import finish_episode
from atropos.db.engines import engine_id, engines_of, put_engines, put_version, set_engine_state
from atropos.db.episodes import load_episode, save_turn, start_episode
from atropos.db.errors import Unknown, Unsettled, WrongWeights
from atropos.db.groups import load_group
from atropos.db.partial import load_partial, prompt_digest, save_partial
from atropos.db.publishing import (
    add_first_version,
    begin_publication,
    mark_published,
    publication_state,
    settle_publication,
    wanted,
)
from atropos.db.store import Store, open_store

from .samples import (
    ENGINE,
    admitted,
    beginning,
    claimed,
    closed,
    committed,
    new_run,
    rows,
    run_config,
    sealing,
    training_run,
    versioned,
)

FAILED, LOADING = PublicationState.FAILED, PublicationState.LOADING
VERIFIED, UNVERIFIED = PublicationState.VERIFIED, PublicationState.UNVERIFIED


@pytest.fixture
async def run_id(store: Store) -> str:
    """A run whose second version was committed and whose engine is at the first."""
    run_id = await training_run(store, groups=1)
    await publish(store, run_id, 0, VERIFIED)
    await step(store, run_id, 0)
    return run_id


async def step(store: Store, run_id: str, number: int) -> None:
    await closed(store, run_id, version=0)
    await lease_batch(store, run_id)
    assert await committed(store, run_id, await claimed(store, run_id, number)) is not None


async def publish(store: Store, run_id: str, version: int, state: PublicationState, life: str = "first") -> None:
    await begin_publication(store, run_id, ENGINE, life, version)
    await settle_publication(store, run_id, ENGINE, life, version, state, "because", 0.001)


async def begun(store: Store, run_id: str, members: int = 2) -> list[EpisodeKey]:
    """The running episodes of a new group."""
    [group] = await admitted(store, run_id, size=members)
    keys = [group.key.episode(member) for member in range(members)]
    for key in keys:
        await start_episode(store, beginning(key))
    return keys


async def ended(store: Store, keys: list[EpisodeKey]) -> None:
    for key in keys:
        stop = StopReason.ANSWERED
        await finish_episode(store, key, stop=stop, failure=None, reason=None, reward=float(key.member))


async def provisional(store: Store, run_id: str) -> list[bool]:
    query = "SELECT provisional FROM turns WHERE run_id = %s ORDER BY group_no, member, attempt, turn"
    return [one for (one,) in await rows(store, query, run_id)][2:]  # without those of the step in the fixture


async def standing(store: Store, key: EpisodeKey) -> tuple[EpisodeState, FailureKind | None, float | None]:
    facts = await load_episode(store, key)
    assert facts is not None
    return facts.status, facts.failure, facts.reward


@pytest.mark.parametrize("found", [VERIFIED, UNVERIFIED])
async def test_turns_sampled_while_an_engine_loads_are_confirmed_by_its_proof(
    store: Store, run_id: str, found: PublicationState
) -> None:
    keys = await begun(store, run_id)
    await save_turn(store, keys[0], versioned(run_id, 0))
    await begin_publication(store, run_id, ENGINE, "first", 1)
    assert await publication_state(store, run_id, ENGINE, "first", 1) is LOADING
    assert (await save_turn(store, keys[0], versioned(run_id, 1, 1)))[1]
    await save_turn(store, keys[1], versioned(run_id, 1))
    assert await provisional(store, run_id) == [False, True, True]
    assert (await save_turn(store, keys[1], versioned(run_id, 1)))[1]
    await settle_publication(store, run_id, ENGINE, "first", 1, found, "fine", 0.002)
    assert await provisional(store, run_id) == [False, False, False]
    await save_turn(store, keys[1], versioned(run_id, 1, 1))
    assert await provisional(store, run_id) == [False] * 4
    await ended(store, keys)
    assert await sealing(store, keys[0].group, keys) is GroupState.SEALED


async def test_a_group_waits_for_the_proof_and_fails_as_engine_where_too_few_are_left(
    store: Store, run_id: str
) -> None:
    keys = await begun(store, run_id)
    await save_turn(store, keys[0], versioned(run_id, 0))
    await begin_publication(store, run_id, ENGINE, "first", 1)
    await save_turn(store, keys[1], versioned(run_id, 1))
    await ended(store, keys)
    with pytest.raises(Unsettled, match="until its engine has proved"):
        await sealing(store, keys[0].group, keys)
    await settle_publication(store, run_id, ENGINE, "first", 1, FAILED, "it holds others")
    assert await standing(store, keys[0]) == (EpisodeState.DONE, None, 0.0)
    assert await standing(store, keys[1]) == (EpisodeState.FAILED, FailureKind.ENGINE, None)
    assert await sealing(store, keys[0].group, keys) is GroupState.FAILED
    group = await load_group(store, keys[0].group)
    assert (group.failure, group.valid) == (FailureKind.ENGINE, 1)
    assert "weights in doubt" in (group.reason or "")
    query = "SELECT quarantined_at FROM tasks JOIN groups USING (run_id, environment, task_key)"
    assert await rows(store, query + " WHERE run_id = %s AND group_no = %s", run_id, group.group.key.group_no) == [
        (None,)
    ]


async def test_a_group_that_can_spare_the_member_is_sealed_without_it(store: Store, run_id: str) -> None:
    keys = await begun(store, run_id, members=3)
    await begin_publication(store, run_id, ENGINE, "first", 1)
    await save_turn(store, keys[0], versioned(run_id, 1))
    for key in keys[1:]:
        await save_turn(store, key, versioned(run_id, 0))
    await ended(store, keys)
    await settle_publication(store, run_id, ENGINE, "first", 1, FAILED, "it holds others")
    assert await sealing(store, keys[0].group, keys) is GroupState.SEALED
    group = await load_group(store, keys[0].group)
    assert (group.valid, group.mean_reward) == (2, 1.5)


async def test_a_running_episode_that_stood_on_wrong_weights_fails_with_what_it_spent(
    store: Store, run_id: str
) -> None:
    [key, _] = await begun(store, run_id)
    await save_turn(store, key, versioned(run_id, 0))
    await begin_publication(store, run_id, ENGINE, "first", 1)
    await save_turn(store, key, versioned(run_id, 1, 1, tokens=5))
    await settle_publication(store, run_id, ENGINE, "first", 1, FAILED, "it holds others")
    member = (await load_group(store, key.group)).members[0]
    assert (member.state, member.failure) == (EpisodeState.FAILED, FailureKind.ENGINE)
    assert member.reason == "sampled by weights in doubt: it holds others"
    assert (member.turns, member.sampled_tokens, member.policy_version) == (2, 8, 0)


async def test_wrong_weights_are_refused_until_the_engine_has_loaded_again(store: Store, run_id: str) -> None:
    [key, other] = await begun(store, run_id)
    await publish(store, run_id, 1, FAILED)
    for spans in (1, 0):
        crossing = (VersionSpan("a", 0, 0, 1), VersionSpan("b", 1, 1, 3)) if spans == 0 else versioned(run_id, 1).spans
        with pytest.raises(WrongWeights, match=r"sampled with weights it does not hold: because"):
            await save_turn(store, key, versioned(run_id, 1, spans=crossing))
    assert await provisional(store, run_id) == []
    assert (await save_turn(store, other, versioned(run_id, 0)))[1]
    await publish(store, run_id, 1, VERIFIED)
    assert (await save_turn(store, key, versioned(run_id, 1)))[1]
    assert await provisional(store, run_id) == [False, False]


async def test_turns_of_wrong_weights_are_never_confirmed_by_a_later_version(store: Store, run_id: str) -> None:
    [key, other] = await begun(store, run_id)
    await begin_publication(store, run_id, ENGINE, "first", 1)
    await save_turn(store, key, versioned(run_id, 1))
    await settle_publication(store, run_id, ENGINE, "first", 1, FAILED, "it holds others")
    await step(store, run_id, 1)
    await begin_publication(store, run_id, ENGINE, "first", 2)
    await save_turn(store, other, versioned(run_id, 2))
    await settle_publication(store, run_id, ENGINE, "first", 2, VERIFIED)
    assert (await turn_of(store, key), await turn_of(store, other)) == (True, False)


async def turn_of(store: Store, key: EpisodeKey) -> bool:
    """Whether the only turn of an episode is provisional."""
    query = "SELECT provisional FROM turns WHERE run_id = %s AND group_no = %s AND member = %s"
    [(found,)] = await rows(store, query, key.run_id, key.group_no, key.member)
    return bool(found)


@pytest.mark.parametrize("later", [("first", 2), ("second", 1), ("second", 2), ("first", 1)])
async def test_a_load_that_was_given_up_proves_nothing(store: Store, run_id: str, later: tuple[str, int]) -> None:
    """Whoever published died before the probe; what was sampled meanwhile is not covered by the next one's."""
    life, version = later
    [key, other] = await begun(store, run_id)
    await begin_publication(store, run_id, ENGINE, "first", 1)
    await save_turn(store, key, versioned(run_id, 1))
    if version == 2:
        await step(store, run_id, 1)
    await begin_publication(store, run_id, ENGINE, life, version)
    await settle_publication(store, run_id, ENGINE, life, version, VERIFIED)
    assert await standing(store, key) == (EpisodeState.FAILED, FailureKind.ENGINE, None)
    open_ones = "SELECT count(*) FROM publications WHERE run_id = %s AND state = 'loading'"
    assert await rows(store, open_ones, run_id) == [(0,)]
    assert (await save_turn(store, other, versioned(run_id, version, life=life)))[1]
    assert not await turn_of(store, other)


async def test_a_completion_carried_on_elsewhere_shares_the_doubts_of_where_it_began(store: Store, run_id: str) -> None:
    second = "http://127.0.0.1:8001/v1"
    config = run_config(engines=[{"url": "http://127.0.0.1:8000/v1"}, {"url": second}])
    await put_engines(store, run_id, config.engines)
    [key, other] = await begun(store, run_id)
    await begin_publication(store, run_id, ENGINE, "first", 1)
    label = weight_label(run_id, 1)
    spans = (VersionSpan(label, 1, 0, 1, ENGINE, "first"), VersionSpan(label, 1, 1, 3, engine_id(second), "b"))
    moved = versioned(run_id, 1, spans=spans, engine_id=engine_id(second), incarnation="b")
    await save_turn(store, key, moved)
    await settle_publication(store, run_id, ENGINE, "first", 1, FAILED, "it holds others")
    assert await standing(store, key) == (EpisodeState.FAILED, FailureKind.ENGINE, None)
    with pytest.raises(WrongWeights):
        await save_turn(store, other, moved)


async def test_what_was_kept_of_a_completion_goes_with_the_weights_that_sampled_it(store: Store, run_id: str) -> None:
    [key, other] = await begun(store, run_id)
    label = weight_label(run_id, 1)
    so_far = Sampled([1, 2], [-0.5, -0.5], (VersionSpan(label, 1, 0, 2, ENGINE, "first"),), ENGINE, "first")
    kept = PartialTurn(prompt_digest([7, 8]), so_far)
    await begin_publication(store, run_id, ENGINE, "first", 1)
    assert await save_partial(store, key, 0, kept)
    await settle_publication(store, run_id, ENGINE, "first", 1, FAILED, "it holds others")
    assert await load_partial(store, key, 0) is None
    # A stream that still runs keeps on telling; a retry must not begin there for ever.
    await save_partial(store, other, 0, kept)
    with pytest.raises(WrongWeights):
        await save_turn(store, other, versioned(run_id, 1), had_partial=True)
    assert await load_partial(store, other, 0) is None


@pytest.mark.parametrize("found", [VERIFIED, FAILED])
async def test_a_turn_stored_while_its_weights_are_judged_is_not_missed(
    store: Store, database_url: str, found: PublicationState
) -> None:
    other = await open_store(database_url)
    try:
        run_id = await training_run(store, groups=1)
        await step(store, run_id, 0)
        outcomes = set()
        for attempt in range(12):
            [key] = await begun(store, run_id, members=1)
            await begin_publication(store, run_id, ENGINE, f"life-{attempt}", 1)
            outcomes.add(await raced(store, other, key, f"life-{attempt}", found))
        allowed = {"confirmed"} if found is VERIFIED else {"failed", "refused"}
        assert outcomes <= allowed
    finally:
        await other.close()


async def raced(store: Store, other: Store, key: EpisodeKey, life: str, found: PublicationState) -> str:
    """Store a turn and settle its publication at once, on two connections; what became of the turn."""
    record = versioned(key.run_id, 1, life=life)
    stored, _ = await asyncio.gather(
        save_turn(store, key, record),
        settle_publication(other, key.run_id, ENGINE, life, 1, found, "so it is"),
        return_exceptions=True,
    )
    if isinstance(stored, WrongWeights):
        return "refused"
    assert not isinstance(stored, BaseException), stored
    status, _, _ = await standing(store, key)
    return "failed" if status is EpisodeState.FAILED else "in doubt" if await turn_of(store, key) else "confirmed"


@pytest.mark.parametrize("found", [VERIFIED, FAILED])
async def test_a_turn_that_is_being_stored_holds_the_judgement_up(store: Store, run_id: str, found: Any) -> None:
    """Both orders of the race, made by hand: whoever comes second sees the first."""
    [key, other] = await begun(store, run_id)
    await begin_publication(store, run_id, ENGINE, "first", 1)
    async with store.direct() as connection, connection.transaction():
        await connection.execute(
            "SELECT FROM publications WHERE run_id = %s AND version = 1 FOR SHARE", (run_id,)
        )  # as the statement that stores a turn does
        settling = asyncio.create_task(settle_publication(store, run_id, ENGINE, "first", 1, found, "so it is"))
        await asyncio.sleep(0.2)
        assert not settling.done()
        assert (await save_turn(store, key, versioned(run_id, 1)))[1]
    await settling
    status, _, _ = await standing(store, key)
    assert status is (EpisodeState.RUNNING if found is VERIFIED else EpisodeState.FAILED)
    assert await turn_of(store, key) == (found is FAILED)
    await begin_publication(store, run_id, ENGINE, "first", 1)
    async with store.direct() as connection, connection.transaction():
        await connection.execute(
            "UPDATE publications SET state = %s WHERE run_id = %s AND version = 1", (str(found), run_id)
        )  # as the statement that settles does
        storing = asyncio.create_task(save_turn(store, other, versioned(run_id, 1)))
        await asyncio.sleep(0.2)
        assert not storing.done()
    if found is FAILED:
        with pytest.raises(WrongWeights):
            await storing
    else:
        assert (await storing)[1]
        assert not await turn_of(store, other)


async def test_settling_twice_changes_nothing(store: Store, run_id: str) -> None:
    [key, _] = await begun(store, run_id)
    await begin_publication(store, run_id, ENGINE, "first", 1)
    await save_turn(store, key, versioned(run_id, 1))
    await settle_publication(store, run_id, ENGINE, "first", 1, VERIFIED)
    await settle_publication(store, run_id, ENGINE, "first", 1, FAILED, "too late")
    assert await publication_state(store, run_id, ENGINE, "first", 1) is VERIFIED
    assert (await standing(store, key))[0] is EpisodeState.RUNNING


async def test_engines_should_hold_the_newest_version(store: Store) -> None:
    bare = await new_run(store)
    assert await wanted(store, bare) is None
    with pytest.raises(Unknown, match="no run called"):
        await wanted(store, "run/none")
    run_id = await training_run(store, groups=1)
    first = await wanted(store, run_id)
    assert first is not None
    assert (first.version, first.path, first.published, first.noise) == (0, "/models/tiny", False, None)
    assert [await mark_published(store, run_id, 0) for _ in range(2)] == [True, False]
    await publish(store, run_id, 0, VERIFIED)
    await step(store, run_id, 0)
    second = await wanted(store, run_id)
    assert second is not None
    assert (second.version, second.label, second.digest, second.published, second.noise) == (
        *(1, weight_label(run_id, 1), "d1"),
        *(False, 0.001),
    )


@pytest.mark.parametrize(
    ("label", "path", "borrowed"),
    [
        ("{made}@0", "/models/tiny", True),
        ("{made}@1", None, False),  # no such version
        ("{made}", None, False),
        ("default", None, False),
    ],
)
async def test_what_engines_began_with_is_found_where_another_run_made_it(
    store: Store, label: str, path: str | None, borrowed: bool
) -> None:
    run_id = await new_run(store)
    await put_version(store, run_id, 0, label.format(made=await training_run(store)))
    target = await wanted(store, run_id)
    assert target is not None
    assert (target.version, target.path, target.borrowed) == (0, path, borrowed)


async def test_the_first_version_is_written_once(store: Store) -> None:
    run_id = await training_run(store)
    again = await add_first_version(store, run_id, weight_label(run_id, 0), "/models/other", None, {})
    assert (again.version, again.path) == (0, "/models/tiny")


async def test_a_health_check_from_before_a_quarantine_changes_nothing(store: Store) -> None:
    run_id = await training_run(store, groups=1)
    (engine,) = await engines_of(store, run_id)
    here = (store, run_id, engine.engine_id)
    await set_engine_state(*here, EngineState.QUARANTINED, "wrong weights")
    for late in (EngineState.READY, EngineState.DOWN):
        assert await set_engine_state(*here, late, None, seen=EngineState.READY) is EngineState.QUARANTINED
    (after,) = await engines_of(store, run_id)
    assert (after.state, after.reason) == ("quarantined", "wrong weights")
