"""The queries that matter read what they need and no more, whatever else the store holds: so Postgres' own plans say.

Each is the product's own statement, prepared as it is in a worker, explained by `auto_explain` while it runs.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from atropos.contracts.episode import Score
from atropos.contracts.states import PublicationState
from atropos.db.admission import admission_state
from atropos.db.batches import Leased, abandon_batch, lease_batch
from atropos.db.groups import open_groups
from atropos.db.overview import group_lines, run_figures, run_heads
from atropos.db.publishing import begin_publication, settle_publication
from atropos.db.samples import read_batch
from atropos.db.scores import episode_scores, save_scores
from atropos.db.store import Store, open_store
from atropos.db.summary import run_summary
from atropos.db.turns import save_turn

from ..support.many import GROUPS_A_STEP, MEMBERS, many_episodes
from .ledger import ENGINE, LIFE
from .samples import closed, started, training_run, versioned

EPISODES = 4_000
BACKLOG = 8_000
BIG = ("groups", "episodes", "turns", "segments", "tool_calls", "scores")

_WAITING = """
INSERT INTO groups (run_id, group_no, kind, environment, task_key, draw, size, state, valid, oldest_version, closed_at,
  reported_in)
SELECT run_id, next_group_no + n, kind, environment, task_key, next_group_no + n, size, 'sealed', size, 10, now(), 0
FROM runs JOIN groups g USING (run_id), generate_series(0, %(more)s - 1) n
WHERE run_id = %(run)s AND group_no = 0
"""

_CALLS = """
INSERT INTO tool_calls (run_id, group_no, member, attempt, turn, call_index, call, content, replies, done, truncated,
  info, seconds)
