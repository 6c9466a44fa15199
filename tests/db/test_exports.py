"""What the views of conversations say is what was stored, and exports are those views."""

from typing import Any

import pytest
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.messages import ImagePart, Message, Role, TextPart, ToolCall, assistant, system, user
from atropos.contracts.reasons import StopReason
from atropos.contracts.records import STEP_INDEX, CallRecord
from atropos.db.endings import finish_episode
from atropos.db.episodes import save_calls, start_episode
from atropos.db.exports import Wanted, dpo_pairs, sft_examples
from atropos.db.store import Store
from atropos.db.turns import save_turn

from .ledger import ledger
from .samples import admitted, beginning, closed, new_run, started, training_run, turn


async def rows(found: Any) -> list[dict[str, Any]]:
    return [row async for row in found]


async def conversation(store: Store, key: EpisodeKey) -> dict[str, Any]:
    query = (
        "SELECT prompt, completion, lossy FROM conversations"
        " WHERE (run_id, group_no, member, attempt) = (%s, %s, %s, %s)"
    )
    async with store.direct() as connection:
        found = await connection.execute(query, (key.run_id, key.group_no, key.member, key.attempt))
        row = await found.fetchone()
    assert row is not None
    return dict(zip(("prompt", "completion", "lossy"), row, strict=True))


async def ended(store: Store, key: EpisodeKey, reward: float | None = 1.0) -> None:
    await finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=reward)


async def test_a_conversation_reads_as_chat_messages_in_the_order_in_which_they_were_said(store: Store) -> None:
    key = await started(store)
    calls = (
        ToolCall(id="b", name="add", arguments={"a": [2, "é"]}),
        ToolCall(id="a", name="", problem="it has no name", raw="{broken"),
    )
    await save_turn(store, key, turn(0, message=assistant("let me see", calls)))
    answers = [CallRecord(0, index, one, f"answer {index}") for index, one in enumerate(calls)]
    await save_calls(store, key, answers)
    await save_turn(store, key, turn(1, message=Message(role=Role.ASSISTANT, content="three", reasoning="1 + 2")))
    replies = (user("are you sure?"), system("be brief"))
    await save_calls(store, key, [CallRecord(1, STEP_INDEX, None, replies=replies)])
    await save_turn(store, key, turn(2, message=assistant("yes")))
    await ended(store, key)
    assert await conversation(store, key) == {
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "completion": [
            {
                "role": "assistant",
                "content": "let me see",
                "tool_calls": [
                    {
                        "id": "b",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": [2, "é"]}'},
                    },
                    {"id": "a", "type": "function", "function": {"name": "", "arguments": "{broken"}},
                ],
            },
            {"role": "tool", "content": "answer 0", "tool_call_id": "b", "name": "add"},
            {"role": "tool", "content": "answer 1", "tool_call_id": "a"},
            {"role": "assistant", "content": "three", "reasoning_content": "1 + 2"},
            {"role": "user", "content": "are you sure?"},
            {"role": "system", "content": "be brief"},
            {"role": "assistant", "content": "yes"},
        ],
        "lossy": False,
    }


async def test_images_are_parts_and_what_json_cannot_hold_is_marked(store: Store) -> None:
    [group] = await admitted(store, await new_run(store))
    key = group.key.episode(0)
    prompt = (user((TextPart(text="what is\x00this?"), ImagePart(url="data:image/png;base64,AA=="))),)
    await start_episode(store, beginning(key, prompt=prompt))
    await save_turn(store, key, turn(0, message=assistant("a dot")))
    await ended(store, key)
    found = await conversation(store, key)
    assert found["prompt"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is\ufffdthis?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
            ],
        }
    ]
    assert found["lossy"] is True


async def test_only_scored_episodes_of_groups_that_count_are_examples(store: Store) -> None:
    run_id = await ledger(store)
    found = await rows(sft_examples(store, Wanted(runs=(run_id,), negative=True)))
    assert sorted({row["group_no"] for row in found}) == [0, 1, 2, 3, 4, 6, 7, 8]  # 5 failed
    assert len(found) == 16
    assert [row["rank_in_group"] for row in found if row["group_no"] == 0] == [2, 1]  # member 1 has the reward
    assert {row["reward"] for row in await rows(sft_examples(store, Wanted(runs=(run_id,))))} == {1.0}


async def test_filters_choose_by_reward_rank_spread_and_number(store: Store) -> None:
    run_id = await training_run(store)
    await closed(store, run_id, (0.0, 1.0, 0.5, None))
    await closed(store, run_id, (0.25, 0.25))

    async def chosen(**wanted: Any) -> list[tuple[int, int]]:
        found = await rows(sft_examples(store, Wanted(runs=(run_id,), **wanted)))
        return [(row["group_no"], row["member"]) for row in found]

    assert await chosen() == [(0, 1), (0, 2), (1, 0), (1, 1)]
    assert await chosen(negative=True) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert await chosen(least=0.5) == [(0, 1), (0, 2)]
    assert await chosen(top=1) == [(0, 1), (1, 0)]
    assert await chosen(difference=0.5) == [(0, 1), (0, 2)]
    assert await chosen(limit=1) == [(0, 1)]
    assert await chosen(environment="another") == []


async def test_pairs_are_two_rewards_of_one_group_the_better_one_chosen(store: Store) -> None:
    run_id = await training_run(store)
    await closed(store, run_id, (0.0, 1.0, 0.5, None))
    await closed(store, run_id, (1.0, 1.0))
    found = await rows(dpo_pairs(store, Wanted(runs=(run_id,))))
    pairs = [(row["group_no"], row["chosen_member"], row["rejected_member"], row["rank_in_group"]) for row in found]
    assert pairs == [(0, 1, 0, 1), (0, 1, 2, 2), (0, 2, 0, 3)]
    assert found[0]["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    assert found[0]["chosen"][0]["role"] == found[0]["rejected"][0]["role"] == "assistant"
    farthest = await rows(dpo_pairs(store, Wanted(runs=(run_id,), top=1)))
    assert [(row["chosen_reward"], row["rejected_reward"]) for row in farthest] == [(1.0, 0.0)]
    assert len(await rows(dpo_pairs(store, Wanted(runs=(run_id,), difference=0.6)))) == 1


async def test_evaluations_are_in_neither(store: Store) -> None:
    run_id = await training_run(store)
    await closed(store, run_id, (0.0, 1.0))
    async with store.direct() as connection:
        await connection.execute(
            "INSERT INTO evaluations (run_id, name, environment, split, tasks, samples, sampling)"
            " VALUES (%s, 'last', 'sums', 'eval', 1, 2, '{}')",
            (run_id,),
        )
        await connection.execute("UPDATE groups SET kind = 'eval', evaluation = 'last' WHERE run_id = %s", (run_id,))
    for read in (sft_examples, dpo_pairs):
        assert await rows(read(store, Wanted(runs=(run_id,), negative=True))) == []


@pytest.mark.parametrize("read", [sft_examples, dpo_pairs])
async def test_an_export_that_is_not_read_to_its_end_leaves_the_connection_usable(store: Store, read: Any) -> None:
    run_id = await training_run(store)
    for _ in range(3):
        await closed(store, run_id, (0.0, 1.0))
    stream = read(store, Wanted(runs=(run_id,), negative=True))
    assert (await anext(stream))["run_id"] == run_id
    await stream.aclose()
    assert len(await rows(read(store, Wanted(runs=(run_id,), negative=True)))) in (3, 6)
