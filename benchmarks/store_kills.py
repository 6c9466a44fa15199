"""SIGKILL of Postgres in the middle of busy writers, again and again: what was acknowledged is there, and once."""

import asyncio
import os
import signal
import time
from typing import Any, Final

import psycopg
from atropos.cli.stack.running import RunningStack
from atropos.cli.stack.state import PartStatus, read_state
from atropos.db.audit import audit_run
from atropos.db.engines import put_version
from atropos.db.store import open_store
from atropos.tests.db.samples import new_run

from .store_lease import WRITERS
from .store_writers import WEIGHTS, Told, busy

_BETWEEN_S: Final = 3.0
_BACK_S: Final = 60.0
_KEYS: Final = {
    "turns": "run_id, group_no, member, attempt, turn",
    "episodes": "run_id, group_no, member, attempt",
    "groups": "run_id, group_no",
    "scores": "run_id, group_no, member, attempt, name, scorer_version",
}


async def measure(stack: RunningStack, database: str, kills: int) -> dict[str, float]:
    """`kill_lost`: rows that were acknowledged and are not there, or contradict others; `kill_doubled`: keys twice."""
    store = await open_store(database)
    run_id = await new_run(store)
    await put_version(store, run_id, 0, WEIGHTS)
    slowest = 0.0
    async with busy(store, run_id, WRITERS) as told:
        for _ in range(kills):
            await asyncio.sleep(_BETWEEN_S)
            broken, began = told.broken, time.monotonic()
            await _kill(stack)
            await _written(told, broken, began)
            slowest = max(slowest, time.monotonic() - began)
        await asyncio.sleep(_BETWEEN_S)
    found = await audit_run(store, run_id)
    await store.close()
    lost, doubled = _compared(database, run_id, told)
    for one in found.violations:
        print(f"audit: {one.check}: {one.row}", flush=True)
    print(
        f"{kills} kills of Postgres, {told.broken} calls broken, {len(told.turns)} turns of {len(told.episodes)} "
        f"episodes acknowledged; writing went on within {slowest:.1f} s",
        flush=True,
    )
    return {
        "kill_lost": lost + len(found.violations),
        "kill_doubled": doubled,
        "kill_acknowledged": len(told.turns) + len(told.episodes) + len(told.groups),
    }


async def _written(told: Told, broken: int, began: float) -> None:
    """Until a call has broken and turns were written after that: more than those that were on their way back."""
    written = None
    while written is None or len(told.turns) <= written + WRITERS:
        if written is None and told.broken > broken:
            written = len(told.turns)
        if time.monotonic() - began > _BACK_S:
            raise SystemExit(f"{_BACK_S:.0f} s after a kill of Postgres its writers have not gone on")
        await asyncio.sleep(0.01)


async def _kill(stack: RunningStack) -> None:
    """SIGKILL of the postmaster, as its supervisor knows it; its children then end by themselves."""
    while True:
        state = read_state(stack.home)
        part = next((part for part in state.parts if part.name == "postgres"), None) if state is not None else None
        if part is not None and part.process is not None and part.status is PartStatus.READY:
            return os.kill(part.process.pid, signal.SIGKILL)
        await asyncio.sleep(0.1)


def _compared(database: str, run_id: str, told: Told) -> tuple[int, int]:
    """Acknowledged rows that are missing, and keys that are there twice, asked of the tables and not of an index."""
    with psycopg.connect(database) as connection:
        connection.execute("SET enable_indexscan = off")
        connection.execute("SET enable_indexonlyscan = off")

        def keys(query: str) -> set[tuple[Any, ...]]:
            return set(connection.execute(query.encode(), (run_id,)).fetchall())

        turns = keys("SELECT group_no, member, attempt, turn FROM turns WHERE run_id = %s")
        ended = keys("SELECT group_no, member, attempt FROM episodes WHERE run_id = %s AND state = 'done'")
        closed = keys("SELECT group_no FROM groups WHERE run_id = %s AND state = 'sealed'")
        lost = len({(key.group_no, key.member, key.attempt, turn) for key, turn in told.turns} - turns)
        lost += len({(key.group_no, key.member, key.attempt) for key in told.episodes} - ended)
        lost += len({(group_no,) for group_no in told.groups} - closed)
        doubled = 0
        for table, names in _KEYS.items():
            twice = f"SELECT count(*) FROM (SELECT FROM {table} GROUP BY {names} HAVING count(*) > 1) AS twice"
            row = connection.execute(twice.encode()).fetchone()
            doubled += row[0] if row is not None else 0
    return lost, doubled
