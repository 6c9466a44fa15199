"""What a worker grows by while very many groups wait for a trainer: it asks for batches and admits by counts of rows.

A run with a trainer of its own that never takes a step; its worker, in a process of its own, has played what it may.
Then the groups are put into the store by the database itself, and the worker goes on looking at them.
"""

import asyncio
import time
from pathlib import Path
from typing import Final

import psycopg
from atropos.cli.stack.running import RunningStack
from atropos.contracts.queues import WorkerRole
from atropos.db.external import external_trainer
from atropos.db.runs import get_run
from atropos.db.store import open_store
from atropos.tests.support.scripted import make_model, served
from atropos.tests.support.weights import WeightedEngine, add_weights, every_other
from atropos.tests.support.world import World, new_namespace

MEMBERS: Final = 8
TOKENS: Final = 2048
PAGE: Final = 500
_QUIET_S: Final = 5.0
_WATCHED_S: Final = 30.0
_ROLES: Final = tuple(role for role in WorkerRole if role is not WorkerRole.TRAINER)

_STATEMENTS: Final = (
    """INSERT INTO groups (run_id, group_no, kind, environment, task_key, draw, size, state, valid, mean_reward,
      sampled_tokens, oldest_version, started_at, closed_at)
    SELECT %(run)s, n, 'train', environment, task_key, 1000000 + n, %(members)s, 'sealed', %(members)s, 0.5,
      %(members)s * %(tokens)s, 0, now(), now()
    FROM (SELECT environment, task_key FROM groups WHERE run_id = %(run)s LIMIT 1) AS one,
      generate_series(%(first)s::int, %(last)s::int) n""",
    """INSERT INTO episodes (run_id, group_no, member, attempt, environment_version, prompt, start_state, state, stop,
      reward, turns, sampled_tokens, policy_version, ended_at)
    SELECT %(run)s, n, m, 0, 'v1', '[{"role": "user", "content": "Go on."}]', '{}', 'done', 'answered',
      (m %% 2)::float8, 1, %(tokens)s, 0, now()
    FROM generate_series(%(first)s::int, %(last)s::int) n, generate_series(0, %(members)s - 1) m""",
    """INSERT INTO segments (run_id, group_no, member, attempt, segment, first_turn)
    SELECT %(run)s, n, m, 0, 0, 0
    FROM generate_series(%(first)s::int, %(last)s::int) n, generate_series(0, %(members)s - 1) m""",
    """INSERT INTO turns (run_id, group_no, member, attempt, turn, segment, opens_segment, message, prompt_delta,
      sampled, logprobs, mask, finish, spans, policy_version, temperature, engine_id, incarnation, request_id)
    SELECT %(run)s, n, m, 0, 0, 0, true, jsonb_build_object('role', 'assistant', 'content', repeat('and so on ', 800)),
      decode(repeat('07000000', 16), 'hex'), decode(repeat('08000000', %(tokens)s), 'hex'),
      decode(repeat('000000bf', %(tokens)s), 'hex'), decode(repeat('01', %(tokens)s), 'hex'), 'stop',
      jsonb_build_array(jsonb_build_array('base', 0, 0, %(tokens)s)), 0, 1.0, 'engine', 'first', 'request'
    FROM generate_series(%(first)s::int, %(last)s::int) n, generate_series(0, %(members)s - 1) m""",
)


async def measure(stack: RunningStack, database: str, folder: Path, groups: int) -> dict[str, float]:
    """`backlog_rss_mb`: the worker's highest resident memory with the backlog, less that before."""
    assert stack.temporal_address is not None
    model = add_weights(make_model(folder / "model"))
    store = await open_store(database)
    async with served(WeightedEngine(model, every_other("nothing", "something"))) as engine:
        world = World(await new_namespace(stack.temporal_address), database, engine)
        trainer = {"kind": "external", "steps": 1000}
        document = world.training("Effects", trainer=trainer, batch={"groups": 16}, publish={"verify": "auto"})
        async with world.process(_ROLES, folder) as process:
            handle = await world.start(document)
            while await get_run(store, handle.id) is None:  # noqa: ASYNC110 - what is awaited is a row
                await asyncio.sleep(0.1)
            await (await external_trainer(store, handle.id)).begin(model, {})
            await _quiet(database, handle.id)
            before = _rss_mb(process.pid)
            await asyncio.to_thread(_wait_in_line, database, handle.id, groups)
            highest, ends = before, time.monotonic() + _WATCHED_S
            while time.monotonic() < ends:
                highest = max(highest, _rss_mb(process.pid))
                await asyncio.sleep(0.2)
            await handle.execute_update("cancel", "enough")
    await store.close()
    print(f"a worker has {before:.1f} MB, and at most {highest:.1f} MB while {groups} groups wait", flush=True)
    return {"backlog_rss_mb": highest - before}


async def _quiet(database: str, run_id: str) -> None:
    """Until the worker has played what it may, and a while longer."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < _QUIET_S or last <= 0:
        with psycopg.connect(database) as connection:
            row = connection.execute(
                "SELECT count(*) FROM groups WHERE run_id = %s AND closed_at IS NOT NULL", (run_id,)
            ).fetchone()
        count = row[0] if row is not None else 0
        if count != last:
            last, since = count, time.monotonic()
        await asyncio.sleep(0.5)


def _wait_in_line(database: str, run_id: str, groups: int) -> None:
    """So many sealed groups, page by page: each page is short enough for the worker's own statements."""
    with psycopg.connect(database, autocommit=True) as connection:
        row = connection.execute(
            "UPDATE runs SET next_group_no = next_group_no + %s WHERE run_id = %s RETURNING next_group_no",
            (groups, run_id),
        ).fetchone()
        end = row[0] if row is not None else 0
        for first in range(end - groups, end, PAGE):
            values = {"run": run_id, "members": MEMBERS, "tokens": TOKENS, "first": first}
            values["last"] = min(first + PAGE, end) - 1
            with connection.transaction():
                for statement in _STATEMENTS:
                    connection.execute(statement.encode(), values)


def _rss_mb(parent: int) -> float:
    """Resident memory of the children of the process that keeps the worker alive."""
    pages = 0
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in children.read_text().split():
            pages += int(Path(f"/proc/{child}/statm").read_text().split()[1])
    return pages * 4096 / 2**20
