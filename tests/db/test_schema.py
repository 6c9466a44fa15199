"""What the database itself promises: it says what each column means and refuses illegal rows, whoever writes them."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from atropos.contracts.episode import Score
from atropos.contracts.reasons import FailureKind, FinishReason, StopReason
from atropos.contracts.states import (
    BatchState,
    EngineState,
    EpisodeState,
    EvaluationState,
    GroupState,
    PublicationState,
    RunState,
)
from atropos.db import migrate
from atropos.db.episodes import load_episode, save_calls, save_scores, save_turn
from atropos.db.errors import SchemaTooNew, SchemaTooOld, StoreUnreachable
from atropos.db.models import Base
from atropos.db.partial import load_partial, save_partial
from atropos.db.runs import get_run
from atropos.db.store import Store, open_store, parse_url
from atropos.tests.db.samples import call, partial, started, turn
from sqlalchemy import create_engine

if TYPE_CHECKING:
    from atropos.tests.support.stack import Databases

NAN32 = "\\x0000c07f"
ENUMS: dict[tuple[str, str], type[StrEnum]] = {
    ("runs", "state"): RunState,
    ("groups", "state"): GroupState,
    ("groups", "failure"): FailureKind,
    ("episodes", "state"): EpisodeState,
    ("episodes", "stop"): StopReason,
    ("episodes", "failure"): FailureKind,
    ("turns", "finish"): FinishReason,
    ("engines", "state"): EngineState,
    ("evaluations", "state"): EvaluationState,
    ("batches", "state"): BatchState,
    ("publications", "state"): PublicationState,
}


@pytest.fixture
def empty(databases: "Databases") -> Iterator[str]:
    url = databases.empty()
    yield url
    databases.drop(url)


def test_every_table_and_column_says_what_it_means(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        found = connection.execute(
            "SELECT c.relname, a.attname, obj_description(c.oid), col_description(c.oid, a.attnum)"
            " FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
            " WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace AND c.relname <> 'alembic_version'"
        ).fetchall()
    assert {row[0] for row in found} == set(Base.metadata.tables)
    assert [row[:2] for row in found if not (row[2] and row[3])] == []


def test_migrations_lead_to_the_models(database_url: str) -> None:
    with create_engine(parse_url(database_url)).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        checks: dict[str, str] = dict(
            connection.exec_driver_sql(
                "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c'"
                " AND connamespace = 'public'::regnamespace"
            ).all()
        )
    named = {
        str(constraint.name)
        for table in Base.metadata.tables.values()
        for constraint in table.constraints
        if str(constraint.name).startswith("ck_")
    }
    assert named == set(checks)
    for (table, column), words in ENUMS.items():
        definition = checks[f"ck_{table}_{column}"]
        assert {word for word in words if f"'{word}'" in definition} == set(words)
        assert definition.count("'") == 2 * len(words)


def test_run_id_leads_every_primary_key() -> None:
    assert {next(iter(table.primary_key)).name for table in Base.metadata.tables.values()} == {"run_id"}


async def test_token_columns_are_not_compressed(store: Store) -> None:
    async with store.direct() as connection:
        found = await connection.execute(
            "SELECT attrelid::regclass::text, attname FROM pg_attribute"
            " WHERE attrelid IN ('turns'::regclass, 'segments'::regclass, 'partial_turns'::regclass)"
            " AND atttypid = 'bytea'::regtype AND attstorage = 'e' ORDER BY 1, 2"
        )
        columns: dict[str, list[str]] = {}
        for table, column in await found.fetchall():
            columns.setdefault(table, []).append(column)
    assert columns == {
        "partial_turns": ["logprobs", "sampled"],
        "segments": ["prompt"],
        "turns": ["logprobs", "mask", "prompt_delta", "sampled"],
    }


@pytest.mark.parametrize(
    "change",
    [
        "turns SET logprobs = logprobs || '\\x00000000'",
        "turns SET mask = mask || '\\x01'",
        "turns SET mask = '\\x010102'",
        "turns SET sampled = sampled || '\\x00'",
        "turns SET prompt_delta = '\\x00'",
        f"turns SET logprobs = '{NAN32}{NAN32[2:]}{NAN32[2:]}'",
        "turns SET logprobs = '\\x0000000000000000000080ff'",
        "turns SET temperature = 'NaN'",
        "turns SET policy_version = NULL",
        "turns SET finish = 'bored'",
        "turns SET lossy = true",
        "turns SET segment = 7",
        "partial_turns SET logprobs = logprobs || '\\x00000000'",
        "partial_turns SET sampled = sampled || '\\x00'",
        "partial_turns SET sampled = '', logprobs = ''",
        f"partial_turns SET logprobs = '{NAN32}{NAN32[2:]}{NAN32[2:]}'",
        "partial_turns SET logprobs = '\\x0000000000000000000080ff'",
        "partial_turns SET prompt_digest = 'a prompt'",
        "partial_turns SET turn = -1",
        "partial_turns SET member = 9",
        "tool_calls SET reward = 'NaN'",
        "tool_calls SET seconds = 'Infinity'",
        "tool_calls SET call = NULL",
        "tool_calls SET turn = 9",
        "tool_calls SET state_blob = 'nowhere', state = NULL",
        "scores SET value = 'NaN'",
        "scores SET value = '-Infinity'",
        "scores SET weight = 'Infinity'",
        "episodes SET state = 'sleeping'",
        "episodes SET reward = 1",
        "episodes SET stop = 'answered'",
        "episodes SET state = 'done', stop = 'failed', ended_at = now()",
        "episodes SET state = 'failed', stop = 'failed', ended_at = now()",
        "episodes SET start_state = NULL",
        "groups SET state = 'unheard'",
        "groups SET state = 'failed', closed_at = now()",
        "groups SET state = 'sealed'",
        "groups SET kind = 'eval'",
        "groups SET mean_reward = 'NaN'",
        "groups SET size = 0",
        "tasks SET split = 'dev'",
        "tasks SET quarantined_at = now()",
        "runs SET state = 'done'",
        "runs SET state = 'completed'",
        "runs SET concurrency = 0",
        "environments SET weight = 'NaN'",
        "environments SET weight = 0",
    ],
)
async def test_illegal_rows_are_refused_by_the_database(store: Store, change: str, example: str) -> None:
    async with store.direct() as connection:
        with pytest.raises(psycopg.IntegrityError):
            await connection.execute(f"UPDATE {change} WHERE run_id = %s".encode(), [example])


@pytest.fixture(scope="module")
async def example(store: Store) -> str:
    key = await started(store)
    await save_turn(store, key, turn())
    await save_partial(store, key, 1, partial())
    await save_calls(store, key, [call(state={"n": 1})])
    await save_scores(store, key, [Score(name="right", value=1.0)], "v1")
    return key.run_id


def test_migrations_go_up_and_down_on_data(empty: str) -> None:
    migrate.upgrade(empty)
    before = _columns(empty)
    with psycopg.connect(empty) as connection:
        connection.execute(
            "INSERT INTO runs (run_id, name, config, config_hash, seed, concurrency) VALUES ('r', 'n', '{}', 'h', 1, 1)"
        )
        connection.execute("INSERT INTO events (run_id, kind, text, data) VALUES ('r', 'note', 'kept', '{}')")
    migrate.downgrade(empty, "0001")
    with pytest.raises(SchemaTooOld, match="0001"):
        migrate.check(empty)
    migrate.upgrade(empty)
    with psycopg.connect(empty) as connection:
        assert connection.execute("SELECT text FROM events").fetchall() == [("kept",)]
    assert _columns(empty) == before
    migrate.downgrade(empty, "base")
    assert _columns(empty) == []


async def test_the_migration_to_partial_turns_goes_up_and_down_on_turns(empty: str) -> None:
    migrate.upgrade(empty)
    store = await open_store(empty)
    key = await started(store)
    await save_turn(store, key, turn(0))
    await save_partial(store, key, 1, partial())
    migrate.downgrade(empty, "0003")
    migrate.upgrade(empty)
    facts = await load_episode(store, key)
    assert facts is not None
    assert [stored.spans for stored in facts.turns] == [turn(0).spans]
    assert await load_partial(store, key, 1) is None
    await store.close()


def _columns(url: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT table_name, column_name, data_type, is_nullable FROM information_schema.columns"
            " WHERE table_schema = 'public' AND table_name <> 'alembic_version' ORDER BY 1, 2"
        ).fetchall()


def test_two_upgrades_at_once_migrate_once(empty: str) -> None:
    problems: list[BaseException] = []

    def upgrade() -> None:
        try:
            migrate.upgrade(empty)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=upgrade) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    migrate.check(empty)


def test_a_missing_an_old_and_a_newer_schema_are_told_apart(empty: str) -> None:
    with pytest.raises(SchemaTooOld, match="no tables of Atropos yet"):
        migrate.check(empty)
    migrate.upgrade(empty, "0002")
    with pytest.raises(SchemaTooOld, match="has schema 0002, this build needs 0006"):
        migrate.check(empty)
    with psycopg.connect(empty) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    for look in (migrate.check, migrate.upgrade):
        with pytest.raises(SchemaTooNew, match="newer build"):
            look(empty)


def test_the_command_says_in_one_sentence_what_is_wrong(empty: str) -> None:
    command = [sys.executable, "-m", "atropos.db.migrate"]
    early = subprocess.run([*command, "check", "--url", empty], capture_output=True, text=True, check=False)
    assert (early.returncode, early.stdout) == (1, "")
    assert early.stderr.startswith("The database has no tables")
    assert migrate.main(["upgrade", "--url", empty]) == 0
    assert migrate.main(["check", "--url", empty]) == 0
    assert migrate.main(["check", "--url", "mysql://x"]) == 1
    with pytest.raises(StoreUnreachable, match="cannot be reached"):
        migrate.check("postgresql://user:secret@127.0.0.1:1/none")


async def test_a_store_over_a_fresh_database_is_empty(empty: str) -> None:
    migrate.upgrade(empty)
    store = await open_store(empty, prepare=False)
    assert await get_run(store, "run/none") is None
    await store.close()
