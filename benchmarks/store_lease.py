"""How long a lease takes: 64 groups while four writers are busy, with nothing else waiting and with a backlog.

Both runs are in one database and are measured in turn, lease by lease, so that whatever else the machine does meets
both alike. Each lease is committed, so the next one finds other groups; where nothing waits, the next 64 are sealed
before it. A group is as young as the step that will take it, so that none is ever too stale.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Final

import psycopg
from atropos.db.batches import Leased, claim_batch, commit_step, lease_batch
from atropos.db.store import Store
from atropos.tests.db.samples import LABEL, training_run

from .store_writers import busy

BATCH: Final = 64
WRITERS: Final = 4
_MEMBERS: Final = 2

_SEALED: Final = (
    """INSERT INTO tasks (run_id, environment, task_key, split, data, info)
    SELECT %(run)s, %(label)s, 'waiting-' || g, 'train', '{}', '{}'
    FROM generate_series(%(first)s, %(last)s) g""",
    """INSERT INTO groups (run_id, group_no, kind, environment, task_key, draw, size, state, valid, mean_reward,
      sampled_tokens, oldest_version, started_at, closed_at)
    SELECT %(run)s, g, 'train', %(label)s, 'waiting-' || g, g, %(members)s, 'sealed', %(members)s, 0.5, 128,
      (g - %(base)s) / %(batch)s, now(), now() FROM generate_series(%(first)s, %(last)s) g""",
    """INSERT INTO episodes (run_id, group_no, member, attempt, environment_version, prompt, start_state, state, stop,
      reward, turns, sampled_tokens, policy_version, ended_at)
    SELECT %(run)s, g, m, 0, 'v1', '[]', '{}', 'done', 'answered', m::float8, 1, 64, (g - %(base)s) / %(batch)s, now()
    FROM generate_series(%(first)s, %(last)s) g, generate_series(0, %(members)s - 1) m""",
)
_FIRST: Final = 10_000_000
"""Number of the first such group: behind those of the writers, which belong to other runs."""


@dataclass
class _Run:
    store: Store
    database: str
    run_id: str
    sealed: int = 0

    def seal(self, groups: int) -> None:
        """More groups that wait for a trainer."""
        first = _FIRST + self.sealed
        values = {"run": self.run_id, "label": LABEL, "members": _MEMBERS, "base": _FIRST, "batch": BATCH}
        values |= {"first": first, "last": first + groups - 1}
        with psycopg.connect(self.database) as connection:
            for statement in _SEALED:
                connection.execute(statement.encode(), values)
        self.sealed += groups

    async def lease(self) -> float:
        """Lease a batch and commit it; the seconds that the lease took."""
        began = time.perf_counter()
        leased = await lease_batch(self.store, self.run_id)
        seconds = time.perf_counter() - began
        if not isinstance(leased, Leased) or leased.groups != BATCH:
            raise SystemExit(f"no batch of {BATCH} groups, but {leased}")
        claim = await claim_batch(self.store, self.run_id, leased.batch_no, "bench")
        if claim is None or await commit_step(self.store, self.run_id, claim, path="p", digest="d", metrics={}) is None:
            raise SystemExit("a batch that was leased cannot be committed")
        return seconds


async def measure(store: Store, database: str, backlog: int, leases: int) -> dict[str, float]:
    """`lease_p99_ratio`, and both times in ms."""
    runs = []
    for _ in range(2):
        stale = {"max": 64}
        runs.append(_Run(store, database, await training_run(store, groups=BATCH, steps=10**6, staleness=stale)))
    empty, waiting = runs
    waiting.seal(backlog)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
    elsewhere = await training_run(store, groups=BATCH)
    times: dict[str, list[float]] = {"empty": [], "waiting": []}
    async with busy(store, elsewhere, WRITERS):
        for run in runs:  # the first lease reports all that was sealed before it
            run.seal(BATCH)
            await run.lease()
        for _ in range(leases):
            empty.seal(BATCH)
            times["empty"].append(await empty.lease())
            times["waiting"].append(await waiting.lease())
    shown = {name: (_p99(seconds) * 1000, statistics.median(seconds) * 1000) for name, seconds in times.items()}
    for name, (p99, median) in shown.items():
        print(f"lease, {name:<8} p99 {p99:7.1f} ms, median {median:6.1f} ms", flush=True)
    return {
        "lease_p99_ratio": shown["waiting"][0] / shown["empty"][0],
        "lease_p99_ms": shown["waiting"][0],
        "lease_p99_empty_ms": shown["empty"][0],
    }


def _p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]
