"""Rows that must not be: the database itself refuses each, whoever writes it, and says which rule it breaks."""

import json
from typing import Any

import psycopg
import pytest
from atropos.db.models import Base
from atropos.db.store import Store

from .ledger import everything
from .samples import rows

NAN = "\\x0000c07f"
MINUS_INFINITY = "\\x000080ff"
NEGATIVE = "\\xffffffff"

RULES = (
    ("runs_state", "runs SET state = 'done', ended_at = now()"),
    ("runs_ended", "runs SET state = 'completed'"),
    ("runs_concurrency", "runs SET concurrency = 0"),
    ("runs_next_group_no", "runs SET next_group_no = -1"),
    ("runs_config_json", "runs SET config = '[]'"),
    ("environments_weight", "environments SET weight = 'NaN'"),
    ("environments_weight", "environments SET weight = 0"),
    ("environments_group_size", "environments SET group_size = 0"),
    ("environments_next_draw", "environments SET next_draw = -1"),
    ("tasks_split", "tasks SET split = 'dev'"),
    ("tasks_task_key", "tasks SET task_key = ''"),
    ("tasks_quarantine", "tasks SET quarantined_at = now(), quarantine_reason = NULL"),
    ("tasks_lossy", "tasks SET lossy = true"),
    ("evaluations_split", "evaluations SET split = 'train'"),
    ("evaluations_state", "evaluations SET state = 'lost'"),
    ("evaluations_sizes", "evaluations SET samples = 0, episodes = 0"),
    ("evaluations_version", "evaluations SET policy_version = -1"),
    ("evaluations_episodes", "evaluations SET episodes = 9"),
    ("evaluations_threshold_finite", "evaluations SET threshold = 'NaN'"),
    ("evaluations_mean_reward_finite", "evaluations SET mean_reward = '-Infinity'"),
    ("evaluations_ended", "evaluations SET ended_at = NULL"),
    ("evaluations_completed", "evaluations SET pass_at = NULL"),
    ("groups_kind", "groups SET kind = 'spare', evaluation = NULL"),
    ("groups_state", "groups SET state = 'unheard'"),
    ("groups_failure", "groups SET failure = 'weather' WHERE state = 'failed'"),
    ("groups_numbers", "groups SET draw = -1 WHERE group_no = 8"),
    ("groups_evaluation", "groups SET kind = 'eval' WHERE kind = 'train' AND state = 'sealed'"),
    ("groups_failed", "groups SET state = 'failed'"),
    ("groups_closed", "groups SET state = 'running' WHERE group_no = 8"),
    ("groups_valid", "groups SET valid = NULL, mean_reward = NULL"),
    ("groups_valid", "groups SET valid = size + 1"),
    ("groups_mean_reward", "groups SET valid = 0"),
    ("groups_mean_reward_finite", "groups SET mean_reward = 'NaN'"),
    ("groups_oldest_version", "groups SET oldest_version = -1"),
    ("groups_trained", "groups SET state = 'trained' WHERE kind = 'eval'"),
    ("policy_versions_version", "policy_versions SET version = -1 WHERE version = 1"),
    ("policy_versions_label", "policy_versions SET label = ''"),
    ("policy_versions_digest", "policy_versions SET path = NULL WHERE digest IS NOT NULL"),
    ("engines_state", "engines SET state = 'tired'"),
    ("engines_concurrency", "engines SET concurrency = 0"),
    ("events_kind", "events SET kind = ''"),
    ("episodes_state", "episodes SET state = 'sleeping'"),
    ("episodes_stop", "episodes SET stop = 'bored'"),
    ("episodes_failure", "episodes SET failure = 'weather' WHERE state = 'failed'"),
    ("episodes_numbers", "episodes SET turns = -1"),
    ("episodes_start_state", "episodes SET start_state = NULL"),
    ("episodes_lossy", "episodes SET lossy = true"),
    ("episodes_ended", "episodes SET ended_at = NULL"),
    ("episodes_ended", "episodes SET stop = NULL"),
    ("episodes_running", "episodes SET reward = 1 WHERE state = 'running'"),
    ("episodes_failed", "episodes SET reward = 1, failure = 'tool' WHERE state = 'failed'"),
    ("episodes_done", "episodes SET stop = 'failed' WHERE state = 'done'"),
    ("episodes_done", "episodes SET failure = 'engine' WHERE state = 'done'"),
    ("episodes_version", "episodes SET sampled_tokens = 0 WHERE state = 'done'"),
    ("episodes_version", "episodes SET policy_version = -1 WHERE state = 'done'"),
    ("episodes_prompt_json", "episodes SET prompt = '{}'"),
    ("episodes_reward_finite", "episodes SET reward = 'NaN' WHERE state = 'done'"),
    ("episodes_reward_finite", "episodes SET reward = 'Infinity' WHERE state = 'done'"),
    ("turns_finish", "turns SET finish = 'bored'"),
    ("turns_numbers", "turns SET turn = -1"),
    ("turns_ids", "turns SET prompt_delta = '\\x00'"),
    ("turns_ids", f"turns SET prompt_delta = '{NEGATIVE}'"),
    ("turns_ids", f"turns SET sampled = overlay(sampled PLACING '{NEGATIVE}' FROM 5)"),
    ("turns_lengths", "turns SET logprobs = logprobs || '\\x00000000'"),
    ("turns_lengths", "turns SET logprobs = ''"),
    ("turns_lengths", "turns SET mask = mask || '\\x01'"),
    ("turns_mask", "turns SET mask = '\\x010102'"),
    ("turns_logprobs_finite", f"turns SET logprobs = overlay(logprobs PLACING '{NAN}' FROM 1)"),
    ("turns_logprobs_finite", f"turns SET logprobs = overlay(logprobs PLACING '{MINUS_INFINITY}' FROM 9)"),
    ("turns_spans", "turns SET spans = '{}'"),
    ("turns_spans", "turns SET spans = '[]'"),
    ("turns_spans", """turns SET spans = '[["base", 0, 0, 2]]'"""),
    ("turns_spans", """turns SET spans = '[["base", 0, 1, 3]]'"""),
    ("turns_spans", """turns SET spans = '["base"]'"""),
    ("turns_temperature", "turns SET temperature = 'NaN'"),
    ("turns_temperature", "turns SET temperature = -1"),
    ("turns_version", "turns SET policy_version = NULL"),
    ("turns_version", "turns SET policy_version = -1"),
    ("turns_lossy", "turns SET lossy = true"),
    ("turns_told", "turns SET told_sampled = 1"),
    ("turns_told", "turns SET told_prompt = 1"),
    ("turns_message_json", "turns SET message = '[]'"),
    ("partial_turns_numbers", "partial_turns SET turn = -1"),
    ("partial_turns_prompt_digest", "partial_turns SET prompt_digest = 'a prompt'"),
    ("partial_turns_ids", f"partial_turns SET sampled = overlay(sampled PLACING '{NEGATIVE}' FROM 1)"),
    ("partial_turns_sampled", "partial_turns SET sampled = '', logprobs = '', spans = '[]'"),
    ("partial_turns_spans", "partial_turns SET spans = '[]'"),
    ("partial_turns_lengths", "partial_turns SET logprobs = logprobs || '\\x00000000'"),
    ("partial_turns_logprobs_finite", f"partial_turns SET logprobs = overlay(logprobs PLACING '{NAN}' FROM 5)"),
    ("segments_numbers", "segments SET first_turn = -1"),
    ("segments_prompt", "segments SET prompt = '\\x00000000'"),
    ("segments_ids", f"segments SET segment = 1, first_turn = 1, prompt = '{NEGATIVE}'"),
    ("tool_calls_call_index", "tool_calls SET call_index = -2, call = '{}'"),
    ("tool_calls_call", "tool_calls SET call = NULL WHERE call_index >= 0"),
    ("tool_calls_call_json", "tool_calls SET call = '[]' WHERE call_index >= 0"),
    ("tool_calls_replies_json", "tool_calls SET replies = '{}'"),
    ("tool_calls_state", "tool_calls SET state = '{}', state_blob = 'x'"),
    ("tool_calls_lossy", "tool_calls SET lossy = true"),
    ("tool_calls_seconds", "tool_calls SET seconds = 'Infinity'"),
    ("tool_calls_reward_finite", "tool_calls SET reward = 'NaN'"),
    ("scores_name", "scores SET name = ''"),
    ("scores_value_finite", "scores SET value = '-Infinity'"),
    ("scores_value_finite", "scores SET value = 'NaN'"),
    ("scores_weight_finite", "scores SET weight = 'Infinity'"),
    ("blobs_digest", "blobs SET data = data || '\\x00'"),
    ("evaluation_samples_success", "evaluation_samples SET success = NULL WHERE reward IS NOT NULL"),
    ("evaluation_samples_sample", "evaluation_samples SET sample = -1 WHERE sample = 0"),
    ("evaluation_samples_reward_finite", "evaluation_samples SET reward = 'NaN'"),
    ("late_results_kind", "late_results SET kind = 'early'"),
    ("late_results_numbers", "late_results SET member = -1"),
    ("batches_state", "batches SET state = 'eaten'"),
    ("batches_numbers", "batches SET fence = -1"),
    ("batches_counts", "batches SET filtered = -1"),
    ("batches_reward_mean", "batches SET rewards = 0 WHERE reward_mean IS NOT NULL"),
    ("batches_reward_mean_finite", "batches SET reward_mean = 'NaN' WHERE reward_mean IS NOT NULL"),
    ("batches_ended", "batches SET ended_at = now() WHERE state = 'leased'"),
    ("train_steps_version", "train_steps SET version = step"),
    ("train_steps_numbers", "train_steps SET groups = 0"),
    ("train_steps_numbers", "train_steps SET staleness = -1"),
    ("train_steps_metrics_json", "train_steps SET metrics = '[]'"),
    ("publications_state", "publications SET state = 'hoped'"),
    ("publications_proved", "publications SET proved = false WHERE state = 'verified'"),
    ("publications_distance", "publications SET distance = -1"),
    ("publications_distance_finite", "publications SET distance = 'NaN'"),
)
"""A check constraint without `ck_`, and a change of rows that breaks it first."""

