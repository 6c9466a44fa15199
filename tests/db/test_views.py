"""What the views of a run say is what its rows say, and each example of the pages runs."""

import re
from pathlib import Path
from typing import Any

import atropos
import psycopg
import pytest
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.records import VersionSpan
from atropos.db.endings import finish_episode
from atropos.db.episodes import save_calls, start_episode
from atropos.db.store import Store
from atropos.db.turns import save_turn

from .ledger import everything, ledger, published
from .samples import admitted, beginning, call, closed, rows, started, training_run, turn, versioned

PAGE = Path(atropos.__file__).parent / "docs" / "data.md"
QUERIES = re.findall(r"^```sql\n(.*?);\n```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


async def test_every_view_and_every_column_of_it_says_what_it_means(store: Store) -> None:
    found = await rows(
        store,
        "SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
        " WHERE c.relkind = 'v' AND c.relnamespace = 'public'::regnamespace"
        " AND (obj_description(c.oid) IS NULL OR col_description(c.oid, a.attnum) IS NULL)",
    )
    assert found == []


@pytest.fixture(scope="module")
async def run_id(store: Store) -> str:
    run_id = await everything(store)
    key = await started(store, run_id)
    await save_turn(store, key, turn())
    await save_calls(store, key, [call(error="there is no such tool")])
    return run_id


def test_the_page_shows_every_view() -> None:
    text = " ".join(QUERIES)
    for view in ("sft_examples", "dpo_pairs", "episode_outcomes", "run_progress", "staleness", "token_costs"):
        assert f"FROM {view} " in text


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.split("FROM ")[-1].split()[0])
def test_an_example_of_the_page_runs_and_finds_rows(database_url: str, run_id: str, query: str) -> None:
    query = query.replace("run/demo-ab12", run_id)
    with psycopg.connect(database_url) as connection, connection.cursor() as cursor:
        if query.startswith("COPY"):
            with cursor.copy(query.encode()) as copy:
                assert list(copy.rows())
        else:
            assert cursor.execute(query.encode()).fetchall()


async def test_an_outcome_keeps_no_reward_and_a_reward_of_0_apart(store: Store) -> None:
    run_id = await training_run(store)
    await closed(store, run_id, (0.0, None))
    [group] = await admitted(store, run_id, size=2)
    bad, running = group.key.episode(0), group.key.episode(1)
    for key in (bad, running):
        await start_episode(store, beginning(key))
    await finish_episode(
        store, bad, stop=StopReason.FAILED, failure=FailureKind.ENGINE, reason="it was away", reward=None
    )
    again = group.key.episode(0, 1)
    await start_episode(store, beginning(again))
    query = (
        "SELECT group_no, member, attempt, newest, outcome, failure, reward, group_state, seconds >= 0"
        " FROM episode_outcomes WHERE run_id = %s ORDER BY 1, 2, 3"
    )
    assert await rows(store, query, run_id) == [
        (0, 0, 0, True, "scored", None, 0.0, "filtered", True),
        (0, 1, 0, True, "unscored", None, None, "filtered", True),
        (1, 0, 0, False, "invalid", "engine", None, "running", True),
        (1, 0, 1, True, "running", None, None, "running", None),
        (1, 1, 0, True, "running", None, None, "running", None),
    ]


async def test_an_outcome_names_the_step_that_trained_on_it(store: Store) -> None:
    run_id = await ledger(store)
    found = await rows(
        store,
        "SELECT DISTINCT group_no, trained_in FROM episode_outcomes WHERE run_id = %s ORDER BY 1",
        run_id,
    )
    assert found == [(0, 0), (1, 0), (2, 1), (3, 1), (4, None), (5, None), (6, None), (7, None), (8, None)]


