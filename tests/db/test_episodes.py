"""An episode's rows: written once, read back exactly, refused whole."""

import array
import asyncio
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from atropos.contracts.episode import Score
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.messages import Message, Role, ToolCall, assistant, user
from atropos.contracts.reasons import FailureKind, FinishReason, StopReason
from atropos.contracts.records import STEP_INDEX, BadRecord, TurnRecord, VersionSpan
from atropos.contracts.states import EpisodeState, GroupState
from atropos.db.encoding import MAX_STATE
from atropos.db.episodes import (
    episode_result,
    episode_scores,
    episode_view,
    finish_episode,
    load_episode,
    save_calls,
    save_scores,
    save_turn,
    start_episode,
)
from atropos.db.errors import Refused, Unknown
from atropos.db.groups import close_group
from atropos.db.store import Store
from atropos.tests.db.samples import admitted, beginning, call, late, new_run, rows, started, turn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ANSWERED: dict[str, Any] = {"stop": StopReason.ANSWERED, "failure": None, "reason": None}


async def test_an_episode_started_twice_keeps_its_first_beginning(store: Store) -> None:
    key = await started(store)
    again = await start_episode(store, beginning(key, prompt=(user("another?"),), state={"calls": 9}))
    assert again.prompt == (user("1 + 1?"),)
    assert again.state == {"calls": 0}
    assert (await rows(store, "SELECT state FROM groups WHERE run_id = %s", key.run_id)) == [("running",)]


async def test_an_episode_cannot_start_beyond_its_group(store: Store) -> None:
    [group] = await admitted(store, await new_run(store))
    with pytest.raises(Refused, match="cannot start"):
        await start_episode(store, beginning(group.key.episode(4)))
    await close_group(store, group.key, [], GroupState.FAILED, FailureKind.CANCELLED, None)
    with pytest.raises(Refused, match="cannot start"):
        await start_episode(store, beginning(group.key.episode(0)))


async def test_each_write_repeated_changes_nothing(store: Store) -> None:
    key = await started(store)
    score = Score(name="right", value=1.0)
    for _ in range(2):
        assert await save_turn(store, key, turn()) == (turn(), True)
        assert await save_calls(store, key, [call(state={"calls": 1})]) == [call(state={"calls": 1})]
        assert await save_scores(store, key, [score], "v1") == [score]
    ends = [await finish_episode(store, key, reward=1.0, scores=[score], **ANSWERED) for _ in range(2)]
    assert ends[0] == ends[1]
    assert (ends[0].turns, ends[0].sampled_tokens, ends[0].policy_version, ends[0].reward) == (1, 3, 0, 1.0)
    assert await late(store, key) == []
    facts = await load_episode(store, key)
    assert facts is not None
    assert (facts.turns, facts.state, facts.status) == ((turn(),), {"calls": 1}, EpisodeState.DONE)
    assert episode_result(facts) == ends[0]


async def test_of_two_racing_turns_one_wins_and_the_other_is_kept_as_late(store: Store) -> None:
    key = await started(store)
    ours = [turn(request_id=f"request-{number}", sampled=[number] * 3) for number in range(6)]
    found = await asyncio.gather(*(save_turn(store, key, record) for record in ours))
    assert len({record.request_id for record, _ in found}) == 1
    assert [mine for _, mine in found].count(True) == 1
    assert found[0][0] in ours
    lost = {record["request_id"] for _, record in await late(store, key)}
    assert lost == {record.request_id for record in ours} - {found[0][0].request_id}
    assert await rows(store, "SELECT count(*) FROM segments WHERE run_id = %s", key.run_id) == [(1,)]


async def test_of_racing_calls_and_endings_one_wins(store: Store) -> None:
    key = await started(store)
    await save_turn(store, key, turn())
    made = await asyncio.gather(*(save_calls(store, key, [call(content=str(number))]) for number in range(4)))
    assert len({records[0].content for records in made}) == 1
    ends = await asyncio.gather(
        *(finish_episode(store, key, reward=float(number), **ANSWERED) for number in range(4)),
        finish_episode(store, key, stop=StopReason.FAILED, failure=FailureKind.CANCELLED, reason="x", reward=None),
    )
    assert len({end.model_dump_json() for end in ends}) == 1
    assert sorted(kind for kind, _ in await late(store, key)) == ["call"] * 3 + ["ending"] * 4


async def test_what_comes_after_the_end_is_late(store: Store) -> None:
    key = await started(store)
    await save_turn(store, key, turn())
    await finish_episode(store, key, stop=StopReason.FAILED, failure=FailureKind.ENGINE, reason="lost", reward=None)
    assert await save_turn(store, key, turn(1)) == (turn(1), False)
    assert await save_calls(store, key, [call()]) == [call()]
    assert await save_scores(store, key, [Score(name="right", value=1.0)], "v1") == [Score(name="right", value=1.0)]
    assert [kind for kind, _ in await late(store, key)] == ["turn", "call", "score"]
    facts = await load_episode(store, key)
    assert facts is not None
    assert (len(facts.turns), facts.calls, facts.failure) == (1, (), FailureKind.ENGINE)