UNIQUE = (
    ("uq_batches_leased", "batches SET state = 'leased', ended_at = NULL WHERE batch_no = 1"),
    ("uq_batches_step", "batches SET step = 0 WHERE batch_no = 1"),
    ("uq_batch_groups_live", "batch_groups SET group_no = 0 WHERE batch_no = 1 AND group_no = 2"),
    ("uq_train_steps_batch", "train_steps SET batch_no = 0 WHERE step = 1"),
    ("uq_policy_versions_label", "policy_versions SET label = (SELECT min(label) FROM policy_versions)"),
    ("uq_groups_draw", "groups SET draw = 0 WHERE group_no = 1"),
    ("uq_groups_sample", "groups SET draw = 0 WHERE kind = 'eval'"),
    ("uq_evaluation_samples_episode", "evaluation_samples SET group_no = 9, member = 0, attempt = 0"),
)

NOWHERE = (
    ("environments_runs", {"run_id": "run/none"}),
    ("tasks_environments", {"environment": "none"}),
    ("policy_versions_runs", {"run_id": "run/none"}),
    ("engines_runs", {"run_id": "run/none"}),
    ("events_runs", {"run_id": "run/none"}),
    ("evaluations_environments", {"name": "new", "environment": "none"}),
    ("evaluations_runs", {"run_id": "run/none"}),
    ("groups_tasks", {"group_no": 99, "draw": 99, "task_key": "none"}),
    ("groups_evaluations", {"group_no": 99, "kind": "eval", "evaluation": "none", "state": "sealed"}),
    ("groups_batches", {"group_no": 99, "draw": 99, "reported_in": 99}),
    ("blobs_runs", {"run_id": "run/none"}),
    ("episodes_groups", {"group_no": 99}),
    ("episodes_blobs", {"attempt": 9, "start_state": None, "start_state_blob": "none"}),
    ("scores_episodes", {"member": 9}),
    ("evaluation_samples_evaluations", {"evaluation": "none", "group_no": 0}),
    ("evaluation_samples_episodes", {"sample": 9, "member": 9}),
    ("late_results_runs", {"run_id": "run/none"}),
    ("segments_episodes", {"attempt": 9}),
    ("tool_calls_turns", {"turn": 9}),
    ("tool_calls_blobs", {"call_index": 9, "call": {}, "state": None, "state_blob": "none"}),
    ("turns_segments", {"turn": 9, "segment": 9}),
    ("turns_episodes", {"attempt": 9}),
    (
        "turns_blobs",
        {
            "turn": 9,
            "sampled": "\\x",
            "logprobs": "\\x",
            "mask": "\\x",
            "spans": [],
            "policy_version": None,
            "answer_blob": "none",
        },
    ),
    ("partial_turns_episodes", {"member": 9}),
    ("batches_runs", {"run_id": "run/none"}),
    ("publications_engines", {"engine_id": "none"}),
    ("publications_policy_versions", {"version": 99}),
    ("train_steps_batches", {"step": 2, "version": 3, "batch_no": 99}),
    ("train_steps_policy_versions", {"step": 98, "version": 99, "batch_no": 2}),
    ("batch_groups_batches", {"batch_no": 99, "live": False}),
    ("batch_groups_groups", {"group_no": 99}),
)
"""A foreign key without `fk_`, and what makes of a row of its table one that names nothing."""
BESIDE = {"evaluations_runs": "evaluations_environments", "turns_episodes": "turns_segments"}
"""Keys that another one breaks before them."""


