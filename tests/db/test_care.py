"""What a check finds, what a dump gives back, and what a prune leaves alone."""

import io
import json
import uuid
import zipfile
from collections.abc import Callable, Sequence
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from atropos.contracts.reasons import FailureKind
from atropos.contracts.sampling import Sampling
from atropos.contracts.states import EvaluationState, GroupState, RunState
from atropos.db.audit import audit_run
from atropos.db.batches import Leased, abandon_batch, lease_batch
from atropos.db.care import all_runs, audits, table_sizes, unproved
from atropos.db.care_dump import BadDump, Manifest, dump, read_manifest, restore
from atropos.db.care_prune import Candidate, candidates, prune
from atropos.db.errors import Refused, Unknown
from atropos.db.evaluations import finish_evaluation, start_evaluation
from atropos.db.models import Base
from atropos.db.runs import set_run_state
from atropos.db.store import Store, open_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .ledger import everything
from .samples import LABEL, admitted, claimed, closed, committed, new_run, rows, training_run
from .test_importing import imported, scored

Fresh = Callable[[], str]
TABLES = tuple(Base.metadata.tables)


async def contents(store: Store, *runs: str) -> dict[str, list[str]]:
    """Every row of these runs, by table, as text."""
    found = {}
    for table in TABLES:
        query = f"SELECT t::text FROM {table} t WHERE run_id = ANY(%s) ORDER BY 1"
        found[table] = [row for (row,) in await rows(store, query, list(runs))]
    return found


async def dumped(store: Store, path: Path, runs: Sequence[str] | None) -> Manifest:
    with path.open("wb") as file:
        async with aclosing(dump(store, file, runs)) as streams:
            async for stream in streams:
                assert stream.table in TABLES
    return read_manifest(path)


async def restored(store: Store, path: Path) -> Manifest:
    manifest = read_manifest(path)
    with path.open("rb") as file:
        async with aclosing(restore(store, file, manifest)) as streams:
            async for stream in streams:
                assert stream.table in TABLES
    return manifest


async def pruned(store: Store, run_id: str, going: Sequence[str] = (), *, steps: int | None = None) -> int:
    """Prune a run, or only so many transactions of it; how many rows went."""
    gone = 0
    async with aclosing(prune(store, run_id, going)) as removing:
        async for number in removing:
            gone += number
            steps = None if steps is None else steps - 1
            if steps == 0:
                break
    return gone


async def ended(store: Store, run_id: str, state: RunState = RunState.COMPLETED) -> str:
    await set_run_state(store, run_id, state, None)
    return run_id


# --- check ----------------------------------------------------------------------------------------------------------


async def test_a_check_finds_what_the_catalogue_says_is_unproved(store: Store) -> None:
    run_id = await everything(store)
    assert await unproved(store) == []
    found = {run: audit async for run, audit in audits(store)}
    assert found[run_id].violations == (await audit_run(store, run_id)).violations
    sizes = await table_sizes(store)
    assert {size.name for size in sizes} == set(TABLES)
    assert all(size.bytes >= size.indexes > 0 for size in sizes)
    async with store.direct() as connection:
        await connection.execute("ALTER TABLE runs ADD CONSTRAINT ck_short CHECK (length(name) < 99) NOT VALID")
        try:
            assert await unproved(store) == ["constraint ck_short of runs was never checked against the rows there are"]
        finally:
            await connection.execute("ALTER TABLE runs DROP CONSTRAINT ck_short")


# --- dump and restore -----------------------------------------------------------------------------------------------


async def test_all_of_a_store_comes_back_row_by_row_and_its_sequences_go_on(
    fresh_database: Fresh, tmp_path: Path
) -> None:
    first, second = await open_store(fresh_database()), await open_store(fresh_database())
    try:
        runs = [await everything(first), await imported(first, scored())]
        await dumped(first, tmp_path / "all", None)
        assert sorted((await restored(second, tmp_path / "all")).runs) == sorted(runs)
        assert await contents(second, *runs) == await contents(first, *runs)
        for run_id in runs:
            assert (await audit_run(second, run_id)).violations == (await audit_run(first, run_id)).violations
        last = "SELECT sequencename, last_value FROM pg_sequences ORDER BY 1"
        assert await rows(second, last) == await rows(first, last)
        await closed(second, await training_run(second))  # its rows are numbered behind those that came
        [(clash,)] = await rows(second, "SELECT count(*) - count(DISTINCT seq) FROM turns")
        assert clash == 0
    finally:
        await first.close()
        await second.close()


NUMBERS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=NUMBERS, chosen=st.sets(st.integers(0, 3)))
async def test_whichever_runs_are_dumped_come_back_as_they_were_and_no_others(
    store: Store, tmp_path: Path, groups: list[int], chosen: set[int]
) -> None:
    runs = []
    for number in groups:
        documents = [scored(scores=[index, float(number)]) for index in range(number)]
        runs.append(await imported(store, *documents))
    some = [run_id for index, run_id in enumerate(runs) if index in chosen]
    path = tmp_path / uuid.uuid4().hex
    assert (await dumped(store, path, some)).runs == tuple(sorted(some))
    before = await contents(store, *runs)
    for run_id in some:
        assert await pruned(store, run_id) > 0
    assert await contents(store, *some) == {table: [] for table in TABLES}
    await restored(store, path)
    assert await contents(store, *runs) == before


