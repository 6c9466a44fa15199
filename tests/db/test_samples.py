"""A trainer is given exactly what was sampled: the turns of the members that count, joined, with nothing added."""

import asyncio
from typing import Any

from atropos.contracts.episode import Score
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.records import TurnRecord, VersionSpan
from atropos.contracts.training import SampleEpisode, SampleSegment
from atropos.db.batches import lease_batch
from atropos.db.endings import finish_episode
from atropos.db.episodes import save_turn, start_episode
from atropos.db.rescoring import save_rescored
from atropos.db.samples import read_batch
from atropos.db.scores import save_scores
from atropos.db.store import Store, open_store
from hypothesis import given, settings
from hypothesis import strategies as st

from .samples import LABEL, admitted, beginning, closed, played, sealing, training_run, turn, versioned

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
LOGPROBS = st.floats(-50, 0, width=32)


@st.composite
def episodes(draw: st.DrawFn) -> list[TurnRecord]:
    """Turns of one episode; each continues its segment or, after a fork, opens the next."""
    records: list[TurnRecord] = []
    segment = 0
    for index in range(draw(st.integers(1, 4))):
        opens = index == 0 or draw(st.booleans())
        segment += opens and index > 0
        sampled = draw(IDS)
        records.append(
            turn(
                index,
                segment=segment,
                opens_segment=opens,
                prompt_delta=draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)),
                sampled=sampled,
                logprobs=[draw(LOGPROBS) for _ in sampled],
                mask=[draw(st.integers(0, 1)) for _ in sampled],
                spans=(VersionSpan("base", 0, 0, len(sampled)),) if sampled else (),
                temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
            )
        )
    return records


def segments_of(records: list[TurnRecord]) -> tuple[SampleSegment, ...]:
    """What the turns say, by hand."""
    out: dict[int, SampleSegment] = {}
    for one in records:
        into = out.setdefault(one.segment, SampleSegment([], [], [], []))
        for token in one.prompt_delta:
            into.ids.append(token)
            into.mask.append(0)
            into.logprobs.append(0.0)
            into.temperatures.append(1.0)
        for token, logprob, trains in zip(one.sampled, one.logprobs, one.mask, strict=True):
            into.ids.append(token)
            into.mask.append(trains)
            into.logprobs.append(logprob)
            into.temperatures.append(one.temperature)
    return tuple(out[number] for number in sorted(out))


async def told(store: Store, key: EpisodeKey, records: list[TurnRecord], reward: float) -> None:
    await start_episode(store, beginning(key))
    for record in records:
        assert (await save_turn(store, key, record))[1]
    await finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=reward)


async def there_and_back(store: Store, members: list[list[TurnRecord]]) -> None:
    run_id = await training_run(store, groups=1)
    [group] = await admitted(store, run_id, size=len(members))
    keys = [group.key.episode(member) for member in range(len(members))]
    for key, records in zip(keys, members, strict=True):
        await told(store, key, records, float(key.member))
    await sealing(store, group.key, keys)
    await lease_batch(store, run_id)
    [read] = await read_batch(store, run_id, 0)
    assert (read.group_no, read.environment) == (group.key.group_no, LABEL)
    expected = [SampleEpisode(number, float(number), segments_of(records)) for number, records in enumerate(members)]
    assert list(read.episodes) == expected


def test_a_batch_is_the_concatenation_of_its_turns(database_url: str) -> None:
    loop = asyncio.new_event_loop()
    store = loop.run_until_complete(open_store(database_url))

    @settings(max_examples=25, deadline=None)
    @given(st.lists(episodes(), min_size=2, max_size=3))
    def holds(members: list[list[TurnRecord]]) -> None:
        loop.run_until_complete(there_and_back(store, members))

    try:
        holds()
    finally:
        loop.run_until_complete(store.close())
        loop.close()


