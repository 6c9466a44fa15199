"""Writers, a trainer and slow readers at once: nobody waits for ever, and nobody makes others wait for ever."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from atropos.activities.patience import patiently
from atropos.benchmarks.store_writers import WEIGHTS, Told, busy
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import RunningStack, running_stack
from atropos.cli.stack.state import PartStatus, read_state
from atropos.db import migrate
from atropos.db.audit import audit_run
from atropos.db.batches import Leased, lease_batch
from atropos.db.engines import put_version
from atropos.db.errors import StoreBusy, StoreUnreachable
from atropos.db.exports import Wanted, opened_export
from atropos.db.limits import LONG, PAGES, WORK, TimeLimits
from atropos.db.runs import get_run, tune_run
from atropos.db.store import Store, open_store
from atropos.tests.db.samples import LABEL, claimed, committed, new_run, rows

WRITERS = 4


@asynccontextmanager
async def opened(url: str, limits: TimeLimits, pool_size: int = 2) -> AsyncIterator[Store]:
    store = await open_store(url, pool_size=pool_size, limits=limits)
    try:
        yield store
    finally:
        await store.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 - only looking again tells
            await asyncio.sleep(0.01)


async def writable(store: Store) -> str:
    """A run to train on, two groups a step, whose writers need no engine."""
    run_id = await new_run(store, trainer={"kind": "external", "steps": 100}, batch={"groups": 2})
    await put_version(store, run_id, 0, WEIGHTS, "/models/tiny")
    return run_id


async def sound(store: Store, run_id: str) -> None:
    """All that the audit checks, but that weights were published: these writers have no engine."""
    assert [one for one in (await audit_run(store, run_id)).violations if one.check != "published"] == []


async def test_readers_that_stop_half_way_keep_neither_writers_nor_a_trainer_waiting(
    store: Store, database_url: str
) -> None:
    run_id = await writable(store)
    async with (
        opened(database_url, LONG) as exporting,
        opened(database_url, PAGES) as looking,
        busy(store, run_id, WRITERS) as told,
    ):
        await until(lambda: len(told.groups) >= 2)
        async with (
            opened_export(exporting, Wanted(runs=(run_id,), negative=True)) as chosen,
            aclosing(chosen.rows(page=2)) as examples,
            looking.direct() as page,
            page.transaction(),
            page.cursor("half_way") as cursor,
        ):
            await anext(examples)
            await cursor.execute("SELECT * FROM episode_outcomes")
            await cursor.fetchone()
            before = len(told.groups)
            assert isinstance(await lease_batch(store, run_id), Leased)
            await committed(store, run_id, await claimed(store, run_id))
            await until(lambda: len(told.groups) >= before + WRITERS)
            rest = [row async for row in examples]
            assert len(rest) == chosen.total - 1  # as it was when it began, whatever was written since
    assert told.broken == 0
    await sound(store, run_id)


async def test_a_pool_that_stays_exhausted_says_so_and_serves_the_next_one(database_url: str) -> None:
    async with opened(database_url, replace(WORK, wait=0.2), pool_size=1) as store:
        async with store.direct():
            for ask in (get_run(store, "run/none"), rows(store, "SELECT 1")):
                with pytest.raises(StoreBusy, match=r"^All connections of this process .* try again\.$"):
                    await ask
        assert await rows(store, "SELECT 1") == [(1,)]


async def test_a_statement_over_its_limit_is_cancelled_and_may_be_tried_again(database_url: str) -> None:
    async with opened(database_url, replace(WORK, statement=0.2), pool_size=1) as store:
        mine = await rows(store, "SELECT pg_backend_pid()")
        with pytest.raises(StoreBusy, match="a statement took longer than it may; try again"):
            await rows(store, "SELECT pg_sleep(60)")
        with pytest.raises(StoreBusy, match="took longer"):
            async with store.begin() as connection:
                await connection.exec_driver_sql("SELECT pg_sleep(60)")
        assert await rows(store, "SELECT pg_backend_pid()") == mine  # the connection is as good as it was


async def test_work_on_a_row_that_another_holds_gives_up_and_is_done_once_it_is_free(
    store: Store, database_url: str
) -> None:
    run_id = await new_run(store)
    async with opened(database_url, replace(WORK, lock=0.2)) as writer:
        async with store.direct() as holder, holder.transaction():
            await holder.execute("SELECT FROM runs WHERE run_id = %s FOR UPDATE", (run_id,))
            with pytest.raises(StoreBusy, match="a lock was held by another transaction"):
                await tune_run(writer, run_id, 3, {})
            again = asyncio.create_task(patiently(tune_run, writer, run_id, 3, {}))
            await asyncio.sleep(0.5)
        assert (await again).concurrency == 3


async def test_whoever_falls_asleep_in_a_transaction_loses_its_locks(store: Store, database_url: str) -> None:
    run_id = await new_run(store)
    async with opened(database_url, replace(WORK, idle=0.2)) as sleeper:

        async def sleep() -> None:
            async with sleeper.begin() as connection:
                await connection.exec_driver_sql("UPDATE runs SET reason = 'mine' WHERE run_id = %s", (run_id,))
                changed = await tune_run(store, run_id, None, {LABEL: 2.0})  # waits for the row until it is free
                assert changed.reason is None
                await connection.exec_driver_sql("SELECT 1")

        with pytest.raises(StoreUnreachable):
            await sleep()
        assert await rows(sleeper, "SELECT 1") == [(1,)]


async def test_a_persons_options_win_over_ours(database_url: str) -> None:
    async with opened(f"{database_url}?options=-c%20lock_timeout%3D7s", WORK) as store:
        shown = [(await rows(store, f"SHOW {name}"))[0][0] for name in ("lock_timeout", "statement_timeout")]
        assert shown == ["7s", "1min"]
    async with opened(database_url, LONG) as store:
        assert await rows(store, "SHOW statement_timeout") == [("0",)]


async def test_a_migration_gives_way_to_who_reads_and_keeps_nobody_waiting(
    fresh_database: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = fresh_database()
    monkeypatch.setattr(migrate, "LOCK_S", 1)
    monkeypatch.setattr(migrate, "TRIES", 2)
    async with opened(url, WORK) as store:
        run_id = await new_run(store)
        async with store.direct() as reader, reader.transaction():
            await reader.execute("SELECT count(*) FROM runs")
            migrating = asyncio.create_task(asyncio.to_thread(migrate.downgrade, url, "base"))
            while not migrating.done():  # a writer may stand behind it for a moment, and goes on
                await tune_run(store, run_id, 3, {})
            with pytest.raises(StoreBusy, match="The schema was not changed: a table is in use"):
                await migrating
        migrate.check(url)
        assert (await get_run(store, run_id)) is not None
    migrate.downgrade(url, "base")
    assert migrate.revisions(url)[0] is None


@pytest.fixture
def own_server() -> Iterator[RunningStack]:
    """A Postgres that may be killed."""
    home = Path(tempfile.mkdtemp(prefix="atropos-test-", dir="/tmp"))
    home.chmod(0o755)
    try:
        with running_stack(home, StackOptions(temporal=False, workers=False)) as stack:
            yield stack
    finally:
        with suppress(OSError):
            shutil.rmtree(home)


async def test_what_was_acknowledged_outlives_restarts_of_postgres_and_nothing_is_there_twice(
    own_server: RunningStack,
) -> None:
    assert own_server.database_url is not None
    url = own_server.database_url.get_secret_value()
    store = await open_store(url)
    run_id = await writable(store)
    async with busy(store, run_id, WRITERS) as told:
        for _ in range(2):
            await more(told)
            broken = told.broken
            await ended_at_once(own_server)
            await until(lambda: told.broken > broken)  # noqa: B023 - it is asked in this round only
        await more(told)
    await sound(store, run_id)
    await store.close()
    kept_once(url, run_id, told)


async def more(told: Told) -> None:
    """Until some more turns were acknowledged."""
    seen = len(told.turns)
    await until(lambda: len(told.turns) > seen + 2 * WRITERS)


async def ended_at_once(stack: RunningStack) -> None:
    """What `pg_ctl stop -m immediate` does; the stack starts it again."""
    while True:
        state = read_state(stack.home)
        for part in state.parts if state is not None else ():
            if part.name == "postgres" and part.process is not None and part.status is PartStatus.READY:
                return os.kill(part.process.pid, signal.SIGQUIT)
        await asyncio.sleep(0.1)


def kept_once(url: str, run_id: str, told: Told) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("SET enable_indexscan = off")  # of the tables, not of an index that may be wrong
        connection.execute("SET enable_indexonlyscan = off")
        connection.execute("SET enable_bitmapscan = off")
        found = "SELECT group_no, member, attempt, turn FROM turns WHERE run_id = %s"
        turns = connection.execute(found, (run_id,)).fetchall()
        ended = "SELECT group_no, member, attempt FROM episodes WHERE run_id = %s AND state = 'done'"
        episodes = connection.execute(ended, (run_id,)).fetchall()
        numbers = connection.execute("SELECT group_no FROM groups WHERE run_id = %s", (run_id,)).fetchall()
    assert len(set(turns)) == len(turns)
    assert len(set(episodes)) == len(episodes)
    assert sorted(numbers) == [(number,) for number in range(len(numbers))]
    assert {(key.group_no, key.member, key.attempt, turn) for key, turn in told.turns} <= set(turns)
    assert {(key.group_no, key.member, key.attempt) for key in told.episodes} <= set(episodes)
