"""`atropos db`: a store is brought up to date, checked, thinned out, written to a file and read back."""

import json
from pathlib import Path
from typing import Any

import pytest
from atropos.cli.db_options import age_of, size_of
from atropos.cli.errors import CommandError
from atropos.contracts.states import RunState
from atropos.db.migrate import downgrade, revisions
from atropos.db.runs import set_run_state
from atropos.db.store import open_store

from ..db.ledger import everything
from ..db.samples import new_run, rows
from ..db.test_importing import imported, scored
from ..support.stack import Databases
from .conftest import Atropos


@pytest.fixture
def empty(databases: Databases, atropos: Atropos, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty database, which the commands use."""
    url = databases.empty()
    monkeypatch.setenv("DATABASE_URL", url)
    return url


@pytest.fixture
def fresh(databases: Databases, atropos: Atropos, monkeypatch: pytest.MonkeyPatch) -> str:
    """A migrated database without rows, which the commands use."""
    url = databases.fresh()
    monkeypatch.setenv("DATABASE_URL", url)
    return url


async def test_the_schema_is_made_brought_up_to_date_and_left_alone(atropos: Atropos, empty: str) -> None:
    head = revisions(empty)[1]
    code, _, err = await atropos("db", "check")
    assert (code, "run `atropos db upgrade`" in err) == (2, True)
    assert await atropos("db", "upgrade") == (0, f"The tables were made: schema {head}.\n", "")
    assert await atropos("db", "upgrade") == (0, f"The schema is {head} already.\n", "")
    downgrade(empty, "0005")
    assert await atropos("db", "upgrade") == (0, f"The schema was 0005 and is {head} now.\n", "")
    code, out, _ = await atropos("db", "check")
    assert (code, f"Schema {head}" in out) == (0, True)


async def test_a_newer_schema_is_left_to_a_newer_build(atropos: Atropos, fresh: str) -> None:
    store = await open_store(fresh)
    try:
        async with store.direct() as connection:
            await connection.execute("UPDATE alembic_version SET version_num = '9999'")
    finally:
        await store.close()
    for command in (("upgrade",), ("check",), ("dump", "x"), ("prune", "--older-than", "1d")):
        code, _, err = await atropos("db", *command)
        assert code in (1, 2)
        assert "a newer build migrated it" in err


async def test_a_check_names_what_contradicts_itself(atropos: Atropos, fresh: str) -> None:
    store = await open_store(fresh)
    try:
        run_id = await imported(store, scored())
        assert (await atropos("db", "check"))[0] == 0
        async with store.direct() as connection:
            await connection.execute("UPDATE groups SET sampled_tokens = 7 WHERE run_id = %s", (run_id,))
    finally:
        await store.close()
    code, out, _ = await atropos("db", "check")
    assert (code, f"VIOLATED {run_id}: group_totals: group 0" in out) == (1, True)
    code, out, _ = await atropos("db", "check", "--json")
    found = json.loads(out)
    assert (code, found["sound"], found["runs"][0]["contradictions"]) == (1, False, ["group_totals: group 0"])
    assert {"turns", "blobs"} <= {table["name"] for table in found["tables"]}
    assert (await atropos("db", "check", "--quick"))[0] == 0


async def test_a_prune_shows_what_would_go_and_removes_it_only_when_told(atropos: Atropos, fresh: str) -> None:
    store = await open_store(fresh)
    try:
        old, young = await imported(store, scored()), await imported(store, scored())
        live = await new_run(store)
        async with store.direct() as connection:
            await connection.execute("UPDATE runs SET ended_at = now() - interval '99 days' WHERE run_id = %s", (old,))
        code, out, _ = await atropos("db", "prune", "--older-than", "90d")
        assert (code, f"{old}: " in out, "1 runs, " in out, "would go" in out) == (0, True, True, True)
        assert "2 episodes" in out
        assert await ids(store) == sorted([old, young, live])
        code, out, _ = await atropos("db", "prune", "--older-than", "90d", "--yes")
        assert (code, "removed" in out) == (0, True)
        assert await ids(store) == sorted([young, live])
        code, out, err = await atropos("db", "prune", "--run", live, "--yes")
        assert (code, out, "it has not ended" in err) == (0, "Nothing goes.\n", True)
        code, _, err = await atropos("db", "prune")
        assert (code, "Say what may go" in err) == (1, True)
        code, _, err = await atropos("db", "prune", "--older-than", "soon")
        assert (code, "is no age" in err) == (1, True)
        assert await ids(store) == sorted([young, live])
    finally:
        await store.close()


async def ids(store: Any) -> list[str]:
    return [run_id for (run_id,) in await rows(store, "SELECT run_id FROM runs ORDER BY run_id")]


async def test_a_run_moves_to_another_store_in_a_file(
    atropos: Atropos, fresh: str, databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(fresh)
    try:
        run_id = await imported(store, scored())
        await imported(store, scored())
    finally:
        await store.close()
    path = tmp_path / "one.dump"
    code, _, err = await atropos("db", "dump", str(path), "--run", run_id)
    assert code == 0, err
    assert "turns: 2 rows" in err
    code, _, err = await atropos("db", "dump", str(path))
    assert (code, "is there already" in err) == (1, True)
    code, _, err = await atropos("db", "restore", str(path))
    assert (code, f"{run_id} there already; nothing was restored" in err) == (1, True)
    monkeypatch.setenv("DATABASE_URL", databases.fresh())
    assert (await atropos("db", "restore", str(path)))[:2] == (0, f"{run_id}\n")
    assert (await atropos("audit", run_id, "--store-only"))[0] == 0
    path.write_bytes(path.read_bytes()[:-30])
    code, _, err = await atropos("db", "restore", str(path))
    assert (code, "is no dump of Atropos, or is damaged" in err) == (1, True)
    assert [one.name for one in tmp_path.iterdir() if "dump" in one.name] == ["one.dump"]


async def test_the_store_alone_is_audited_exported_and_moved_when_histories_have_expired(
    atropos: Atropos, fresh: str, databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Temporal ever kept anything of this run, and none answers."""
    store = await open_store(fresh)
    try:
        run_id = await everything(store)
        await set_run_state(store, run_id, RunState.COMPLETED, None)
    finally:
        await store.close()
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:9")
    audited = json.loads((await atropos("audit", run_id, "--store-only", "--json"))[1])
    assert (audited["checked"]["groups"], audited["checked"]["steps"]) == (12, 2)
    sets = {}
    for command in ("sft-gen", "dpo-gen"):
        code, out, err = await atropos(command, run_id, "--out", "-", "--allow-negative-scores")
        assert code == 0, err
        sets[command] = out
    assert len(sets["sft-gen"].splitlines()) > 10
    assert (await atropos("db", "dump", str(tmp_path / "x")))[0] == 0
    monkeypatch.setenv("DATABASE_URL", databases.fresh())
    assert (await atropos("db", "restore", str(tmp_path / "x")))[0] == 0
    assert json.loads((await atropos("audit", run_id, "--store-only", "--json"))[1]) == audited
    for command, before in sets.items():
        assert (await atropos(command, run_id, "--out", "-", "--allow-negative-scores"))[1] == before


def test_ages_and_sizes_read_as_people_write_them() -> None:
    assert [age_of(text).total_seconds() for text in ("30m", "12h", "90d", "2W")] == [1800, 43200, 7776000, 1209600]
    for text in ("", "90", "d", "-1d", "1.5d", "99999999d"):
        with pytest.raises(CommandError, match="is no age"):
            age_of(text)
    assert [size_of(count) for count in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3072.0 GiB",
    ]
