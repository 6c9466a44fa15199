"""Whole runs on a server that takes messages: real Temporal, real Postgres, real HTTP; only its words are scripted."""

import json
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from atropos.activities.services import Services
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.records import EpisodeFacts
from atropos.contracts.states import EpisodeState, GroupState, RunState
from atropos.db.audit import audit_run
from atropos.db.episodes import load_episode
from atropos.db.groups import load_group
from atropos.db.turns import load_answers
from temporalio.client import WorkflowFailureError

from ..inference.servers import Answer, Seen, Server, serving
from ..support.world import World

LOOKS = 2


class Words:
    """What the server says: looks twice through the tool, then answers; or whatever a test puts in its place."""

    def __init__(self) -> None:
        self.instead: list[Answer] = []
        self.usage: dict[str, int] | None = {"prompt_tokens": 40, "completion_tokens": 9}

    def __call__(self, seen: Seen) -> Answer:
        if seen.path == "/v1/models":
            return Answer(body={"data": [{"id": "m"}]})
        if self.instead:
            return self.instead.pop(0)
        looked = sum(message["role"] == "tool" for message in seen.json["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": "nothing"}
        if looked < LOOKS:
            function = {"name": "look", "arguments": json.dumps({"at": looked})}
            message = {"role": "assistant", "content": None, "tool_calls": [
                {"id": f"c{looked}", "type": "function", "function": function}]}  # fmt: skip
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if looked < LOOKS else "stop"}
        return Answer(body={"model": "m-1", "choices": [choice], "usage": self.usage})


@pytest.fixture(scope="module")
async def services(world: World) -> AsyncIterator[Services]:
    async with world.workers() as services:
        yield services


@pytest.fixture(scope="module")
async def hosted() -> AsyncIterator[Server]:
    async with serving(Words()) as server:
        yield server


@pytest.fixture
def words(hosted: Server) -> Words:
    hosted.answer = words = Words()
    hosted.seen.clear()
    return words


def document(world: World, hosted: Server, **changes: Any) -> dict[str, Any]:
    engine = {"kind": "openai", "url": hosted.url, "concurrency": 4}
    return world.document("Effects", **{"engines": [engine], "model": {"path": "m"}, **changes})


async def episode(services: Services, run_id: str, group: int = 0, member: int = 0) -> EpisodeFacts:
    facts = await load_episode(services.store, EpisodeKey(run_id=run_id, group_no=group, member=member))
    assert facts is not None
    return facts


async def test_episodes_are_played_in_messages_and_kept_with_every_byte(
    world: World, services: Services, hosted: Server, words: Words
) -> None:
    result = await world.run(document(world, hosted))
    assert result.state is RunState.COMPLETED
    facts = await episode(services, result.run_id)
    assert (facts.status, facts.stop) == (EpisodeState.DONE, StopReason.ANSWERED)
    assert [turn.sampled for turn in facts.turns] == [[]] * 3
    assert [(turn.told_prompt, turn.told_sampled, turn.incarnation) for turn in facts.turns] == [(40, 9, "m-1")] * 3
    raw = await load_answers(services.store, facts.key)
    assert [json.loads(raw[turn])["usage"]["completion_tokens"] for turn in range(3)] == [9, 9, 9]
    with psycopg.connect(world.database) as connection:
        counts = connection.execute(
            "SELECT sampled_tokens, policy_version FROM episodes WHERE run_id = %s", (result.run_id,)
        ).fetchall()
        said = connection.execute("SELECT completion FROM sft_examples WHERE run_id = %s", (result.run_id,)).fetchall()
    assert counts == [(27, None)] * 4
    assert [[part["role"] for part in row[0]] for row in said] == [["assistant", "tool"] * 2 + ["assistant"]] * 4
    found = await audit_run(services.store, result.run_id)
    assert found.violations == (), found


async def test_a_model_call_whose_answer_is_stored_is_never_paid_twice(
    world: World, services: Services, hosted: Server, words: Words
) -> None:
    result = await world.run(document(world, hosted))
    asked = [seen for seen in hosted.seen if seen.path != "/v1/models"]
    assert len(asked) == 3 * 4
    facts = await episode(services, result.run_id)
    assert [turn.request_id.rsplit("/", 3)[1] for turn in facts.turns] == ["0", "1", "2"]


async def test_the_budget_counts_what_the_provider_counts(
    world: World, services: Services, hosted: Server, words: Words
) -> None:
    limited = {"args": {}, "limits": {"tokens": 10}}
    result = await world.run(document(world, hosted, environments=[
        {**world.document("Effects")["environments"][0], **limited}]))  # fmt: skip
    facts = await episode(services, result.run_id)
    assert (len(facts.turns), facts.stop) == (2, StopReason.MAX_TOKENS)


async def test_a_conversation_the_provider_finds_too_long_ends_the_episode_scored(
    world: World, services: Services, hosted: Server, words: Words
) -> None:
    words.instead = [Answer(400, {"error": {"code": "context_length_exceeded"}})] * 4
    result = await world.run(document(world, hosted))
    stops = [(await episode(services, result.run_id, group, member)).stop for group in range(2) for member in range(2)]
    assert stops.count(StopReason.CONTEXT_OVERFLOW) == 4


async def test_an_outage_is_waited_out_and_a_refusal_is_a_verdict(
    world: World, services: Services, hosted: Server, words: Words
) -> None:
    soon = {"retry-after-ms": "1"}
    withheld = {"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}
    words.instead = [Answer(503, b"", soon), Answer(429, b"", soon), Answer(body=withheld)]
    result = await world.run(document(world, hosted, group={"top_up": 0}, budget={"groups": 3}))
    assert result.state is RunState.COMPLETED
    with psycopg.connect(world.database) as connection:
        failed = connection.execute(
            "SELECT failure, reason, reward FROM episodes WHERE run_id = %s AND state = 'failed'", (result.run_id,)
        ).fetchall()
    assert len(failed) == 1
    assert failed[0][0] == FailureKind.ENGINE
    assert "content filter" in failed[0][1]
    assert failed[0][2] is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"trainer": {"kind": "builtin", "steps": 1}, "budget": {}}, "returns no token ids and logprobs"),
        ({"trainer": {"kind": "external"}}, "returns no token ids and logprobs"),
        ({"sampling": {"top_k": 3}}, "does not know top_k"),
    ],
)
async def test_what_such_an_engine_cannot_do_is_refused_at_the_start(
    world: World, services: Services, hosted: Server, words: Words, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(WorkflowFailureError) as caught:
        await world.run(document(world, hosted, **changes))
    assert sentence in str(caught.value.cause)
    assert hosted.seen == []


async def test_groups_of_messages_are_sealed_and_never_leased(
    world: World, services: Services, hosted: Server, words: Words
) -> None:
    words.usage = None
    result = await world.run(document(world, hosted))
    group = (await load_group(services.store, EpisodeKey(run_id=result.run_id, group_no=0, member=0).group)).group
    assert group.state is GroupState.SEALED
    assert (await episode(services, result.run_id)).turns[0].told_sampled is None
