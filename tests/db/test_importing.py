"""What other programs wrote becomes rows like any others: sound, whole, and there once however often it is imported."""

import asyncio
import json
import math
import re
import uuid
from pathlib import Path
from typing import Any

import atropos
import pytest
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.reasons import StopReason
from atropos.db.audit import audit_run
from atropos.db.episodes import load_episode
from atropos.db.errors import Refused
from atropos.db.importing import Source, add_lines, open_import
from atropos.db.importing_lines import Tokens, parse_line
from atropos.db.importing_messages import BadLine
from atropos.db.runs import list_runs
from atropos.db.store import Store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .samples import new_run, rows

ASK = {"role": "user", "content": "2 + 3?"}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}


def told(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def scored(**changes: Any) -> dict[str, Any]:
    """A group of two as the original writes it: two prompt tokens, two answers of three and of two."""
    group = {
        "tokens": [[1, 2, 10, 11, 12], [1, 2, 20, 21]],
        "masks": [[-100, -100, 10, 11, 12], [-100, -100, 20, 21]],
        "scores": [1.0, -0.5],
        "inference_logprobs": [[1.0, 1.0, -0.25, -0.5, -1.0], [1.0, 1.0, -2.0, 0.0]],
        "messages": [[ASK, told("5")], [ASK, told("6")]],
        "generation_params": {"temperature": 0.75},
        "overrides": None,
        "advantages": None,
    }
    return group | changes


def raw(document: Any) -> bytes:
    return json.dumps(document).encode()


async def imported(store: Store, *documents: Any, run_id: str | None = None) -> str:
    run_id = run_id or f"run/import-{uuid.uuid4().hex[:8]}"
    label = await open_import(store, run_id, None, standard="sums", tokenizer="unknown")
    sources = [Source("x.jsonl", number, parse_line(raw(one))) for number, one in enumerate(documents, 1)]
    await add_lines(store, run_id, label, sources)
    return run_id


async def examples(store: Store, run_id: str) -> list[tuple[Any, ...]]:
    """(messages, reward, lossy) of each supervised example, in order."""
    query = "SELECT messages, reward, lossy FROM sft_examples WHERE run_id = %s ORDER BY group_no, member"
    return await rows(store, query, run_id)


async def pairs(store: Store, run_id: str) -> list[tuple[Any, ...]]:
    """(prompt, chosen, rejected, difference of the rewards) of each pair, in order."""
    query = "SELECT prompt, chosen, rejected, reward_difference FROM dpo_pairs WHERE run_id = %s ORDER BY group_no"
    return await rows(store, query, run_id)


async def sound(store: Store, run_id: str) -> None:
    audit = await audit_run(store, run_id)
    assert audit.violations == ()
    assert audit.checked["groups"] > 0


async def test_a_group_of_the_original_keeps_ids_where_it_has_log_probabilities(store: Store) -> None:
    run_id = await imported(store, scored())
    await sound(store, run_id)
    facts = await load_episode(store, EpisodeKey(run_id=run_id, group_no=0, member=1))
    assert facts is not None
    [turn] = facts.turns
    assert (turn.prompt_delta, turn.sampled, turn.logprobs, turn.mask) == ([1, 2], [20, 21], [-2.0, 0.0], [1, 1])
    assert (turn.temperature, facts.reward, facts.stop) == (0.75, -0.5, StopReason.ANSWERED)
    assert [message.text for message in facts.prompt] == ["2 + 3?"]
    [group] = await rows(
        store, "SELECT state, valid, mean_reward, sampled_tokens FROM groups WHERE run_id = %s", run_id
    )
    assert group == ("sealed", 2, 0.25, 5)


async def test_views_and_exports_show_it_like_any_other_run(store: Store) -> None:
    run_id = await imported(store, scored())
    assert run_id in [row.run_id for row in await list_runs(store)]
    assert [messages for messages, *_ in await examples(store, run_id)] == scored()["messages"]
    assert await pairs(store, run_id) == [([ASK], [told("5")], [told("6")], 1.5)]
    progress = "SELECT state, sealed_groups, sampled_tokens FROM run_progress WHERE run_id = %s"
    assert await rows(store, progress, run_id) == [("completed", 1, 5)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"inference_logprobs": None}, Tokens.NO_LOGPROBS),
        ({"inference_logprobs": []}, Tokens.NO_LOGPROBS),
        ({"inference_logprobs": [[1.0, 1.0, -1.0, 1.0, -1.0], [1.0] * 4]}, Tokens.NO_LOGPROBS),
        ({"masks": [[1, 2, -100, 11, -100], [1, -100, 20, 21]]}, Tokens.NO_MATCH),
    ],
)
async def test_ids_without_what_belongs_to_them_leave_a_conversation(
    store: Store, changes: dict[str, Any], why: Tokens
) -> None:
    document = scored(**changes)
    assert {member.tokens for member in parse_line(raw(document)).members} == {why}
    run_id = await imported(store, document)
    await sound(store, run_id)
    assert await rows(store, "SELECT DISTINCT octet_length(sampled), spans FROM turns WHERE run_id = %s", run_id) == [
        (0, [])
    ]
    assert await rows(store, "SELECT data FROM blobs WHERE run_id = %s", run_id) == [(raw(document),)]


