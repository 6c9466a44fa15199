"""What an outage of the engine costs: its process is killed under load and started again after a minute.

A dev engine with the tiny policy serves a run with at least `--groups` groups in flight; servers and workers are the
dev stack's own. Once turns flow the engine is killed, and after `--seconds` started again at the same address. The last
line is one JSON object: `resumed_s` (from the first answer of the engine's new life to the first new turn in the
store), what failed, which rewards were written meanwhile, and how long admission and `run why` took to say so. The exit
status is 1 where an episode failed, a reward was invented, a row contradicts another or the first turn took more than
five seconds.
"""

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
from atropos.cli.progress import tiny_policy
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import RunningStack, running_stack
from atropos.cli.temporal import connect, prepare
from atropos.contracts.queues import WORKFLOWS
from atropos.contracts.workflows import RUN_WORKFLOW
from atropos.db.audit import audit_run
from atropos.db.store import open_store

WITHIN_S = 5.0
RUN = "run/outage"
GROUP = 4
_LOOK_S = 0.05


@dataclass
class Engine:
    """The dev engine as a process."""

    policy: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "atropos.inference.engine", "--model", str(self.policy)]
        self.process = subprocess.Popen([*command, "--port", str(self.port)], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def answers(self) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    if (await client.get(f"{self.url}/health", timeout=1.0)).status_code == 200:
                        return
                except httpx.HTTPError:
                    await asyncio.sleep(_LOOK_S)


@dataclass(frozen=True)
class Rows:
    """What the store says of the run."""

    database: str

    def one(self, query: str, *values: Any) -> Any:
        with psycopg.connect(self.database, autocommit=True) as connection:
            found = connection.execute(query.encode(), (RUN, *values)).fetchone()
        return None if found is None else found[0]

    async def until(self, true: Callable[[Any], object], query: str, *values: Any) -> Any:
        """What the query gives once it is so."""
        async with asyncio.timeout(120):
            while not true(found := self.one(query, *values)):  # noqa: ASYNC110 - rows have no event
                await asyncio.sleep(_LOOK_S)
        return found


def document(policy: Path, engine: str, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": "outage",
        "model": {"path": str(policy)},
        "engines": [{"kind": "dev", "url": engine, "concurrency": 64}],
        "environments": [{"id": "calculator", "group_size": GROUP}],
        "sampling": {"max_tokens": 48},
        "rollout": {"concurrency": given.groups},
        "budget": {"groups": given.budget},
    }


async def measure(stack: RunningStack, engine: Engine, given: argparse.Namespace) -> dict[str, Any]:
    assert stack.database_url is not None
    rows = Rows(stack.database_url.get_secret_value())
    client = await connect(stack.temporal_address)
    await prepare(client)
    engine.start()
    await engine.answers()
    wanted = document(engine.policy, engine.url, given)
    handle = await client.start_workflow(RUN_WORKFLOW, wanted, id=RUN, task_queue=WORKFLOWS)

    open_groups = "SELECT count(*) FROM groups WHERE run_id = %s AND state IN ('admitted', 'running')"
    await rows.until(lambda found: found >= 2 * GROUP, "SELECT count(*) FROM turns WHERE run_id = %s")
    in_flight = await rows.until(lambda found: found >= given.groups, open_groups)
    now = "SELECT clock_timestamp() FROM (SELECT %s) run"
    engine.kill()
    killed, began = rows.one(now), time.monotonic()
    why = await rows.until(bool, "SELECT waiting_for FROM runs WHERE run_id = %s")
    told_s = time.monotonic() - began
    await asyncio.sleep(max(0.0, given.seconds - told_s))
    engine.start()
    await engine.answers()
    back, outage_s = rows.one(now), time.monotonic() - began
    first = await rows.until(bool, "SELECT min(created_at) FROM turns WHERE run_id = %s AND created_at > %s", back)
    resumed_s = (first - back).total_seconds()
    await asyncio.wait_for(handle.result(), 600)

    store = await open_store(rows.database)
    violations = (await audit_run(store, RUN)).violations
    await store.close()
    ended, groups = (f"SELECT count(*) FROM {table} WHERE run_id = %s" for table in ("episodes", "groups"))
    return {
        "groups_in_flight": in_flight,
        "outage_s": outage_s,
        "told_s": told_s,
        "resumed_s": resumed_s,
        "episodes": rows.one(ended),
        "episodes_failed": rows.one(f"{ended} AND (state <> 'done' OR failure IS NOT NULL OR attempt > 0)"),
        # Who had all its turns may be scored in the first second; a reward after that has no turn to rest on.
        "rewards_invented": rows.one(
            f"{ended} AND reward IS NOT NULL AND ended_at BETWEEN %s + interval '2 s' AND %s", killed, back
        ),
        "groups_lost": rows.one(f"{groups} AND state NOT IN ('sealed', 'filtered')"),
        "violations": len(violations),
        "why": why,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the engine is away")
    parser.add_argument("--groups", type=int, default=16, help="groups in flight")
    parser.add_argument("--budget", type=int, default=160, help="groups in all")
    parser.add_argument("--model", type=Path, help="folder of a model to serve; otherwise the tiny policy is made")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="atropos-bench-", dir="/tmp"))
    home.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    engine = Engine(given.model or tiny_policy(home, 0), port)
    try:
        with running_stack(home, StackOptions()) as stack:
            figures = asyncio.run(measure(stack, engine, given))
    finally:
        engine.kill()
        shutil.rmtree(home, ignore_errors=True)
    shown = {name: round(value, 2) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps(shown), flush=True)
    none = ("episodes_failed", "rewards_invented", "groups_lost", "violations")
    sys.stdout.flush()
    os._exit(1 if any(figures[name] for name in none) or figures["resumed_s"] > WITHIN_S else 0)


if __name__ == "__main__":
    main()
