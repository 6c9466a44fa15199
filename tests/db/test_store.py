"""Connections: bounded, replaced when they break, and secrets stay out of sentences."""

import asyncio

import psycopg
import pytest
from atropos.db.episodes import load_episode, save_turn
from atropos.db.errors import Refused, StoreError, StoreUnreachable
from atropos.db.events import add_event
from atropos.db.runs import get_run
from atropos.db.store import Store, open_store
from atropos.tests.db.samples import rows, started, turn
from psycopg.pq import TransactionStatus
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
async def test_three_spellings_of_a_url_open(database_url: str, scheme: str) -> None:
    store = await open_store(database_url.replace("postgresql", scheme, 1), pool_size=1)
    assert await rows(store, "SELECT 1") == [(1,)]
    await store.close()


async def test_an_unreachable_store_is_one_sentence_without_the_password() -> None:
    with pytest.raises(StoreUnreachable) as caught:
        await open_store("postgresql://me:s3cret@127.0.0.1:1/none")
    assert "postgresql://me:***@127.0.0.1:1/none cannot be reached" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    for url in ("mysql://localhost/x", "not a url"):
        with pytest.raises(StoreError, match="must look like"):
            await open_store(url)
    with pytest.raises(StoreError, match="1 to 8 connections"):
        await open_store("postgresql://localhost/x", pool_size=9)


async def test_a_refused_login_is_said_without_the_password(database_url: str) -> None:
    right = psycopg.conninfo.conninfo_to_dict(database_url)
    url = f"postgresql://stranger:hunter2@{right['host']}:{right['port']}/{right['dbname']}"
    with pytest.raises(StoreUnreachable) as caught:
        await open_store(url)
    assert "hunter2" not in str(caught.value)


async def test_broken_connections_are_replaced(store: Store, database_url: str) -> None:
    key = await started(store)
    await asyncio.gather(*(load_episode(store, key) for _ in range(20)))
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    with pytest.raises(StoreUnreachable, match="cannot be reached"):
        await load_episode(store, key)
    assert await load_episode(store, key) is not None
    assert await save_turn(store, key, turn()) == (turn(), True)
    assert await get_run(store, key.run_id) is not None


async def test_transactions_notice_a_broken_connection_too(store: Store, database_url: str) -> None:
    async with store.begin() as connection:
        pid = (await connection.exec_driver_sql("SELECT pg_backend_pid()")).scalar_one()
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", [pid])
    with pytest.raises(StoreUnreachable):
        await get_run(store, "run/none")
    assert await get_run(store, "run/none") is None


async def test_a_cancelled_statement_leaves_the_pool_usable(store: Store) -> None:
    async def hold(first: str) -> None:
        async with store.direct() as connection:
            await connection.execute(first.encode())
            await connection.execute("SELECT pg_sleep(30)")

    tasks = [asyncio.create_task(hold(first)) for first in ("SELECT 1", "BEGIN", "BEGIN")]
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    while await rows(store, sleeping) != [(3,)]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 3

    async def borrowed() -> TransactionStatus:
        async with store.direct() as connection:
            await connection.execute("SELECT pg_sleep(0.01)")
            return connection.info.transaction_status

    assert set(await asyncio.gather(*(borrowed() for _ in range(16)))) == {TransactionStatus.IDLE}


async def test_without_prepare_nothing_stays_in_the_session(database_url: str) -> None:
    store = await open_store(database_url, pool_size=1, prepare=False)
    key = await started(store)
    for _ in range(8):
        await load_episode(store, key)
    assert await rows(store, "SELECT count(*) FROM pg_prepared_statements") == [(0,)]
    await store.close()


async def test_events_are_appended_in_order_and_need_a_run(store: Store) -> None:
    key = await started(store)
    await add_event(store, key.run_id, "note", "first\x00", {"n": 1})
    await add_event(store, key.run_id, "note", "second")
    found = await rows(store, "SELECT text, data FROM events WHERE run_id = %s ORDER BY seq", key.run_id)
    assert found == [("first\ufffd", {"n": 1}), ("second", {})]
    with pytest.raises(Refused, match="The store refuses this"):
        await add_event(store, "run/none", "note", "lost")


async def test_an_error_that_means_nothing_to_us_is_passed_on_and_not_its_own_cause(store: Store) -> None:
    with pytest.raises(psycopg.errors.UndefinedColumn) as direct:
        async with store.direct() as connection:
            await connection.execute("SELECT nothing FROM runs")
    assert direct.value.__cause__ is not direct.value
    with pytest.raises(ProgrammingError) as begun:
        async with store.begin() as transaction:
            await transaction.execute(text("SELECT nothing FROM runs"))
    assert begun.value.__cause__ is not begun.value
