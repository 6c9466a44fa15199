"""A long generation that breaks off is continued behind what was kept of it, not drawn again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from atropos.activities.keeping import STREAMED_ABOVE, keeping
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.queues import WorkerRole
from atropos.contracts.reasons import FinishReason, StopReason
from atropos.contracts.records import EpisodeFacts
from atropos.db.episodes import load_episode
from atropos.db.errors import StoreUnreachable
from atropos.db.store import open_store
from atropos.inference.engines import Completion, LabelSpan
from atropos.inference.errors import EngineFailure, unavailable
from transformers import PreTrainedTokenizerFast

from ..support.scripted import ScriptedEngine, scripted_engine
from ..support.world import ROLES, World, new_namespace

LONG = " ".join(f"{n} and {n}" for n in range(100, 220))
"""Above the constant, in tokens; no tool call, so it is the answer."""
WAIT_S = 120.0
GROWING = Completion([7], [-0.5], FinishReason.LENGTH, (LabelSpan("default", 0, 1),), "scripted", 3)


def says_the_rest(prompt: str, turn: int) -> str:
    """What of the long answer does not stand at the end of the prompt yet, as a model continues its own words."""
    said = next(n for n in range(len(LONG), -1, -1) if prompt.endswith(LONG[:n]))
    return LONG[said:]


@pytest.fixture
async def world(temporal_address: str, database_url: str, model: Path) -> AsyncIterator[World]:
    async with scripted_engine(model, says_the_rest) as engine:
        yield World(await new_namespace(temporal_address), database_url, engine)


@pytest.fixture
def words(model: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(model))


def document(world: World, max_tokens: int = 1500) -> dict[str, Any]:
    """One episode of one answer."""
    return world.document(
        "Effects", environment={"group_size": 1}, budget={"groups": 1}, sampling={"max_tokens": max_tokens}
    )


async def played(world: World, run_id: str) -> EpisodeFacts:
    store = await open_store(world.database)
    facts = await load_episode(store, EpisodeKey(run_id=run_id, group_no=0, member=0))
    await store.close()
    assert facts is not None
    return facts


async def kept(world: World, run_id: str) -> list[int]:
    """How many tokens are kept of each long call of a run."""
    query = "SELECT octet_length(sampled) / 4 FROM partial_turns WHERE run_id = %s"
    async with await psycopg.AsyncConnection.connect(world.database) as connection:
        return [row[0] for row in await (await connection.execute(query, [run_id])).fetchall()]


def check(facts: EpisodeFacts, engine: ScriptedEngine, words: PreTrainedTokenizerFast) -> int:
    """The stored turn is prefix + rest, as the engine was sent and said it. Returns how long the prefix was."""
    [turn] = facts.turns
    first, last = engine.requests[0], engine.requests[-1]
    prompt = first["token_ids"]
    assert last["token_ids"][: len(prompt)] == prompt == turn.prompt_delta
    prefix = last["token_ids"][len(prompt) :]
    assert prefix == engine.streamed[0][: len(prefix)]
    assert turn.sampled == prefix + engine.streamed[-1]
    assert len(turn.logprobs) == len(turn.mask) == len(turn.sampled)
    assert first["sampling_params"]["max_tokens"] - last["sampling_params"]["max_tokens"] == len(prefix)
    assert words.decode(turn.sampled[:-1]) == LONG
    assert (turn.finish, turn.request_id) == (FinishReason.STOP, last["request_id"])
    assert [(span.start, span.end) for span in turn.spans] == [(0, len(turn.sampled))]
    assert (turn.spans[0].engine_id, turn.spans[0].incarnation) == (turn.engine_id, "scripted")
    assert facts.stop is StopReason.ANSWERED
    return len(prefix)


async def test_a_killed_worker_loses_only_what_came_after_the_last_kept_token(
    world: World, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    world.engine.token_delay_s = 0.01
    others = [role for role in ROLES if role is not WorkerRole.MODEL]
    async with world.process([WorkerRole.MODEL], tmp_path) as process, world.workers(others), asyncio.timeout(WAIT_S):
        run = await world.start(document(world))
        while not (before := await kept(world, run.id)):  # noqa: ASYNC110 - what is awaited is in rows
            await asyncio.sleep(0.05)
        [life] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(life), signal.SIGKILL)
        world.engine.token_delay_s = 0.0
        await run.result()
    assert len(world.engine.streamed) == 2
    assert check(await played(world, run.id), world.engine, words) >= before[0]
    assert await kept(world, run.id) == []


async def test_a_stream_that_breaks_off_is_continued_behind_its_last_token(
    world: World, words: PreTrainedTokenizerFast
) -> None:
    world.engine.breaks_after = [300]
    async with world.workers(), asyncio.timeout(WAIT_S):
        run = await world.run(document(world))
    assert len(world.engine.streamed) == 2
    assert check(await played(world, run.run_id), world.engine, words) == 300
    assert await kept(world, run.run_id) == []


async def test_an_answer_that_was_kept_whole_asks_no_engine_again(world: World, words: PreTrainedTokenizerFast) -> None:
    whole = [*words.encode(LONG, add_special_tokens=False), words.eos_token_id]
    world.engine.breaks_after = [len(whole)]
    async with world.workers(), asyncio.timeout(WAIT_S):
        run = await world.run(document(world))
    assert len(world.engine.requests) == 1
    [turn] = (await played(world, run.run_id)).turns
    assert (turn.sampled, turn.finish) == (whole, FinishReason.STOP)
    assert await kept(world, run.run_id) == []


async def test_a_budget_that_was_used_up_asks_no_engine_again(world: World) -> None:
    budget = STREAMED_ABOVE + 10
    world.engine.breaks_after = [budget]
    async with world.workers(), asyncio.timeout(WAIT_S):
        run = await world.run(document(world, budget))
    assert len(world.engine.requests) == 1
    [turn] = (await played(world, run.run_id)).turns
    assert (len(turn.sampled), turn.finish) == (budget, FinishReason.LENGTH)


async def test_a_long_answer_ends_where_the_engine_has_no_more_room(world: World) -> None:
    """Its context is smaller than its model's, and it refuses what is longer."""
    world.engine.context, world.engine.breaks_after = 600, [300]
    async with world.workers(), asyncio.timeout(WAIT_S):
        broken = await world.run(document(world))
        room = world.engine.context - len(world.engine.requests[0]["token_ids"])
        world.engine.requests.clear()
        world.engine.breaks_after = [room]
        full = await world.run(document(world))
    assert len(world.engine.requests) == 1
    for run in (broken, full):
        facts = await played(world, run.run_id)
        [turn] = facts.turns
        assert (len(turn.sampled), turn.finish, facts.failure) == (room, FinishReason.LENGTH, None)