@pytest.fixture(scope="module")
async def run_id(store: Store) -> str:
    return await everything(store)


async def broken(store: Store, run_id: str, change: str) -> psycopg.IntegrityError:
    """What the database says to a change of rows of the run."""
    before, condition, after = change.partition(" WHERE ")
    statement = f"UPDATE {before} WHERE run_id = %s{f' AND ({after})' if condition else ''}"
    async with store.direct() as connection:
        with pytest.raises(psycopg.IntegrityError) as caught:
            await connection.execute(statement.encode(), [run_id])
    return caught.value


@pytest.mark.parametrize(("rule", "change"), RULES)
async def test_a_row_that_breaks_a_rule_is_refused(store: Store, run_id: str, rule: str, change: str) -> None:
    assert (await broken(store, run_id, change)).diag.constraint_name == f"ck_{rule}"


async def test_every_rule_is_tried(store: Store) -> None:
    found = await rows(
        store,
        "SELECT conname FROM pg_constraint WHERE contype = 'c' AND conrelid <> 0"
        " AND connamespace = 'public'::regnamespace",
    )
    assert {f"ck_{rule}" for rule, _ in RULES} == {name for (name,) in found}


@pytest.mark.parametrize(("index", "change"), UNIQUE)
async def test_what_may_be_once_is_refused_twice(store: Store, run_id: str, index: str, change: str) -> None:
    error = await broken(store, run_id, change)
    assert isinstance(error, psycopg.errors.UniqueViolation)
    assert error.diag.constraint_name == index