async def test_only_the_answers_that_the_masks_name_are_the_policys(store: Store) -> None:
    chat = [ASK, told("no idea"), {"role": "user", "content": "try"}, told("5")]
    document = scored(
        tokens=[[1, 2, 3, 4, 5]],
        masks=[[-100, -100, -100, 4, 5]],
        scores=[1],
        inference_logprobs=[[1, 1, 1, -1, -1]],
        messages=[chat],
    )
    run_id = await imported(store, document)
    await sound(store, run_id)
    facts = await load_episode(store, EpisodeKey(run_id=run_id, group_no=0, member=0))
    assert facts is not None
    assert [message.text for message in facts.prompt] == ["2 + 3?", "no idea", "try"]
    assert [(turn.prompt_delta, turn.sampled) for turn in facts.turns] == [([1, 2, 3], [4, 5])]


CHATS = [
    [ASK, told("5")],
    [{"role": "system", "content": "be brief"}, ASK, {**told(""), "tool_calls": [TOOL_CALL]},
     {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"}, told("It is 5.")],
    [ASK, told("7"), {"role": "user", "content": "wrong"}, told("5"), {"role": "user", "content": "right"}],
    [ASK, {**told("calling"), "tool_calls": [TOOL_CALL]}],
    [ASK, told("<call>add</call>"), {"role": "tool", "content": "5", "name": "add"}, told("5")],
    [{"role": "user", "content": [
        {"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
     told("5")],
    [ASK, {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}],
]  # fmt: skip


@pytest.mark.parametrize("chat", CHATS)
async def test_a_chat_comes_out_as_it_went_in(store: Store, chat: list[dict[str, Any]]) -> None:
    run_id = await imported(store, {"messages": chat, "reward": 0.5})
    await sound(store, run_id)
    assert await examples(store, run_id) == [(chat, 0.5, False)]


async def test_answers_and_pairs_as_trl_writes_them(store: Store) -> None:
    run_id = await imported(
        store,
        {"prompt": "2 + 3?", "completion": "5", "score": 2},
        {"prompt": [ASK], "chosen": [told("5")], "rejected": [told("6")]},
        {"chosen": [ASK, told("5")], "rejected": [ASK, told("7")], "chosen_reward": 0.75, "rejected_reward": 0.25},
        {"messages": [[ASK, told("5")], [ASK, told("8")]], "scores": [3, None]},
    )
    await sound(store, run_id)
    assert await pairs(store, run_id) == [
        ([ASK], [told("5")], [told("6")], 1.0),
        ([ASK], [told("5")], [told("7")], 0.5),
    ]
    assert await rows(store, "SELECT DISTINCT name FROM scores WHERE run_id = %s ORDER BY name", run_id) == [
        ("preferred",),
        ("reward",),
        ("score",),
    ]
    assert await rows(store, "SELECT count(*) FROM tasks WHERE run_id = %s", run_id) == [(1,)]
    outcomes = "SELECT outcome, count(*) FROM episode_outcomes WHERE run_id = %s GROUP BY 1 ORDER BY 1"
    assert await rows(store, outcomes, run_id) == [("scored", 6), ("unscored", 1)]


BAD = [
    (b"{", "it is not JSON"),
    (b"\xff{}", "it is not UTF-8"),
    (b"[1]", "not a JSON object"),
    (b"[" * 100_000, "nested too deeply"),
    (raw({"text": "x"}), "neither tokens with scores"),
    (raw({"messages": [ASK]}), "no assistant speaks"),
    (raw({"messages": [{"role": "human", "content": "x"}]}), "messages[0] has the role 'human'"),
    (raw({"messages": [ASK, {"role": "assistant", "content": 3}]}), "messages[1].content is 3"),
    (raw({"messages": [ASK, told("x")], "reward": "good"}), "reward is 'good', not a number"),
    (raw({"messages": [ASK, told("x")], "reward": math.nan}), "reward is nan; it must be finite"),
    (raw({"messages": [ASK, told("x")], "reward": 10**400}), "; it must be finite"),
    (raw({"messages": [ASK, told("x")], "reward": 1e300}), "reward is 1e+300; it must lie between -1e+30 and 1e+30"),
    (raw(scored(tokens=[], masks=[], scores=[])), "the group is empty"),
    (raw(scored(scores=[1.0, math.inf])), "scores[1] is inf"),
    (raw(scored(scores=[1.0])), "scores has 1 entries and tokens 2"),
    (raw(scored(masks=[[-100, -100]])), "masks has 1 entries and tokens 2"),
    (raw(scored(masks=[[-100, -100], [-100, -100, 20, 21]])), "masks[0] has 2 entries and tokens[0] 5"),
    (raw(scored(masks=[[-100, -100, 10, 11, 13], [-100, -100, 20, 21]])), "masks[0][4] is 13; it must be -100, or 12"),
    (raw(scored(tokens=[[1, 2, 10, 11, 2**31], [1, 2, 20, 21]])), "tokens[0][4] is 2147483648"),
    (raw(scored(tokens=[[1, 2, 10, 11, 1.5], [1, 2, 20, 21]])), "tokens[0] is"),
    (raw(scored(inference_logprobs=[[1, 1, -1, math.nan, -1], [1, 1, -1, -1]])), "inference_logprobs[0][3] is nan"),
    (raw(scored(inference_logprobs=[[1, 1, -1, -1e300, -1], [1, 1, -1, -1]])), "[0][3] is -1e+300; it must lie"),
    (raw(scored(inference_logprobs=[[1, 1], [1, 1, -1, -1]])), "inference_logprobs[0] has 2 entries"),
    (raw(scored(messages=[[ASK, told("5")]])), "messages has 1 entries and tokens 2"),
    (raw(scored(messages=None)), "name its tokenizer with --tokenizer"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "why"), BAD)
def test_a_bad_line_is_refused_with_its_reason(line: bytes, why: str) -> None:
    with pytest.raises(BadLine) as refused:
        parse_line(line)
    assert why in str(refused.value)


async def test_tokens_without_messages_are_read_by_their_tokenizer(store: Store) -> None:
    line = parse_line(raw(scored(messages=None)), lambda ids: " ".join(map(str, ids)))
    assert [[turn.message.text for turn in one.turns] for one in line.members] == [["10 11 12"], ["20 21"]]
    assert [message.text for message in line.members[0].prompt] == ["1 2"]
    assert {member.tokens for member in line.members} == {Tokens.KEPT}


async def test_what_json_in_postgres_cannot_hold_is_kept_exactly(store: Store) -> None:
    chat = [{"role": "user", "content": "a\x00b"}, told("\ud83d half"), {"role": "user", "content": "x" * 10_000_000}]
    document = {"messages": chat, "reward": 1}
    run_id = await imported(store, document)
    await sound(store, run_id)
    facts = await load_episode(store, EpisodeKey(run_id=run_id, group_no=0, member=0))
    assert facts is not None
    assert (facts.prompt[0].text, facts.turns[0].message.text) == ("a\x00b", "\ud83d half")
    assert facts.calls[0].replies[0].text == "x" * 10_000_000
    [(messages, _, lossy)] = await examples(store, run_id)
    assert (messages[0]["content"], lossy) == ("a\ufffdb", True)


async def test_a_malformed_call_is_kept_as_it_was_written(store: Store) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2'}}
    chat = [ASK, {**told(""), "tool_calls": [call]}, told("5")]
    run_id = await imported(store, {"messages": chat, "reward": 1})
    assert [messages for messages, *_ in await examples(store, run_id)] == [chat]


async def test_what_has_no_column_of_its_own_is_found_as_the_page_says(store: Store) -> None:
    page = (Path(atropos.__file__).parent / "docs" / "data.md").read_text("utf-8")
    [query] = re.findall(r"^```\n(SELECT convert_from.*?);\n```$", page, re.MULTILINE | re.DOTALL)
    run_id = await imported(store, scored(group_overrides={"sft": True}))
    found = await rows(store, query.replace("run/import-gsm8k", run_id))
    assert found == [({"sft": True},), ({"sft": True},)]


async def test_a_run_that_was_played_here_takes_no_import(store: Store) -> None:
    run_id = await new_run(store)
    with pytest.raises(Refused, match="was played here"):
        await open_import(store, run_id, None, standard="x", tokenizer="unknown")
    mine = await imported(store, scored())
    with pytest.raises(Refused, match="another --run"):
        await open_import(store, mine, "elsewhere", standard="x", tokenizer="unknown")
    assert await open_import(store, mine, None, standard="x", tokenizer="unknown") == "sums"
    with pytest.raises(Refused, match="cannot be used"):
        await open_import(store, "run/a b", None, standard="x", tokenizer="unknown")


async def test_of_two_that_import_the_same_file_at_once_each_line_is_added_by_one(store: Store) -> None:
    run_id = f"run/import-{uuid.uuid4().hex[:8]}"
    sources = [Source("x", number, parse_line(raw(scored(scores=[number, 0])))) for number in range(20)]

    async def one() -> int:
        label = await open_import(store, run_id, None, standard="sums", tokenizer="unknown")
        added = [await add_lines(store, run_id, label, sources[first : first + 4]) for first in range(0, 20, 4)]
        return sum(map(len, added))

    assert sum(await asyncio.gather(one(), one(), one())) == 20
    await sound(store, run_id)


LINES = st.lists(st.integers(0, 5), min_size=1, max_size=12)
CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, cuts=CUTS, more=LINES)
async def test_however_often_it_breaks_off_the_import_ends_the_same(
    store: Store, lines: list[int], cuts: list[int], more: list[int]
) -> None:
    """Each round reads from the start, writes so many lines at once, and dies after its first transaction."""
    documents = [parse_line(raw({"messages": [ASK, told(f"it is {number}")], "reward": number})) for number in lines]
    longer = [*documents, *(parse_line(raw(scored(scores=[number, 0]))) for number in more)]
    run_id = f"run/import-{uuid.uuid4().hex[:8]}"
    label = await open_import(store, run_id, None, standard="sums", tokenizer="unknown")

    async def add(what: list[Any], size: int, *, dies: bool) -> int:
        added, sources = 0, [Source("x", number, line) for number, line in enumerate(what)]
        for first in range(0, len(sources), size):
            added += len(await add_lines(store, run_id, label, sources[first : first + size]))
            if dies and added:
                break
        return added

    for size in cuts:
        await add(documents, size, dies=True)
    await add(documents, 3, dies=False)
    assert await digests(store, run_id) == sorted({line.digest for line in documents})
    assert await add(documents, 5, dies=False) == 0
    assert await add(longer, 5, dies=False) == len(set(more))
    assert await digests(store, run_id) == sorted({line.digest for line in longer})
    [(groups,)] = await rows(store, "SELECT count(*) FROM groups WHERE run_id = %s", run_id)
    assert groups == len({line.digest for line in longer})
    await sound(store, run_id)


async def digests(store: Store, run_id: str) -> list[str]:
    """Of the lines that the run's groups say they were read from."""
    found = await rows(
        store,
        "SELECT DISTINCT start_state->'imported'->>'digest' FROM episodes WHERE run_id = %s",
        run_id,
    )
    return sorted(digest for (digest,) in found)
