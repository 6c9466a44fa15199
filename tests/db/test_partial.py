"""Long model calls while they grow: a prefix only gets longer, and the whole turn ends it."""

import pytest
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.reasons import StopReason
from atropos.contracts.records import BadRecord, PartialTurn, Sampled, VersionSpan, joined
from atropos.db.episodes import finish_episode, load_episode, save_turn
from atropos.db.partial import load_partial, prompt_digest, save_partial
from atropos.db.store import Store
from atropos.tests.db.samples import partial, rows, started, turn
from hypothesis import given
from hypothesis import strategies as st


async def kept(store: Store, key: EpisodeKey) -> list[int]:
    """The turns of an episode of which a part is stored."""
    query = "SELECT turn FROM partial_turns WHERE (run_id, group_no, member) = (%s, %s, %s) ORDER BY turn"
    return [row[0] for row in await rows(store, query, key.run_id, key.group_no, key.member)]


async def test_a_prefix_is_read_back_identically(store: Store) -> None:
    key = await started(store)
    assert await load_partial(store, key, 0) is None
    spans = (VersionSpan("base", 0, 0, 1, "a", "x"), VersionSpan("next", 1, 1, 3, "b", "y"))
    prefix = PartialTurn(prompt_digest([1, 2]), Sampled([5, 6, 7], [-0.5, -0.25, 0.0], spans, "b", "y"))
    assert await save_partial(store, key, 0, prefix)
    assert await load_partial(store, key, 0) == prefix


async def test_a_shorter_prefix_never_replaces_a_longer_one_of_the_same_prompt(store: Store) -> None:
    key = await started(store)
    assert await save_partial(store, key, 0, partial(5))
    assert not await save_partial(store, key, 0, partial(4, first=50))
    assert not await save_partial(store, key, 0, partial(5, first=50))
    assert await load_partial(store, key, 0) == partial(5)
    assert await save_partial(store, key, 0, partial(6, first=50))
    assert await load_partial(store, key, 0) == partial(6, first=50)


async def test_another_prompt_replaces_a_prefix_of_any_length(store: Store) -> None:
    key = await started(store)
    await save_partial(store, key, 0, partial(5))
    assert await save_partial(store, key, 0, partial(2, prompt=(9,)))
    assert await load_partial(store, key, 0) == partial(2, prompt=(9,))


async def test_the_whole_turn_removes_its_prefix_and_no_other(store: Store) -> None:
    key, other = await started(store), await started(store)
    await save_partial(store, key, 0, partial(2))
    await save_partial(store, key, 1, partial(2))
    await save_partial(store, other, 0, partial(2))
    assert (await save_turn(store, key, turn(0), had_partial=True))[1]
    assert (await kept(store, key), await kept(store, other)) == ([1], [0])


async def test_a_prefix_that_comes_after_its_turn_is_not_stored(store: Store) -> None:
    key = await started(store)
    await save_turn(store, key, turn(0))
    assert not await save_partial(store, key, 0, partial(2))
    assert await kept(store, key) == []


async def test_the_end_of_an_episode_sweeps_what_never_became_a_turn(store: Store) -> None:
    key = await started(store)
    await save_partial(store, key, 0, partial(2))
    await finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=None)
    assert await kept(store, key) == []
    assert not await save_partial(store, key, 0, partial(9))
    assert await kept(store, key) == []


async def test_spans_of_older_builds_are_read(store: Store) -> None:
    key = await started(store)
    await save_turn(store, key, turn(0, spans=(VersionSpan("base", 0, 0, 3, "engine", "first"),)))
    old = """UPDATE turns SET spans = '[["base", 0, 0, 3]]' WHERE run_id = %s RETURNING 1"""
    await rows(store, old, key.run_id)
    facts = await load_episode(store, key)
    assert facts is not None
    assert facts.turns[0].spans == (VersionSpan("base", 0, 0, 3),)


@pytest.mark.parametrize(
    ("sampled", "logprobs", "end"),
    [([1, 2], [-1.0], 2), ([1], [float("nan")], 1), ([1, 2], [-1.0] * 2, 1), ([], [], 0)],
)
def test_a_prefix_that_contradicts_itself_is_refused(sampled: list[int], logprobs: list[float], end: int) -> None:
    with pytest.raises(BadRecord):
        Sampled(sampled, logprobs, (VersionSpan("base", 0, 0, end),) if end else (), "engine", "first")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4)), max_size=6), st.integers(0, 6))
def test_joined_spans_name_for_each_token_who_sampled_it(pieces: list[tuple[str, int]], cut: int) -> None:
    def tiled(part: list[tuple[str, int]]) -> tuple[VersionSpan, ...]:
        spans, position = [], 0
        for engine, length in part:
            spans.append(VersionSpan("base", 0, position, position + length, engine, "life"))
            position += length
        return tuple(spans)

    whole = joined(tiled(pieces[:cut]), tiled(pieces[cut:]))
    who = [span.engine_id for span in whole for _ in range(span.start, span.end)]
    assert who == [engine for engine, length in pieces for _ in range(length)]
    assert [span.start for span in whole] == [0, *(span.end for span in whole)][: len(whole)]