async def test_everything_that_may_be_once_is_tried(store: Store) -> None:
    found = await rows(
        store,
        "SELECT indexrelid::regclass::text FROM pg_index JOIN pg_class c ON c.oid = indrelid WHERE indisunique"
        " AND NOT indisprimary AND relnamespace = 'public'::regnamespace",
    )
    assert {index for index, _ in UNIQUE} == {name for (name,) in found}


@pytest.mark.parametrize("table", sorted(Base.metadata.tables))
async def test_no_key_is_taken_twice(store: Store, run_id: str, table: str) -> None:
    async with store.direct() as connection:
        with pytest.raises(psycopg.errors.UniqueViolation) as caught:
            await connection.execute(
                f"INSERT INTO {table} SELECT * FROM {table} WHERE run_id = %s LIMIT 1".encode(), [run_id]
            )
    assert caught.value.diag.table_name == table


@pytest.mark.parametrize(("key", "changes"), NOWHERE)
async def test_a_row_that_names_nothing_is_refused(
    store: Store, run_id: str, key: str, changes: dict[str, Any]
) -> None:
    table = next(name for name in sorted(Base.metadata.tables, key=len, reverse=True) if key.startswith(f"{name}_"))
    source = f"{table} x WHERE run_id = %s LIMIT 1"
    copy = f"INSERT INTO {table} SELECT (jsonb_populate_record(x, %s::jsonb)).* FROM {source}"
    async with store.direct() as connection, connection.transaction(force_rollback=True):
        if key in BESIDE:
            await connection.execute(f"ALTER TABLE {table} DROP CONSTRAINT fk_{BESIDE[key]}".encode())
        with pytest.raises(psycopg.errors.ForeignKeyViolation) as caught:
            await connection.execute(copy.encode(), [json.dumps(changes), run_id])
    assert (caught.value.diag.table_name, caught.value.diag.constraint_name) == (table, f"fk_{key}")


async def test_every_name_is_tried(store: Store) -> None:
    found = await rows(
        store,
        "SELECT conname FROM pg_constraint WHERE contype = 'f' AND connamespace = 'public'::regnamespace",
    )
    assert sorted(f"fk_{key}" for key, _ in NOWHERE) == sorted(name for (name,) in found)
