"""What the views of conversations say is what was stored, and exports are those views, exactly."""

from typing import Any

from atropos.contracts.ids import EpisodeKey
from atropos.contracts.messages import ImagePart, Message, Role, TextPart, ToolCall, assistant, system, user
from atropos.contracts.reasons import StopReason
from atropos.contracts.records import STEP_INDEX, CallRecord
from atropos.db.endings import finish_episode
from atropos.db.episodes import save_calls, start_episode
from atropos.db.store import Store
from atropos.db.turns import save_turn

from .samples import admitted, beginning, new_run, started, turn


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