async def test_unknown_episodes_are_named(store: Store) -> None:
    key = EpisodeKey(run_id=await new_run(store), group_no=3, member=0)
    assert await load_episode(store, key) is None
    for write in (
        save_turn(store, key, turn()),
        save_calls(store, key, [call()]),
        save_scores(store, key, [Score(name="right", value=1.0)], "v1"),
        finish_episode(store, key, reward=1.0, **ANSWERED),
    ):
        with pytest.raises(Unknown, match=r"group/3/episode/0"):
            await write


async def test_an_episode_that_never_started_can_fail(store: Store) -> None:
    [group] = await admitted(store, await new_run(store))
    key = group.key.episode(2)
    end = await finish_episode(
        store, key, stop=StopReason.FAILED, failure=FailureKind.ENVIRONMENT, reason="prompt: boom", reward=None
    )
    assert (end.valid, end.failure, end.turns) == (False, FailureKind.ENVIRONMENT, 0)
    facts = await load_episode(store, key)
    assert facts is not None
    assert (facts.status, facts.prompt) == (EpisodeState.FAILED, ())


async def test_a_failure_is_never_a_number_and_a_judge_leaves_it_unscored(store: Store) -> None:
    failed, unscored = await started(store), await started(store)
    end = await finish_episode(
        store, failed, stop=StopReason.ANSWERED, failure=FailureKind.INFRASTRUCTURE, reason="gone", reward=1.0
    )
    assert (end.valid, end.reward, end.stop) == (False, None, StopReason.ANSWERED)
    part = Score(name="judged", value=None)
    end = await finish_episode(
        store, unscored, stop=StopReason.ANSWERED, failure=FailureKind.JUDGE, reason="down", reward=None, scores=[part]
    )
    assert (end.valid, end.reward) == (True, None)
    assert await episode_scores(store, unscored) == [part]
    with pytest.raises(BadRecord, match="needs a failure kind"):
        await finish_episode(store, failed, stop=StopReason.FAILED, failure=None, reason=None, reward=None)


async def test_scores_of_the_whole_group_join_the_reward_after_the_end(store: Store) -> None:
    key = await started(store)
    own = [Score(name="right", value=1.0, weight=0.5), Score(name="length", value=90.0, metric=True)]
    await finish_episode(store, key, reward=0.5, scores=own, **ANSWERED)
    wins = Score(name="wins", value=0.25, weight=2.0)
    await save_scores(store, key, [wins], "v1")
    facts = await load_episode(store, key)
    assert facts is not None
    assert facts.reward == 1.0
    assert await episode_scores(store, key) == [*own, wins]
    await save_scores(store, key, [Score(name="wins", value=9.0)], "v2")
    assert (await episode_scores(store, key))[-1] == wins
    await close_group(store, key.group, [key], GroupState.SEALED, None, None)
    await save_scores(store, key, [Score(name="tidy", value=9.0)], "v1")
    facts = await load_episode(store, key)
    assert facts is not None
    assert facts.reward == 1.0


async def test_a_fork_keeps_its_prompt_in_its_segment(store: Store) -> None:
    key = await started(store)
    forked = turn(1, segment=1, opens_segment=True, prompt_delta=[1, 2, 3, 4])
    for record in (turn(0), forked, turn(2, segment=1)):
        await save_turn(store, key, record)
    facts = await load_episode(store, key)
    assert facts is not None
    assert facts.turns == (turn(0), forked, turn(2, segment=1))
    stored = "SELECT octet_length(prompt_delta) FROM turns WHERE run_id = %s ORDER BY turn"
    assert await rows(store, stored, key.run_id) == [(8,), (0,), (8,)]
    kept = "SELECT segment, first_turn, octet_length(prompt) FROM segments WHERE run_id = %s ORDER BY segment"
    assert await rows(store, kept, key.run_id) == [(0, 0, None), (1, 1, 16)]
    with pytest.raises(Refused):
        await save_turn(store, key, turn(3, segment=2))


async def test_calls_given_together_are_kept_or_refused_together(store: Store) -> None:
    key = await started(store)
    await save_turn(store, key, turn())
    with pytest.raises(BadRecord, match="must be finite"):
        await save_calls(store, key, [call(), call(0, STEP_INDEX, call=None, reward=math.nan)])
    with pytest.raises(Refused):
        await save_calls(store, key, [call(), call(5)])
    step = call(0, STEP_INDEX, call=None, reward=0.5, done=True, info={"x": 1}, replies=(user("more"),))
    assert await rows(store, "SELECT count(*) FROM tool_calls WHERE run_id = %s", key.run_id) == [(0,)]
    await save_calls(store, key, [call(0, 1), call(), step])
    facts = await load_episode(store, key)
    assert facts is not None
    assert facts.calls == (step, call(), call(0, 1))
    seen = episode_view(facts)
    assert [outcome.content for outcome in seen.outcomes] == ["2", "2"]
    assert (seen.step_rewards, seen.turns[0].info, seen.turns[0].sampled_tokens) == ((0.5,), {"x": 1}, 3)
    assert [message.role for message in seen.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.TOOL, Role.USER]