async def test_a_run_that_is_there_is_not_restored_over(store: Store, tmp_path: Path) -> None:
    there, gone = await imported(store, scored()), await imported(store, scored())
    await dumped(store, tmp_path / "two", [there, gone])
    await pruned(store, gone)
    before = await contents(store, there)
    with pytest.raises(Refused, match=f"{there} there already"):
        await restored(store, tmp_path / "two")
    assert await contents(store, there, gone) == before


async def test_another_schema_is_refused(store: Store, tmp_path: Path) -> None:
    run_id = await imported(store, scored())
    await dumped(store, tmp_path / "one", [run_id])
    await pruned(store, run_id)

    def older(data: bytes) -> bytes:
        return json.dumps(json.loads(data) | {"revision": "0001"}).encode()

    rewritten(tmp_path / "one", tmp_path / "old", "manifest.json", older)
    with pytest.raises(BadDump, match="schema 0001"):
        await restored(store, tmp_path / "old")
    assert run_id not in await all_runs(store)


@pytest.mark.parametrize("damage", ["changed", "missing", "cut", "noise"])
async def test_of_a_damaged_file_nothing_is_restored(store: Store, tmp_path: Path, damage: str) -> None:
    run_id = await imported(store, scored(scores=[0.5, 2.0]))
    good, bad = tmp_path / "good", tmp_path / "bad"
    await dumped(store, good, [run_id])
    await pruned(store, run_id)
    if damage == "changed":  # a sound file for zip, and for Postgres
        rewritten(good, bad, "scores.copy", lambda data: data.replace(b"score", b"scora"))
    elif damage == "missing":
        rewritten(good, bad, "turns.copy", None)
    elif damage == "cut":
        bad.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    else:
        data = bytearray(good.read_bytes())
        middle = data.index(b"turns.copy") + 60
        data[middle : middle + 20] = bytes(20)
        bad.write_bytes(data)
    with pytest.raises(BadDump):
        await restored(store, bad)
    assert await contents(store, run_id) == {table: [] for table in TABLES}
    await restored(store, good)
    assert (await audit_run(store, run_id)).violations == ()


def rewritten(source: Path, target: Path, name: str, change: Callable[[bytes], bytes] | None) -> None:
    """A copy of the dump with one of its files changed, or without it."""
    made = io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(made, "w") as new:
        for each in old.namelist():
            data = old.read(each)
            if each != name:
                new.writestr(each, data)
            elif change is not None:
                new.writestr(each, change(data))
    target.write_bytes(made.getvalue())


async def test_a_dump_of_an_unknown_run_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(Unknown):
        await dumped(store, tmp_path / "none", ["run/nobody"])
    (tmp_path / "none").write_text("no zip")
    with pytest.raises(BadDump, match="is no dump"):
        read_manifest(tmp_path / "none")


# --- prune ----------------------------------------------------------------------------------------------------------


async def found(store: Store, run_id: str) -> Candidate | None:
    return next((one for one in await candidates(store, runs=[run_id]) if one.run_id == run_id), None)


async def test_the_whole_of_a_run_goes_and_nothing_else(store: Store) -> None:
    stays = await everything(store)
    goes = await imported(store, *(scored(scores=[number, 0]) for number in range(120)))
    before = await contents(store, stays)
    one = await found(store, goes)
    assert one is not None
    assert (one.kept, one.rows > 120 * 8) == ((), True)
    assert await pruned(store, goes) == one.rows + 1  # and the event that says so
    assert await contents(store, goes) == {table: [] for table in TABLES}
    assert await contents(store, stays) == before
    assert await found(store, goes) is None


async def test_a_run_that_something_needs_stays(store: Store) -> None:
    live = await training_run(store)
    assert await found(store, live) is None
    with pytest.raises(Refused, match="it is running"):
        await pruned(store, live)
    for _ in range(2):
        await closed(store, live)
    found_batch = await lease_batch(store, live)
    assert isinstance(found_batch, Leased)
    [open_group] = await admitted(store, live)
    what: dict[str, Any] = {"environment": LABEL, "split": "eval", "tasks": 1, "samples": 1, "sampling": Sampling()}
    await start_evaluation(store, live, "last", **what)
    await ended(store, live)
    one = await found(store, live)
    assert one is not None
    assert one.kept == (
        "its batch 0 is leased",
        "its evaluation last is running",
        f"its group {open_group.key.group_no} is open",
    )
    with pytest.raises(Refused, match="its batch 0 is leased"):
        await pruned(store, live)
    await abandon_batch(store, live, 0)
    await finish_evaluation(store, live, "last", EvaluationState.CANCELLED, "no more")
    async with store.direct() as connection:
        await connection.execute(
            "UPDATE groups SET state = %s, failure = %s, closed_at = now(), valid = 0"
            " WHERE run_id = %s AND group_no = %s",
            (GroupState.FAILED, FailureKind.CANCELLED, live, open_group.key.group_no),
        )
    one = await found(store, live)
    assert one is not None
    assert one.kept == ()
    assert await pruned(store, live) > 0