async def test_progress_counts_the_groups_of_a_run_by_what_became_of_them(store: Store) -> None:
    run_id = await everything(store)
    [found] = await rows(
        store,
        "SELECT open_groups, sealed_groups, leased_groups, trained_groups, filtered_groups, stale_groups,"
        " failed_groups, evaluation_groups, steps, wanted_steps, staleness, version, published_version"
        " FROM run_progress WHERE run_id = %s",
        run_id,
    )
    assert found == (1, 1, 2, 4, 1, 0, 1, 2, 2, 9, 0, 2, None)
    [(tokens, reward)] = await rows(
        store, "SELECT sampled_tokens, reward_mean FROM run_progress WHERE run_id = %s", run_id
    )
    assert tokens == (9 * 2 + 2 * 2) * 3
    assert reward is not None


async def test_staleness_counts_from_the_step_or_for_what_waits_from_the_next(store: Store) -> None:
    run_id = await ledger(store)
    query = "SELECT group_no, state, oldest_version, step, staleness FROM staleness WHERE run_id = %s ORDER BY 1"
    assert await rows(store, query, run_id) == [
        (0, "trained", 0, 0, 0),
        (1, "trained", 0, 0, 0),
        (2, "trained", 1, 1, 0),
        (3, "trained", 1, 1, 0),
        (6, "leased", 1, 2, 1),
        (7, "leased", 1, 2, 1),
        (8, "sealed", 1, None, 1),
    ]


async def costs(store: Store, run_id: str) -> dict[Any, tuple[Any, ...]]:
    found = await rows(
        store,
        "SELECT version, calls, prompt_tokens, new_prompt_tokens, rerendered_tokens, sampled_tokens, trainable_tokens,"
        " provisional_tokens, lost_tokens, late_tokens FROM token_costs WHERE run_id = %s",
        run_id,
    )
    return {version: tuple(rest) for version, *rest in found}


async def test_tokens_cost_what_was_sampled_appended_and_rendered_anew(store: Store) -> None:
    run_id = await training_run(store)
    key = await started(store, run_id)
    await save_turn(store, key, versioned(run_id, 0, 0, 3))
    await save_turn(store, key, versioned(run_id, 0, 1, 4, mask=[1, 1, 0, 0]))
    both = (VersionSpan(f"{run_id}@0", 0, 0, 2), VersionSpan(f"{run_id}@1", 1, 2, 5))
    fork = turn(2, 5, segment=1, opens_segment=True, prompt_delta=list(range(9)), spans=both, mask=[1, 1, 1, 1, 0])
    await save_turn(store, key, fork)
    await save_turn(store, key, turn(3, 0, segment=1))
    assert await costs(store, run_id) == {
        #    calls, given: 2, (2 + 3) + 2 and 9; appended: 2 + 2; rendered; sampled: 3 + 4 + 2; trains: 3 + 2 + 2
        0: (3, 18, 4, 9, 9, 7, 0, 0, 0),
        1: (0, 0, 0, 0, 3, 2, 0, 0, 0),
        None: (1, 9 + 5 + 2, 2, 0, 0, 0, 0, 0, 0),
    }


async def test_tokens_in_doubt_lost_and_late_are_counted_apart(store: Store) -> None:
    run_id = await training_run(store)
    await published(store, run_id, 0)
    key = await started(store, run_id)
    await save_turn(store, key, versioned(run_id, 0, 0, 3))
    await save_turn(store, key, versioned(run_id, 0, 0, 2))  # another was first
    await finish_episode(store, key, stop=StopReason.FAILED, failure=FailureKind.TOOL, reason="gone", reward=None)
    assert (await costs(store, run_id))[0] == (1, 2, 2, 0, 3, 3, 0, 3, 2)


async def test_costs_of_evaluations_are_beside_those_of_training(store: Store) -> None:
    run_id = await everything(store)
    found = await rows(
        store,
        "SELECT kind, sum(sampled_tokens)::int FROM token_costs WHERE run_id = %s GROUP BY kind ORDER BY kind",
        run_id,
    )
    assert found == [("eval", 2 * 2 * 3), ("train", 9 * 2 * 3 + 3)]