SELECT run_id, group_no, member, attempt, turn, 0, '{"name": "add"}', '2', '[]', false, false, '{}', 0.1 FROM turns
"""
_SCORES = """
INSERT INTO scores (run_id, group_no, member, attempt, name, scorer_version, value, weight, metric)
SELECT run_id, group_no, member, attempt, 'right', 'v1', reward, 1, false FROM episodes WHERE reward IS NOT NULL
"""
_RUNS = """
INSERT INTO runs (run_id, name, config, config_hash, seed, concurrency, created_at)
SELECT 'run/old-' || n, name, config, config_hash, seed, concurrency, created_at - n * interval '1 h'
FROM runs, generate_series(1, 200) n WHERE run_id = 'run/big'
"""


@dataclass
class Plans:
    """What was explained, as nodes of plans."""

    nodes: list[dict[str, Any]] = field(default_factory=list)

    def take(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        _, found, plan = (diagnostic.message_primary or "").partition("plan:\n")
        if found:
            self.nodes += _nodes(json.loads(plan)["Plan"])

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes if "Index Name" in node}

    @property
    def scanned(self) -> set[str]:
        """Big tables that were read from one end to the other."""
        return {node["Relation Name"] for node in self.nodes if node["Node Type"] == "Seq Scan"} & set(BIG)

    def read(self, table: str) -> int:
        """Rows of a table that were read, those that did not fit included."""
        return sum(
            int((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
            for node in self.nodes
            if node.get("Relation Name") == table and "Scan" in node["Node Type"]
        )


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for inner in node.get("Plans", ()):
        yield from _nodes(inner)


@pytest.fixture(scope="module")
async def busy(database_url: str) -> str:
    """A store with a big run and two more, of which one has a long backlog: the name of that one."""
    store = await open_store(database_url)
    for name in ("big", "other"):
        await many_episodes(store, database_url, f"run/{name}", EPISODES)
    await many_episodes(store, database_url, "run/waiting", EPISODES // 4, staleness={"max": 0})
    async with store.direct() as connection:
        await connection.execute(_WAITING.encode(), {"run": "run/waiting", "more": BACKLOG})
        for statement in (_CALLS, _SCORES, _RUNS):
            await connection.execute(statement.encode())
        await connection.execute(b"UPDATE environments SET next_draw = (SELECT max(draw) + 1 FROM groups)")
        await connection.execute(b"UPDATE groups SET oldest_version = 10 WHERE run_id = 'run/waiting'")
        await connection.execute(b"VACUUM ANALYZE")
    await store.close()
    return "run/waiting"


@pytest.fixture
async def explained(database_url: str, busy: str) -> AsyncIterator[tuple[Store, Plans]]:
    """A store of one connection that tells its plans."""
    store, plans = await open_store(database_url, pool_size=1), Plans()
    async with store.direct() as connection:
        await connection.execute(b"LOAD 'auto_explain'")
        for name, value in {
            "log_min_duration": "0",
            "log_analyze": "on",
            "log_timing": "off",
            "log_nested_statements": "on",
            "log_format": "json",
            "log_level": "notice",
        }.items():
            await connection.execute(f"SET auto_explain.{name} = '{value}'".encode())
        connection.add_notice_handler(plans.take)
    yield store, plans
    await store.close()


USED: set[str] = set()
"""Indexes that some query of this module used."""


async def explain(explained: tuple[Store, Plans], query: Awaitable[Any]) -> Plans:
    _, plans = explained
    plans.nodes.clear()
    await query
    USED.update(plans.indexes)
    assert plans.scanned == set()
    return plans


async def asked(store: Store, query: str, *values: Any) -> list[tuple[Any, ...]]:
    async with store.direct() as connection:
        return await (await connection.execute(query.encode(), values)).fetchall()


async def test_a_lease_reads_no_more_of_a_long_backlog_than_it_takes(explained: Any, busy: str) -> None:
    store, _ = explained
    plans = await explain(explained, lease_batch(store, busy))
    assert {"ix_groups_sealed", "ix_groups_ageing", "ix_groups_unreported"} <= plans.indexes
    assert plans.read("groups") < 10 * GROUPS_A_STEP
    assert plans.read("episodes") < 10 * GROUPS_A_STEP * MEMBERS
    leased = await lease_batch(store, busy)
    assert isinstance(leased, Leased)
    assert leased.groups == GROUPS_A_STEP


async def test_what_is_too_old_is_found_among_what_is_not(explained: Any, busy: str) -> None:
    store, _ = explained
    await asked(store, "UPDATE groups SET oldest_version = 0 WHERE run_id = %s AND group_no = 5000 RETURNING 1", busy)
    [leased] = await asked(store, "SELECT batch_no FROM batches WHERE run_id = %s AND state = 'leased'", busy)
    await abandon_batch(store, busy, *leased)
    plans = await explain(explained, lease_batch(store, busy))
    assert await asked(store, "SELECT group_no FROM groups WHERE run_id = %s AND state = 'stale'", busy) == [(5000,)]
    assert plans.read("groups") < 10 * GROUPS_A_STEP


async def test_a_batch_is_read_by_its_keys(explained: Any, busy: str) -> None:
    store, _ = explained
    [leased] = await asked(store, "SELECT batch_no FROM batches WHERE run_id = %s AND state = 'leased'", busy)
    plans = await explain(explained, read_batch(store, busy, *leased))
    assert {"pk_batch_groups", "pk_episodes", "pk_turns"} <= plans.indexes
    assert plans.read("turns") <= GROUPS_A_STEP * MEMBERS


async def test_admission_counts_groups_without_reading_them(explained: Any, busy: str) -> None:
    store, _ = explained
    plans = await explain(explained, admission_state(store, busy))
    assert {"ix_groups_counted", "ix_groups_open"} <= plans.indexes
    assert {node["Node Type"] for node in plans.nodes if node.get("Index Name") == "ix_groups_counted"} == {
        "Index Only Scan"
    }
    assert plans.read("episodes") == 0  # none is open
    assert (await explain(explained, open_groups(store, busy))).read("groups") == 0


async def test_the_overview_reads_one_run_at_a_time(explained: Any) -> None:
    store, _ = explained
    heads = await explain(explained, run_heads(store, 2))
    assert heads.read("runs") <= 3
    assert "ix_runs_created_at" in heads.indexes
    plans = await explain(explained, run_figures(store, ["run/other"]))
    assert plans.read("episodes") <= EPISODES
    assert plans.read("groups") <= EPISODES
    plans = await explain(explained, group_lines(store, "run/big", 25))
    assert "pk_groups" in plans.indexes
    assert plans.read("groups") == 25
    assert plans.read("episodes") == 25 * MEMBERS


async def test_a_summary_counts_the_turns_of_running_episodes_alone(explained: Any) -> None:
    store, _ = explained
    key = await started(store, "run/other")
    await save_turn(store, key, versioned("run/other", 0))
    plans = await explain(explained, run_summary(store, "run/other"))
    assert "ix_episodes_running" in plans.indexes
    assert plans.read("turns") == 1


@pytest.mark.parametrize("view", ["sft_examples", "dpo_pairs", "conversations", "episode_outcomes", "token_costs"])
async def test_an_export_of_a_run_reads_that_run_alone(explained: Any, view: str) -> None:
    store, _ = explained
    run_id = await training_run(store)
    for _ in range(3):
        await closed(store, run_id, (0.0, 1.0))
    plans = await explain(explained, asked(store, f"SELECT * FROM {view} WHERE run_id = ANY(%s)", [run_id]))
    assert plans.read("episodes") <= 2 * 3 * 4  # a view may look at an episode more than once
    assert plans.read("turns") + plans.read("episodes") > 0
    assert plans.read("turns") <= 2 * 3 * 4


async def test_a_score_that_comes_late_is_stored_and_read_by_its_key(explained: Any) -> None:
    store, _ = explained
    key = await started(store, "run/big")
    plans = await explain(explained, save_scores(store, key, [Score(name="right", value=1.0)], "v1"))
    assert {"pk_groups", "pk_episodes"} <= plans.indexes
    plans = await explain(explained, episode_scores(store, key))
    assert "pk_scores" in plans.indexes
    late = "SELECT kind, record FROM late_results WHERE (run_id, group_no, member, attempt) = (%s, %s, %s, %s)"
    await save_scores(store, key, [Score(name="right", value=0.0)], "v1")
    async with store.direct() as connection:
        await connection.execute(b"SET enable_seqscan = off")  # there are few late results, as it should be
    plans = await explain(explained, asked(store, late, key.run_id, key.group_no, key.member, key.attempt))
    assert "ix_late_results_episode" in plans.indexes


async def test_settling_a_publication_looks_at_turns_in_doubt_alone(explained: Any) -> None:
    store, _ = explained
    run_id = await training_run(store)
    await begin_publication(store, run_id, ENGINE, LIFE, 0)
    key = await started(store, run_id)
    await save_turn(store, key, versioned(run_id, 0))
    settled = settle_publication(store, run_id, ENGINE, LIFE, 0, PublicationState.VERIFIED)
    plans = await explain(explained, settled)
    assert "ix_turns_provisional" in plans.indexes
    assert plans.read("turns") <= 2


async def test_every_index_that_is_no_rule_is_used_by_one_of_these(explained: Any) -> None:
    store, _ = explained
    found = await asked(
        store,
        "SELECT indexrelid::regclass::text FROM pg_index JOIN pg_class c ON c.oid = indrelid"
        " WHERE NOT indisunique AND relnamespace = 'public'::regnamespace",
    )
    assert {name for (name,) in found} <= USED