async def test_a_forked_segment_begins_with_its_own_prompt(store: Store) -> None:
    first = turn(0, tokens=2, prompt_delta=[1, 2], sampled=[3, 4], logprobs=[-1.0, -2.0])
    said: dict[str, Any] = {"sampled": [6], "tokens": 1}
    more = turn(1, prompt_delta=[5], **said)
    fork = turn(2, segment=1, opens_segment=True, prompt_delta=[1, 2, 9], **said)
    run_id = await training_run(store, groups=1)
    [group] = await admitted(store, run_id, size=2)
    keys = [group.key.episode(member) for member in range(2)]
    await told(store, keys[0], [first, more, fork], 0.0)
    await played(store, keys[1], 1.0)
    await sealing(store, group.key, keys)
    await lease_batch(store, run_id)
    [read] = await read_batch(store, run_id, 0)
    linear, forked = read.episodes[0].segments
    assert linear.ids == [1, 2, 3, 4, 5, 6]
    assert linear.mask == [0, 0, 1, 1, 0, 1]
    assert [value for value, trains in zip(linear.logprobs, linear.mask, strict=True) if trains] == [-1.0, -2.0, -0.5]
    assert (forked.ids, forked.mask) == ([1, 2, 9, 6], [0, 0, 0, 1])


async def test_only_the_newest_valid_attempt_of_a_member_counts(store: Store) -> None:
    run_id = await training_run(store, groups=1)
    [group] = await admitted(store, run_id, size=3)
    lost, unscored, good = (group.key.episode(member) for member in range(3))
    await start_episode(store, beginning(lost))
    await save_turn(store, lost, versioned(run_id, 0))
    await finish_episode(store, lost, stop=StopReason.FAILED, failure=FailureKind.ENGINE, reason="broke", reward=None)
    again = group.key.episode(0, 1)
    await start_episode(store, beginning(again))
    await save_turn(store, again, versioned(run_id, 0, tokens=4))
    await finish_episode(store, again, stop=StopReason.ANSWERED, failure=None, reason=None, reward=1.0)
    await played(store, unscored, None)
    await played(store, good, 0.0)
    await sealing(store, group.key, [again, unscored, good])
    await lease_batch(store, run_id)
    [read] = await read_batch(store, run_id, 0)
    assert [(one.member, one.reward) for one in read.episodes] == [(0, 1.0), (1, None), (2, 0.0)]
    assert [len(one.segments[0].ids) for one in read.episodes] == [6, 5, 5]


async def test_members_that_failed_are_not_given_to_a_trainer(store: Store) -> None:
    run_id = await training_run(store, groups=1)
    [group] = await admitted(store, run_id, size=3)
    keys = [group.key.episode(member) for member in range(3)]
    for key in keys[:2]:
        await played(store, key, float(key.member))
    await start_episode(store, beginning(keys[2]))
    await finish_episode(
        store, keys[2], stop=StopReason.FAILED, failure=FailureKind.ENVIRONMENT, reason="broke", reward=None
    )
    await sealing(store, group.key, keys)
    await lease_batch(store, run_id)
    [read] = await read_batch(store, run_id, 0)
    assert [one.member for one in read.episodes] == [0, 1]


async def test_groups_come_in_order_and_nothing_of_other_batches_with_them(store: Store) -> None:
    run_id = await training_run(store)
    keys = [await closed(store, run_id) for _ in range(3)]
    await lease_batch(store, run_id)
    assert [one.group_no for one in await read_batch(store, run_id, 0)] == [keys[0].group_no, keys[1].group_no]
    assert await read_batch(store, run_id, 1) == []


async def test_rewards_are_those_of_the_version_of_the_scorers_that_is_asked_for(store: Store) -> None:
    run_id = await training_run(store, groups=1)
    [group] = await admitted(store, run_id, size=2)
    keys = [group.key.episode(member) for member in range(2)]
    for key in keys:
        await played(store, key, float(key.member))
        await save_scores(store, key, [Score(name="right", value=float(key.member), weight=1.0, metric=False)], "v1")
    await sealing(store, group.key, keys)
    for version, value in (("v2", 5.0), ("v3", 7.0)):
        changed = Score(name="right", value=value, weight=1.0, metric=False)
        assert await save_rescored(store, group.key, [(keys[0], changed)], version)
    await lease_batch(store, run_id)
    rewards = {}
    for scores in ("first", "v1", "v2", "latest", "unheard-of"):
        [read] = await read_batch(store, run_id, 0, scores)
        rewards[scores] = [one.reward for one in read.episodes]
    assert rewards == {
        "first": [0.0, 1.0], "v1": [0.0, 1.0], "v2": [5.0, 1.0], "latest": [7.0, 1.0], "unheard-of": [0.0, 1.0],
    }  # fmt: skip
    late = Score(name="right", value=9.0, weight=1.0, metric=False)
    assert not await save_rescored(store, group.key, [(keys[0], late)], "v2")