async def family(store: Store, generations: int) -> list[str]:
    """Runs of which each began with the weights that the one before had made."""
    runs: list[str] = []
    model = {"path": "tiny"}
    for _ in range(generations):
        run_id = await training_run(store, model=model)
        for _ in range(2):
            await closed(store, run_id)
        assert isinstance(await lease_batch(store, run_id), Leased)
        path = f"/checkpoints/{uuid.uuid4().hex}"
        await committed(store, run_id, await claimed(store, run_id), path=path)
        runs.append(await ended(store, run_id))
        model = {"path": "tiny", "init_from": path}
    return runs


async def test_a_run_stays_while_a_fork_of_it_does(store: Store) -> None:
    grandmother, mother, child = await family(store, 3)
    one = await found(store, mother)
    assert one is not None
    assert one.kept == (f"{child} begins with its version 1",)
    kept = {one.run_id: one.kept for one in await candidates(store, runs=[grandmother, mother])}
    assert [bool(kept[run_id]) for run_id in (grandmother, mother)] == [True, True]
    whole = await candidates(store, runs=[grandmother, mother, child])
    assert [one.kept for one in whole] == [(), (), ()]
    going = [one.run_id for one in whole]
    for run_id in going:
        assert await pruned(store, run_id, going) > 0


async def test_age_and_number_choose_among_ended_runs(fresh_database: Fresh) -> None:
    store = await open_store(fresh_database())
    try:
        runs = [await ended(store, await new_run(store)) for _ in range(4)]
        live = await new_run(store)
        async with store.direct() as connection:
            for days, run_id in zip((100, 91, 89, 1), runs, strict=True):
                await connection.execute(
                    "UPDATE runs SET ended_at = now() - %(d)s, created_at = now() - %(d)s WHERE run_id = %(r)s",
                    {"d": timedelta(days=days), "r": run_id},
                )

        async def names(**asked: Any) -> list[str]:
            return [one.run_id for one in await candidates(store, **asked)]

        assert await names(older=timedelta(days=90)) == runs[:2]
        assert await names(keep_last=3) == runs[:1]
        assert await names(keep_last=3, older=timedelta(days=90)) == runs[:1]
        assert await names(runs=[runs[3], live]) == [runs[3]]
        assert await names(runs=[runs[3]], keep_last=1) == []
    finally:
        await store.close()


async def test_an_export_that_has_begun_is_not_cut_short_by_a_prune(store: Store) -> None:
    run_id = await imported(store, *(scored(scores=[number, 1]) for number in range(80)))
    seen = 0
    async with store.direct() as reading, reading.transaction():
        await reading.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        async with reading.cursor(name="export") as cursor:
            cursor.itersize = 10
            await cursor.execute("SELECT messages FROM sft_examples WHERE run_id = %s", (run_id,))
            async for _ in cursor:
                if not seen:
                    await pruned(store, run_id)
                seen += 1
    assert seen == 160
    assert run_id not in await all_runs(store)


KINDS = ("live", "ended", "leased", "imported")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), cuts=st.lists(st.integers(1, 4), max_size=3))
async def test_however_often_it_breaks_off_a_prune_takes_what_may_go_and_leaves_the_rest(
    store: Store, kinds: list[str], cuts: list[int]
) -> None:
    runs = {await of_kind(store, kind): kind for kind in kinds}
    stay = [run_id for run_id, kind in runs.items() if kind in ("live", "leased")]
    before = await contents(store, *stay)
    for steps in [*cuts, None]:
        chosen = [one for one in await candidates(store, runs=list(runs)) if one.run_id in runs]
        assert all(bool(one.kept) == (runs[one.run_id] == "leased") for one in chosen)
        for one in chosen:
            if not one.kept:
                await pruned(store, one.run_id, steps=steps)
    assert await contents(store, *stay) == before
    assert set(await all_runs(store)) & set(runs) == set(stay)
    gone = [run_id for run_id in runs if run_id not in stay]
    assert await contents(store, *gone) == {table: [] for table in TABLES}


async def of_kind(store: Store, kind: str) -> str:
    if kind == "imported":
        return await imported(store, *(scored(scores=[number, 1]) for number in range(60)))
    run_id = await training_run(store)
    for _ in range(2):
        await closed(store, run_id)
    assert isinstance(await lease_batch(store, run_id), Leased)
    if kind != "leased":
        await committed(store, run_id, await claimed(store, run_id), path=f"/checkpoints/{uuid.uuid4().hex}")
    return run_id if kind == "live" else await ended(store, run_id)
