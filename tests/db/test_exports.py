"""An export is what independent SQL says, the same for a seed, in two parts that share no task, and exact."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from atropos.contracts.episode import Score
from atropos.contracts.messages import (
    ImagePart,
    Message,
    Role,
    TextPart,
    ToolCall,
    assistant,
    user,
)
from atropos.contracts.reasons import StopReason
from atropos.contracts.records import STEP_INDEX, CallRecord
from atropos.db.encoding import encode_message
from atropos.db.endings import finish_episode
from atropos.db.episodes import save_calls, start_episode
from atropos.db.errors import StoreError
from atropos.db.exports import Source, Wanted, opened_export
from atropos.db.exports_exact import conversation
from atropos.db.rescoring import save_rescored
from atropos.db.store import Store, open_store
from atropos.db.turns import save_turn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .exported import exported, gallery, group, keys, lineage, pairs, rows, trained
from .samples import admitted, beginning, closed, sealing, training_run, turn

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
COUNTS = "e.state = 'done' AND e.reward IS NOT NULL AND g.state IN ('sealed', 'trained', 'filtered')"
TRAIN = f"{COUNTS} AND g.kind = 'train'"


@pytest.fixture(scope="module")
async def runs(database_url: str) -> AsyncIterator[tuple[str, str]]:
    store = await open_store(database_url)
    yield await gallery(store)
    await store.close()


# --- each filter against a statement of its own over the tables -------------------------------------------------------


async def episodes(store: Store, where: str, *values: Any) -> list[tuple[Any, ...]]:
    """Keys of episodes in the order of an export, straight from the tables."""
    query = (
        "SELECT e.run_id, e.group_no, e.member, e.attempt FROM episodes e JOIN groups g USING (run_id, group_no)"
        f' WHERE {where} ORDER BY e.run_id COLLATE "C", 2, 3, 4'
    )
    return await rows(store, query, *values)


JANUARY = [datetime(2026, 1, day, hour, tzinfo=UTC) for day, hour in ((1, 1), (4, 1))]
OTHER = "SELECT {} FROM episodes o WHERE o.run_id = e.run_id AND o.group_no = e.group_no AND o.reward IS NOT NULL"
BETTER = OTHER.format("count(*)") + " AND (o.reward > e.reward OR o.reward = e.reward AND o.member < e.member)"
EXAMPLES: list[tuple[dict[str, Any], str, tuple[Any, ...]]] = [
    ({}, f"{TRAIN} AND e.reward > 0", ()),
    ({"negative": True}, TRAIN, ()),
    ({"environments": ("words",)}, f"{TRAIN} AND e.reward > 0 AND g.environment = 'words'", ()),
    (
        {"since": JANUARY[0], "until": JANUARY[1], "negative": True},
        f"{TRAIN} AND e.ended_at >= %s AND e.ended_at < %s",
        tuple(JANUARY),
    ),
    ({"min_version": 1, "max_version": 2}, f"{TRAIN} AND e.reward > 0 AND e.policy_version IN (1, 2)", ()),
    ({"least": 0.5, "most": 0.75}, f"{TRAIN} AND e.reward BETWEEN 0.5 AND 0.75", ()),
    ({"least": -1.0, "negative": True, "most": 0.0}, f"{TRAIN} AND e.reward <= 0", ()),
    ({"top": 1, "negative": True}, f"{TRAIN} AND ({BETTER}) < 1", ()),
    ({"top": 2}, f"{TRAIN} AND e.reward > 0 AND ({BETTER}) < 2", ()),
    (
        {"difference": 1.0},
        f"{TRAIN} AND e.reward > 0 AND ({OTHER.format('max(o.reward) - min(o.reward)')}) >= 1",
        (),
    ),
    ({"evaluations": True}, f"{COUNTS} AND e.reward > 0", ()),
    ({"evaluations": True, "top": 1}, f"{COUNTS} AND e.reward > 0 AND ({BETTER}) < 1", ()),
    (
        {"dedupe": True},
        f"{TRAIN} AND e.reward > 0 AND NOT EXISTS (SELECT FROM turns t JOIN turns u ON u.message = t.message"
        " JOIN episodes o ON (o.run_id, o.group_no, o.member, o.attempt)"
        "   = (u.run_id, u.group_no, u.member, u.attempt)"
        " JOIN groups h ON (h.run_id, h.group_no) = (o.run_id, o.group_no) AND h.kind = 'train' AND h.state <> 'failed'"
        " WHERE (t.run_id, t.group_no, t.member, t.attempt) = (e.run_id, e.group_no, e.member, e.attempt)"
        ' AND (o.reward > e.reward OR o.reward = e.reward AND (o.run_id COLLATE "C", o.group_no, o.member)'
        '   < (e.run_id COLLATE "C", e.group_no, e.member)))',
        (),
    ),
]


@pytest.mark.parametrize(("wanted", "where", "values"), EXAMPLES, ids=[" ".join(one) or "none" for one, *_ in EXAMPLES])
async def test_examples_are_those_a_statement_over_the_tables_finds(
    store: Store, runs: tuple[str, str], wanted: dict[str, Any], where: str, values: tuple[Any, ...]
) -> None:
    found = await keys(store, runs=runs, **wanted)
    assert found == await episodes(store, f"e.run_id = ANY(%s) AND {where}", list(runs), *values)
    assert found
    one = [key for key in found if key[0] == runs[0]]
    if not wanted.get("dedupe"):  # of copies in two runs one may be in the other
        assert await keys(store, runs=(runs[0],), **wanted) == one


BOTH = f"{TRAIN} AND h.reward IS NOT NULL AND e.reward > h.reward"
AHEAD = (
    "SELECT count(*) FROM episodes a JOIN episodes b USING (run_id, group_no)"
    " WHERE (run_id, group_no) = (e.run_id, e.group_no) AND a.reward > b.reward AND a.reward > 0"
    " AND (b.reward - a.reward, a.member, b.member) < (h.reward - e.reward, e.member, h.member)"
)
PAIRS: list[tuple[dict[str, Any], str]] = [
    ({}, f"{BOTH} AND e.reward > 0"),
    ({"negative": True}, BOTH),
    ({"difference": 0.6}, f"{BOTH} AND e.reward > 0 AND e.reward - h.reward >= 0.6"),
    ({"least": 0.6, "most": 0.8}, f"{BOTH} AND e.reward BETWEEN 0.6 AND 0.8"),
    ({"top": 1}, f"{BOTH} AND e.reward > 0 AND ({AHEAD}) < 1"),
    ({"top": 2}, f"{BOTH} AND e.reward > 0 AND ({AHEAD}) < 2"),
    ({"environments": ("words",), "negative": True}, f"{BOTH} AND g.environment = 'words'"),
    ({"min_version": 1, "max_version": 2}, f"{BOTH} AND e.reward > 0 AND e.policy_version IN (1, 2)"),
    (
        {"since": JANUARY[0], "until": JANUARY[1]},
        f"{BOTH} AND e.reward > 0 AND least(e.ended_at, h.ended_at) >= '2026-01-01T01:00Z'"
        " AND greatest(e.ended_at, h.ended_at) < '2026-01-04T01:00Z'",
    ),
    ({"evaluations": True}, f"{BOTH.replace(TRAIN, COUNTS)} AND e.reward > 0"),
]


@pytest.mark.parametrize(("wanted", "where"), PAIRS, ids=[" ".join(one) or "none" for one, _ in PAIRS])
async def test_pairs_are_those_a_statement_over_the_tables_finds(
    store: Store, runs: tuple[str, str], wanted: dict[str, Any], where: str
) -> None:
    query = (
        "SELECT e.run_id, e.group_no, e.member, e.attempt, h.member, h.attempt FROM episodes e"
        " JOIN episodes h USING (run_id, group_no) JOIN groups g USING (run_id, group_no)"
        f' WHERE e.run_id = ANY(%s) AND {where} ORDER BY e.run_id COLLATE "C", 2, 3, 4, 5, 6'
    )
    found = await pairs(store, runs=runs, **wanted)
    assert found == await rows(store, query, list(runs))
    assert found


async def test_without_filters_pairs_and_examples_are_those_of_the_views(store: Store, runs: tuple[str, str]) -> None:
    sft = (
        "SELECT run_id, group_no, member, attempt, prompt || completion, reward"
        " FROM sft_examples WHERE run_id = ANY(%s)"
    )
    dpo = (
        "SELECT run_id, group_no, chosen_member, chosen_attempt, rejected_member, rejected_attempt, prompt, chosen,"
        " rejected FROM dpo_pairs WHERE run_id = ANY(%s)"
    )
    examples = await exported(store, Wanted(runs=runs, negative=True))
    assert [
        (*row.key, json.loads(row.prompt) + json.loads(row.completions[0]), json.loads(row.rewards[0]))
        for row in examples
    ] == sorted(await rows(store, sft, list(runs)), key=lambda row: row[:4])
    paired = await exported(store, Wanted(Source.PAIRS, runs=runs, negative=True))
    assert [(*row.key, json.loads(row.prompt), *map(json.loads, row.completions)) for row in paired] == sorted(
        await rows(store, dpo, list(runs)), key=lambda row: row[:6]
    )


async def test_pairs_that_say_the_same_are_one(store: Store) -> None:
    run_id = await trained(store, "sums")
    messages = [assistant("yes"), assistant("no"), assistant("no")]
    await group(store, run_id, "sums", [1.0, 0.0, 0.0], messages=messages)
    await group(store, run_id, "sums", [0.5, 0.0, 0.0], messages=messages)
    assert len(await pairs(store, runs=(run_id,))) == 4
    assert await pairs(store, runs=(run_id,), dedupe=True) == [(run_id, 0, 0, 0, 1, 0)]


async def test_names_of_tool_calls_do_not_make_two_rows_of_one(store: Store) -> None:
    run_id = await trained(store, "sums")
    calls = [ToolCall(id=name, name="add", arguments={"id": number}) for name, number in (("a", 1), ("b", 1), ("c", 2))]
    await group(store, run_id, "sums", [1.0, 1.0, 0.5], messages=[assistant("", (one,)) for one in calls])
    assert await keys(store, runs=(run_id,), dedupe=True) == [(run_id, 0, 0, 0), (run_id, 0, 2, 0)]


async def test_only_single_messages_where_they_are_asked_for(store: Store) -> None:
    run_id = await trained(store, "sums")
    call = ToolCall(id="a", name="add")
    await group(
        store, run_id, "sums", [1.0, 0.5, 0.0], messages=[assistant("x"), assistant("y"), assistant("", (call,))]
    )
    assert await pairs(store, runs=(run_id,), one_message=True) == [(run_id, 0, 0, 0, 1, 0)]
    [made] = await admitted(store, run_id, size=2)
    members = [made.key.episode(member) for member in range(2)]
    for key in members:
        await start_episode(store, beginning(key))
        await save_turn(store, key, turn(0, message=assistant("x")))
        replies = (user("and?"),) if key.member else ()
        await save_calls(store, key, [CallRecord(0, STEP_INDEX, None, replies=replies)])
        await finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=1.0)
    await sealing(store, made.key, members)
    assert [key[1:3] for key in await keys(store, runs=(run_id,), one_message=True)] == [(0, 0), (0, 1), (1, 0)]


async def test_each_row_says_where_it_came_from(store: Store, runs: tuple[str, str]) -> None:
    row = (await exported(store, Wanted(runs=(runs[1],))))[0]
    [(version,)] = await rows(store, "SELECT environment_version FROM episodes WHERE run_id = %s LIMIT 1", runs[1])
    [(task,)] = await rows(store, "SELECT task_key FROM groups WHERE (run_id, group_no) = (%s, 0)", runs[1])
    assert lineage(row) == {
        "run_id": runs[1],
        "group_no": 0,
        "kind": "train",
        "environment": "sums",
        "environment_version": version,
        "split": "train",
        "task_key": task,
        "member": 0,
        "attempt": 0,
        "reward": 0.5,
        "stop": "answered",
        "policy_version": 1,
        "versions": [1],
        "scorers": [{"name": "right", "version": "s1"}],
        "sampled_at": "2026-01-01T00:00:00.000000Z",
    }
    pair = lineage((await exported(store, Wanted(Source.PAIRS, runs=(runs[1],), top=1)))[0])
    assert (pair["chosen"]["member"], pair["chosen"]["reward"]) == (1, 1.0)
    assert (pair["rejected"]["member"], pair["rejected"]["reward"]) == (2, 0.125)


async def test_rewards_filters_ranks_and_pairs_are_by_the_scores_that_are_asked_for(store: Store) -> None:
    run_id = await trained(store, "sums")
    made = await group(store, run_id, "sums", [0.25, 1.0, 0.5])
    for version, value in (("s2", 2.0), ("s3", 0.75)):
        changed = [(made.episode(0), Score(name="right", value=value, weight=1.0))]
        assert await save_rescored(store, made, changed, version)

    async def by(scores: str) -> dict[int, tuple[float, str]]:
        found = [lineage(row) for row in await exported(store, Wanted(runs=(run_id,), scores=scores))]
        return {one["member"]: (one["reward"], one["scorers"][0]["version"]) for one in found}

    rest = {1: (1.0, "s1"), 2: (0.5, "s1")}
    assert await by("first") == {0: (0.25, "s1")} | rest
    assert await by("s2") == {0: (2.0, "s2")} | rest
    assert await by("latest") == {0: (0.75, "s3")} | rest
    assert await by("unheard-of") == await by("first")
    assert [key[2] for key in await keys(store, runs=(run_id,), scores="s2", top=1)] == [0]
    assert [key[2] for key in await keys(store, runs=(run_id,), scores="s2", least=0.75)] == [0, 1]
    assert await keys(store, runs=(run_id,), scores="s2", difference=1.6) == []
    best = await exported(store, Wanted(Source.PAIRS, runs=(run_id,), scores="s2", top=1))
    assert [(one.key[2], one.key[4], one.rewards) for one in best] == [(0, 2, (b"2.0", b"0.5"))]


async def test_whole_rewards_read_as_floats_too(store: Store) -> None:
    run_id = await trained(store, "sums")
    await group(store, run_id, "sums", [1.0, 2.5, -3.0, 1e20, 1e-7])
    found = [row.rewards[0] for row in await exported(store, Wanted(runs=(run_id,), negative=True))]
    assert found == [b"1.0", b"2.5", b"-3.0", b"1e+20", b"1e-07"]


# --- the same for a seed ----------------------------------------------------------------------------------------------


@st.composite
def choices(draw: st.DrawFn) -> Wanted:
    return Wanted(
        source=draw(st.sampled_from(Source)),
        negative=draw(st.booleans()),
        top=draw(st.none() | st.integers(1, 3)),
        dedupe=draw(st.booleans()),
        evaluations=draw(st.booleans()),
        limit=draw(st.none() | st.integers(1, 12)),
        test=draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])),
        seed=draw(st.integers(0, 9)),
    )


@SLOW
@given(wanted=choices(), start=st.integers(0, 40))
async def test_an_export_read_again_from_any_row_is_the_rest_of_the_same(
    store: Store, runs: tuple[str, str], wanted: Wanted, start: int
) -> None:
    wanted = replace(wanted, runs=runs)
    async with opened_export(store, wanted) as chosen:
        whole = [row async for row in chosen.rows()]
        as_of = chosen.as_of
        start = min(start, chosen.total)
        assert await chosen.key_at(chosen.total) is None
        if start:
            assert await chosen.key_at(start - 1) == whole[start - 1].key
    later = await trained(store, "sums")
    await group(store, later, "sums", [1.0, 0.0])  # what is played meanwhile is not in it
    everything = replace(wanted, runs=(*runs, later))
    assert await exported(store, everything, start, as_of) == whole[start:]


@SLOW
@given(wanted=choices())
async def test_the_two_parts_share_no_task_and_are_the_whole(
    store: Store, runs: tuple[str, str], wanted: Wanted
) -> None:
    found = await exported(store, replace(wanted, runs=runs))
    sides: dict[bool, set[str]] = {True: set(), False: set()}
    for row in found:
        sides[row.test].add(lineage(row)["task_key"])
    assert not sides[True] & sides[False]
    if wanted.test in (0.0, 1.0):
        assert sides[wanted.test == 0.0] == set()
    assert [row.key for row in found] == [
        row.key for row in await exported(store, replace(wanted, runs=runs, test=0.0))
    ]


@SLOW
@given(wanted=choices())
async def test_without_copies_no_two_rows_say_the_same(store: Store, runs: tuple[str, str], wanted: Wanted) -> None:
    base = replace(wanted, runs=runs, limit=None, top=None)

    def said(row: Any) -> tuple[Any, ...]:
        return (row.prompt, *row.completions)

    single = [said(row) for row in await exported(store, replace(base, dedupe=True))]
    assert len(single) == len(set(single))
    assert set(single) == {said(row) for row in await exported(store, replace(base, dedupe=False))}


@SLOW
@given(wanted=choices(), limit=st.integers(1, 12))
async def test_a_limit_draws_from_what_there_is_without_one(
    store: Store, runs: tuple[str, str], wanted: Wanted, limit: int
) -> None:
    everything = await exported(store, replace(wanted, runs=runs, limit=None))
    drawn = await exported(store, replace(wanted, runs=runs, limit=limit))
    more = await exported(store, replace(wanted, runs=runs, limit=limit + 1))
    assert len(drawn) == min(limit, len(everything))
    assert set(map(repr, drawn)) <= set(map(repr, more)) <= set(map(repr, everything))


async def test_another_seed_draws_others(store: Store, runs: tuple[str, str]) -> None:
    drawn = {tuple(await keys(store, runs=runs, limit=3, seed=seed)) for seed in range(6)}
    assert len(drawn) > 1


# --- exactly what was sampled -----------------------------------------------------------------------------------------

CHARACTERS = st.one_of(st.sampled_from('\x00\ud800\udc00\ud83d\ude00\n"\\é😀'), st.characters(codec=None))
TEXT = st.text(CHARACTERS, max_size=8)
ARGUMENTS = st.dictionaries(TEXT, st.none() | st.integers(-9, 9) | TEXT, max_size=2)


@st.composite
def replies(draw: st.DrawFn) -> Message:
    images = st.builds(ImagePart, url=TEXT)
    parts = st.lists(st.builds(TextPart, text=TEXT) | images, max_size=2).map(tuple)
    return Message(
        role=draw(st.sampled_from(Role)), content=draw(TEXT | parts), name=draw(st.none() | TEXT.filter(bool))
    )


@st.composite
def answers(draw: st.DrawFn) -> Message:
    calls = st.builds(ToolCall, id=TEXT, name=TEXT, arguments=ARGUMENTS, problem=st.none(), raw=st.none() | TEXT)
    return Message(
        role=Role.ASSISTANT,
        content=draw(TEXT),
        reasoning=draw(st.none() | TEXT.filter(bool)),
        tool_calls=tuple(draw(st.lists(calls, max_size=2))),
    )


@SLOW
@given(prompt=st.lists(replies(), min_size=1, max_size=2), said=answers(), reply=replies(), content=TEXT)
async def test_whatever_was_said_is_exported_exactly(
    store: Store, prompt: list[Message], said: Message, reply: Message, content: str
) -> None:
    run_id = await training_run(store)
    [made] = await admitted(store, run_id, size=1)
    key = made.key.episode(0)
    await start_episode(store, beginning(key, prompt=tuple(prompt)))
    await save_turn(store, key, turn(0, message=said))
    calls = [CallRecord(0, index, call, content) for index, call in enumerate(said.tool_calls)]
    await save_calls(store, key, [*calls, CallRecord(0, STEP_INDEX, None, replies=(reply,))])
    await finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=1.0)
    await sealing(store, made.key, [key], min_valid=1)
    [row] = await exported(store, Wanted(runs=(run_id,)))
    wanted = [chat(message) for message in prompt]
    after = [chat(said)]
    for call in said.tool_calls:
        after.append(chat(Message(role=Role.TOOL, content=content, tool_call_id=call.id, name=call.name or None)))
    after.append(chat(reply))
    found = json.loads(row.prompt), [plain(message) for message in json.loads(row.completions[0])]
    if not row.lossy:
        assert found == (wanted, [plain(message) for message in after])
    assert row.lossy == (json.loads(json.dumps([wanted, after])) != [wanted, after] and row.rebuilt)
    [(display,)] = await rows(store, "SELECT lossy FROM conversations WHERE run_id = %s", run_id)
    assert row.rebuilt == display


def chat(message: Message) -> dict[str, Any]:
    """As OpenAI's API spells it."""
    out: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if not message.content:
        out["content"] = ""
    elif not isinstance(message.content, str):
        out["content"] = [
            {"type": "image_url", "image_url": {"url": part.url}}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part.text}
            for part in message.content
        ]
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments if call.raw is None else call.raw},
            }
            for call in message.tool_calls
        ]
    fields = {"reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id, "name": message.name}
    return out | {name: value for name, value in fields.items() if value is not None}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """With arguments as what their JSON says: the order of their keys is not kept."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            arguments = ("no JSON", arguments)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls} if calls else message


async def test_a_message_of_ten_megabytes_is_exported_exactly(store: Store) -> None:
    run_id = await trained(store, "sums")
    long = "é\n" * 2_500_000 + "\x00" * 2_500_000
    await group(store, run_id, "sums", [1.0, 0.5], messages=[assistant(long), assistant(long.replace("\x00", "x"))])
    for row, text in zip(await exported(store, Wanted(runs=(run_id,))), (long, long.replace("\x00", "x")), strict=True):
        assert json.loads(row.completions[0]) == [{"role": "assistant", "content": text}]
        assert not row.lossy


async def test_two_texts_that_only_display_alike_are_no_copies_and_no_same_prompt(store: Store) -> None:
    run_id = await trained(store, "sums")
    for prompt in ("a\x00", "a\ud800"):
        await group(store, run_id, "sums", [1.0, 1.0], said="yes", prompt=(user(prompt),))
    assert [key[1:3] for key in await keys(store, runs=(run_id,), dedupe=True)] == [(0, 0), (1, 0)]
    await rows(
        store,
        'UPDATE episodes SET reward = 0, prompt_exact = convert_to(\'[{"role": "user", "content": "b"}]\', \'UTF8\')'
        " WHERE (run_id, group_no, member) = (%s, 0, 1) RETURNING 1",
        run_id,
    )
    assert await pairs(store, runs=(run_id,)) == []


@given(message=replies() | answers())
def test_exact_bytes_and_display_copies_make_the_same_message(message: Message) -> None:
    encoded = encode_message(message)
    if encoded.exact is None:
        _, completion, exact = conversation([b"[]", encoded.display.encode()])
        assert [plain(one) for one in json.loads(completion)] == [plain(chat(message))]
        assert exact


# --- disturbs nobody --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", list(Source))
async def test_an_export_that_is_not_read_to_its_end_leaves_the_connection_usable(store: Store, source: Source) -> None:
    run_id = await training_run(store)
    for _ in range(3):
        await closed(store, run_id, (0.0, 1.0))
    wanted = Wanted(source, runs=(run_id,))
    async with opened_export(store, wanted) as chosen:
        stream = chosen.rows()
        assert (await anext(stream)).key[0] == run_id
        await stream.aclose()
    assert len(await exported(store, wanted)) == 3


async def test_pages_keep_to_the_statement_timeout_that_choosing_may_outlast(
    database_url: str, runs: tuple[str, str]
) -> None:
    limited = await open_store(f"{database_url}?options=-c%20statement_timeout%3D5s")
    try:
        async with opened_export(limited, Wanted(runs=runs)) as chosen:
            shown = await (await chosen.connection.execute("SHOW statement_timeout")).fetchall()
    finally:
        await limited.close()
    assert shown == [("5s",)]


async def test_postgres_ending_a_statement_is_one_sentence(store: Store, runs: tuple[str, str]) -> None:
    async def ended() -> None:
        async with opened_export(store, Wanted(runs=runs)) as chosen:
            await chosen.connection.execute("SET LOCAL statement_timeout = 1")
            await chosen.connection.execute("SELECT pg_sleep(9)")

    with pytest.raises(StoreError, match=r"Postgres ended a statement .* statement_timeout"):
        await ended()


async def test_a_run_writes_on_while_it_is_exported(store: Store) -> None:
    run_id = await training_run(store)
    await closed(store, run_id, (0.0, 1.0))
    async with opened_export(store, Wanted(runs=(run_id,))) as chosen:
        await closed(store, run_id, (0.0, 1.0))
        modes = await rows(
            store,
            "SELECT DISTINCT mode FROM pg_locks WHERE pid = %s AND locktype = 'relation'",
            chosen.connection.info.backend_pid,
        )
        assert modes == [("AccessShareLock",)]
        assert len([row async for row in chosen.rows()]) == 1
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            await chosen.connection.execute("DELETE FROM turns")
