"""What the database itself promises: it says what each column means and refuses illegal rows, whoever writes them."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
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
from atropos.db.errors import SchemaTooNew, SchemaTooOld, StoreUnreachable
from atropos.db.models import Base
from atropos.db.runs import get_run
from atropos.db.store import Store, open_store, parse_url
from atropos.tests.db.ledger import everything
from sqlalchemy import create_engine

if TYPE_CHECKING:
    from atropos.tests.support.stack import Databases

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


def test_the_models_alone_make_the_same_schema(database_url: str, empty: str) -> None:
    engine = create_engine(parse_url(empty))
    with engine.begin() as connection:
        for sequence in ("events_seq", "late_results_seq", "policy_versions_seq", "scores_seq", "turns_seq"):
            connection.exec_driver_sql(f"CREATE SEQUENCE {sequence}")
        Base.metadata.create_all(connection)
    engine.dispose()
    assert _definitions(empty) == _definitions(database_url)


def _definitions(url: str) -> dict[str, list[tuple[object, ...]]]:
    """Columns with their types, defaults and comments, constraints, and indexes, as the database spells them."""
    source = (
        "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = 'public' AND c.relkind = 'r'"
        " AND c.relname <> 'alembic_version'"
    )
    queries = {
        "tables": f"SELECT c.relname, obj_description(c.oid) {source} ORDER BY 1",
        "columns": "SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,"
        f" pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum) {source}"
        " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
        " LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum ORDER BY 1, 2",
        "constraints": f"SELECT c.relname, k.conname, pg_get_constraintdef(k.oid) {source}"
        " JOIN pg_constraint k ON k.conrelid = c.oid AND k.contype <> 'n' ORDER BY 1, 2",
        "indexes": f"SELECT c.relname, pg_get_indexdef(i.indexrelid) {source}"
        " JOIN pg_index i ON i.indrelid = c.oid ORDER BY 1, 2",
    }
    with psycopg.connect(url) as connection:
        return {name: connection.execute(query.encode()).fetchall() for name, query in queries.items()}


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


async def test_each_migration_goes_down_and_up_on_rows_of_every_table(empty: str) -> None:
    """What an older schema has no place for is lost on the way down, and nothing else is."""
    migrate.upgrade(empty)
    store = await open_store(empty)
    await everything(store)
    await store.close()
    revisions = [script.revision for script in migrate._scripts().walk_revisions()]
    before = _rows(empty)
    for older in revisions[1:]:
        migrate.downgrade(empty, older)
        kept = _rows(empty)
        migrate.upgrade(empty)
        after = _rows(empty)
        for table, held in kept.items():
            assert len(after[table]) == len(held) == len(before[table]), (older, table)
            for row, old in zip(held, before[table], strict=True):
                assert {name: old[name] for name in row} == row, (older, table)
        if older >= "0006":  # nothing since then has no place in it, or cannot be found again
            assert after == before


def _rows(url: str) -> dict[str, list[dict[str, Any]]]:
    """All rows of each table, in the order of their keys."""
    with psycopg.connect(url) as connection:
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'alembic_version'"
        ).fetchall()
        found = {}
        for (table,) in tables:
            keys = ", ".join(column.name for column in Base.metadata.tables[table].primary_key)
            query = f"SELECT to_jsonb(x) FROM {table} x ORDER BY {keys}"
            found[table] = [row for (row,) in connection.execute(query.encode())]
    return found


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
    with pytest.raises(SchemaTooOld, match="has schema 0002, this build needs 0011"):
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