async def test_a_store_that_is_away_holds_nothing_up_and_the_next_prefix_is_tried() -> None:
    tries: asyncio.Queue[Completion] = asyncio.Queue()

    async def away(partial: Completion) -> None:
        tries.put_nowait(partial)
        raise StoreUnreachable("Postgres cannot be reached")

    async with keeping(away) as keeper:
        for _ in range(3):
            await keeper(GROWING)
            assert await asyncio.wait_for(tries.get(), 10) is GROWING
    assert keeper.used


async def test_a_store_that_hangs_holds_nothing_up_and_nothing_is_written_after_the_end() -> None:
    given_up = asyncio.Event()

    async def hangs(partial: Completion) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    async with keeping(hangs) as keeper:
        for _ in range(3):
            await keeper(GROWING)
            await asyncio.sleep(0)
    assert given_up.is_set()


async def test_what_an_engine_said_before_it_failed_is_kept() -> None:
    written: list[Completion] = []

    async def slowly(partial: Completion) -> None:
        await asyncio.sleep(0.01)
        written.append(partial)

    async def breaks_off() -> None:
        async with keeping(slowly) as keeper:
            await keeper(GROWING)
            raise unavailable("it broke off")

    with pytest.raises(EngineFailure):
        await breaks_off()
    assert written == [GROWING]


async def test_a_short_completion_is_not_streamed(world: World) -> None:
    async with world.workers(), asyncio.timeout(WAIT_S):
        await world.run(document(world, STREAMED_ABOVE))
    assert [request["stream"] for request in world.engine.requests] == [False]
