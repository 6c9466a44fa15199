"""Packed tokens read in SQL are what was packed, to the last bit."""

import array
import struct

import psycopg
import pytest
from atropos.benchmarks.token_storage import SCHEMA, measure
from atropos.db.encoding import pack_floats, pack_ids, pack_mask
from atropos.db.store import Store
from atropos.db.turns import save_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from .samples import rows, started, turn

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40)
MASKS = st.lists(st.integers(0, 1), max_size=40)


def bits(values: list[float]) -> bytes:
    """Zero and minus zero are two numbers here."""
    return struct.pack(f"<{len(values)}f", *values)


@settings(max_examples=60, deadline=None)
@given(ids=IDS, logprobs=FLOATS, mask=MASKS)
async def test_what_was_packed_is_read(store: Store, ids: list[int], logprobs: list[float], mask: list[int]) -> None:
    [(read_ids, read_logprobs, read_mask)] = await rows(
        store,
        "SELECT atropos_ids(%s::bytea), atropos_logprobs(%s::bytea), atropos_mask(%s::bytea)",
        pack_ids(ids),
        pack_floats(logprobs),
        pack_mask(mask),
    )
    assert (read_ids, read_mask) == (ids, mask)
    assert bits(read_logprobs) == bits(list(array.array("f", logprobs)))


async def test_a_turn_reads_as_one_row_for_each_token(store: Store) -> None:
    key = await started(store)
    await save_turn(store, key, turn(tokens=3, sampled=[11, 12, 70000], logprobs=[-0.5, -2.0, -0.0], mask=[1, 1, 0]))
    found = await rows(
        store,
        "SELECT place, id, logprob, trains FROM turns, unnest(atropos_ids(sampled), atropos_logprobs(logprobs),"
        " atropos_mask(mask)) WITH ORDINALITY AS t(id, logprob, trains, place) WHERE run_id = %s ORDER BY place",
        key.run_id,
    )
    assert found == [(1, 11, -0.5, 1), (2, 12, -2.0, 1), (3, 70000, 0.0, 0)]


@pytest.mark.parametrize("function", ["atropos_ids", "atropos_logprobs", "atropos_mask"])
async def test_nothing_is_read_of_nothing(store: Store, function: str) -> None:
    assert await rows(store, f"SELECT {function}(NULL), {function}('')") == [(None, [])]


async def test_the_functions_may_be_used_wherever_postgres_likes(store: Store) -> None:
    found = await rows(
        store,
        "SELECT proname, provolatile::text, proparallel::text, proisstrict, obj_description(oid) IS NOT NULL"
        " FROM pg_proc WHERE proname LIKE 'atropos%%' AND pronamespace = 'public'::regnamespace ORDER BY 1",
    )
    assert found == [(name, "i", "s", True, True) for name in ("atropos_ids", "atropos_logprobs", "atropos_mask")]


def test_the_bench_of_token_storage_measures_both_and_leaves_nothing(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        figures = measure(connection, turns=4, tokens=2048, rounds=1)
        assert connection.execute("SELECT to_regnamespace(%s)", [SCHEMA]).fetchone() == (None,)
    assert figures["arrays"].keys() == figures["bytes"].keys()
    assert all(value > 0 for found in figures.values() for value in found.values())
    assert figures["bytes"]["bytes_per_token"] >= 9  # 4 of the id, 4 of the log-probability, 1 of the mask