async def test_the_newest_state_is_read_small_large_or_odd(store: Store) -> None:
    key = await started(store)
    large = {"board": "x" * 5000}
    odd = {"best": math.inf, "name": "a\x00\ud800"}
    for index, state in enumerate(({"n": 1}, large, None, odd, {"n": 2}, large)):
        await save_turn(store, key, turn(index))
        await save_calls(store, key, [call(index, state=state)])
        facts = await load_episode(store, key)
        assert facts is not None
        assert facts.state == (large if state is None else state)
    assert await rows(store, "SELECT count(*) FROM blobs WHERE run_id = %s", key.run_id) == [(2,)]
    with pytest.raises(BadRecord, match="replaying seed and actions"):
        await save_calls(store, key, [call(0, 1, state={"board": "x" * MAX_STATE})])


async def test_text_that_jsonb_cannot_hold_is_kept_exactly_and_marked(store: Store) -> None:
    [group] = await admitted(store, await new_run(store))
    key, bad = group.key.episode(0), "a\x00b\ud83d\ude00c"
    made = ToolCall(id="1", name="add", arguments={bad: [bad, math.inf]}, raw=bad)
    said = Message(role=Role.ASSISTANT, content=bad, reasoning="fine \\u0000", tool_calls=(made,))
    await start_episode(store, beginning(key, prompt=(user(bad), user("good"))))
    record = turn(message=said)
    answer = call(call=made, content=bad, error=bad, info={bad: bad})
    await save_turn(store, key, record)
    await save_calls(store, key, [answer])
    await save_turn(store, key, turn(1, message=assistant("fine \\u0000")))
    facts = await load_episode(store, key)
    assert facts is not None
    assert facts.prompt == (user(bad), user("good"))
    assert facts.turns[0] == record
    assert facts.calls == (answer,)
    assert await save_calls(store, key, [answer]) == [answer]
    shown = await rows(
        store, "SELECT lossy, message->>'content' FROM turns WHERE run_id = %s ORDER BY turn", key.run_id
    )
    assert shown == [(True, "a\ufffdb\ufffd\ufffdc"), (False, "fine \\u0000")]
    assert await late(store, key) == []
    await finish_episode(store, key, stop=StopReason.FAILED, failure=FailureKind.TOOL, reason="\x00\ud800", reward=None)
    assert await rows(store, "SELECT reason FROM episodes WHERE run_id = %s", key.run_id) == [("\ufffd\ufffd",)]


attempts = itertools.count(1)
token_ids = st.integers(0, 2**31 - 1)
floats32 = st.floats(-(2.0**99), 2.0**99, width=32)  # below the largest number that is taken
anything = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | anything,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(anything, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def sampled_turns(draw: st.DrawFn) -> TurnRecord:
    sampled = draw(st.lists(st.tuples(token_ids, floats32, st.integers(0, 1)), max_size=40))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(sampled) - 1)), max_size=3))) if len(sampled) > 1 else []
    edges = [0, *cuts, len(sampled)]
    spans = tuple(VersionSpan(f"v{n}", n, a, b) for n, (a, b) in enumerate(itertools.pairwise(edges)) if b > a)
    made = ToolCall(
        id=draw(anything), name=draw(anything), arguments=draw(st.dictionaries(anything, plain, max_size=2))
    )
    return turn(
        message=Message(role=Role.ASSISTANT, content=draw(anything), tool_calls=(made,)),
        prompt_delta=draw(st.lists(token_ids, max_size=20)),
        sampled=[token for token, _, _ in sampled],
        logprobs=[logprob for _, logprob, _ in sampled],
        mask=[mask for _, _, mask in sampled],
        spans=spans,
        finish=draw(st.sampled_from(FinishReason)),
        temperature=draw(st.floats(0, 10)),
        provisional=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(record=sampled_turns())
async def test_any_turn_is_read_back_identically(store: Store, group_key: EpisodeKey, record: TurnRecord) -> None:
    key = group_key.model_copy(update={"attempt": next(attempts)})
    await start_episode(store, beginning(key))
    assert await save_turn(store, key, record) == (record, True)
    facts = await load_episode(store, key)
    assert facts is not None
    [stored] = facts.turns
    assert array.array("f", stored.logprobs).tobytes() == array.array("f", record.logprobs).tobytes()
    assert replace(stored, logprobs=record.logprobs, message=record.message) == record
    assert without_nan(stored.message.model_dump()) == without_nan(record.message.model_dump())


def without_nan(value: Any) -> Any:
    """Plain data in which NaN, which equals nothing, is the word for it."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


@pytest.fixture(scope="module")
async def group_key(store: Store) -> EpisodeKey:
    return await started(store)
