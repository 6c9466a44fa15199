"""Batches: from sealed groups to a committed step, each group once.

Invariant: a batch's groups are fixed in the transaction that inserts its row, under the run row's lock. Taking a batch
only raises its fence; committing it (the step, the version, the groups and the batch in one transaction) asks for the
newest fence. So of two trainers that both believe to be the one, one commits and the other changes nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..contracts.ids import weight_label
from ..contracts.records import BadRecord
from ..contracts.runfile import RunConfig
from .encoding import check_finite, clean, encode
from .errors import Refused, Unknown
from .runs import unknown_run
from .store import Direct, Store


@dataclass(frozen=True)
class Head:
    """The newest version of a run's weights. `digest` None: `path` is a model's folder, not a checkpoint."""

    version: int
    path: str
    digest: str | None


@dataclass(frozen=True)
class Leased:
    """A batch whose groups are fixed."""

    batch_no: int
    step: int
    groups: int


@dataclass(frozen=True)
class Waiting:
    """Why there is no batch yet: counts of groups."""

    ready: int
    wanted: int
    committed: int
    drawn: int
    """Groups closed since the batch before, with and without signal."""


@dataclass(frozen=True)
class Claim:
    """A batch as the trainer that took it last holds it. `committed`: the step is taken already."""

    batch_no: int
    step: int
    fence: int
    committed: bool
    reward_mean: float | None
    rewards: int
    filtered: int
    stale: int


@dataclass(frozen=True)
class StepRow:
    """A committed step."""

    step: int
    version: int
    batch_no: int
    fence: int
    groups: int
    staleness: int
    metrics: dict[str, float]


_LOCK: Final = "SELECT FROM runs WHERE run_id = %(run)s FOR NO KEY UPDATE"

_COUNTS: Final = """
SELECT (SELECT count(*) FROM train_steps WHERE run_id = %(run)s),
  (SELECT coalesce(max(batch_no) + 1, 0) FROM batches WHERE run_id = %(run)s)
"""

_CURRENT: Final = """
SELECT b.batch_no, b.step, count(*) FROM batches b JOIN batch_groups g USING (run_id, batch_no)
WHERE b.run_id = %(run)s AND b.state = 'leased' GROUP BY b.batch_no, b.step
"""

_DROP_STALE: Final = """
UPDATE groups SET state = 'stale', reason = 'its oldest token was sampled ' || (%(step)s - oldest_version)::text
  || ' versions before the step it would have been in'
WHERE run_id = %(run)s AND kind = 'train' AND state = 'sealed' AND oldest_version < %(step)s - %(max)s
"""

_READY: Final = """
SELECT group_no FROM groups WHERE run_id = %(run)s AND kind = 'train' AND state = 'sealed' ORDER BY group_no LIMIT %(n)s
"""

_DRAWN: Final = """
SELECT count(*) FROM groups WHERE run_id = %(run)s AND kind = 'train' AND closed_at IS NOT NULL AND reported_in IS NULL
  AND state IN ('sealed', 'filtered')
"""

_INSERT: Final = """
WITH reported AS (
  UPDATE groups SET reported_in = %(batch)s
  WHERE run_id = %(run)s AND kind = 'train' AND closed_at IS NOT NULL AND reported_in IS NULL
  RETURNING group_no, state
), newest AS (
  SELECT DISTINCT ON (e.group_no, e.member) e.reward, e.state FROM episodes e JOIN reported r USING (group_no)
  WHERE e.run_id = %(run)s ORDER BY e.group_no, e.member, e.attempt DESC
), means AS (
  SELECT avg(reward) AS mean, count(reward) AS n FROM newest WHERE state = 'done'
)
INSERT INTO batches (run_id, batch_no, step, fence, reward_mean, rewards, filtered, stale)
SELECT %(run)s, %(batch)s, %(step)s,
  (SELECT coalesce(max(fence), 0) FROM batches WHERE run_id = %(run)s AND step = %(step)s),
  mean, n, (SELECT count(*) FROM reported WHERE state = 'filtered'), %(stale)s
FROM means
"""
"""Fences go on where those of abandoned batches of the step ended: step and fence name a checkpoint's files."""

_CLAIM: Final = """
UPDATE batches SET fence = fence + CASE state WHEN 'leased' THEN 1 ELSE 0 END,
  owner = CASE state WHEN 'leased' THEN %(owner)s ELSE owner END
WHERE run_id = %(run)s AND batch_no = %(batch)s
RETURNING state = 'abandoned', step, fence, state = 'committed', reward_mean, rewards, filtered, stale
"""

_COMMIT: Final = """
UPDATE batches SET state = 'committed', ended_at = now()
WHERE run_id = %(run)s AND batch_no = %(batch)s AND state = 'leased' AND fence = %(fence)s
"""

_STEPS: Final = (
    "SELECT step, version, batch_no, fence, groups, staleness, metrics FROM train_steps WHERE run_id = %(run)s"
)


async def lease_batch(store: Store, run_id: str, config: RunConfig | None = None) -> Leased | Waiting:
    """The batch of the next step: the one there is, or a new one where enough groups are sealed.

    Groups too stale for that step are dropped on the way. `config`: the run's file, for whoever has it; it never
    changes. Raises Unknown.
    """
    values: dict[str, Any] = {"run": run_id}
    async with store.direct() as connection, connection.transaction():
        await _lock(connection, run_id)
        config = config or await _config(connection, run_id)
        current = await (await connection.execute(_CURRENT, values)).fetchone()
        if current is not None:
            return Leased(*current)
        step, batch_no = await _one(connection, _COUNTS, values)
        values |= {"step": step, "batch": batch_no, "max": config.staleness.max, "n": config.batch.groups}
        stale = (await connection.execute(_DROP_STALE, values)).rowcount
        ready = [row[0] for row in await (await connection.execute(_READY, values)).fetchall()]
        (drawn,) = await _one(connection, _DRAWN, values)
        if _steps_done(config, step) or not _enough(config, len(ready), drawn):
            return Waiting(len(ready), config.batch.groups, step, drawn)
        await connection.execute(_INSERT, values | {"stale": stale})
        await connection.execute(
            "INSERT INTO batch_groups (run_id, batch_no, group_no)"
            " SELECT %(run)s, %(batch)s, unnest(%(groups)s::int[])",
            values | {"groups": ready},
        )
        await connection.execute(
            "UPDATE groups SET state = 'leased' WHERE run_id = %(run)s AND group_no = ANY(%(groups)s)",
            values | {"groups": ready},
        )
        return Leased(batch_no, step, len(ready))


def _steps_done(config: RunConfig, committed: int) -> bool:
    """Short batches leave groups over: they must not become a step that nobody asked for."""
    return committed >= config.trainer.steps


def _enough(config: RunConfig, ready: int, drawn: int) -> bool:
    wanted = config.batch.groups
    short = config.batch.when_short == "train" and drawn >= wanted * config.batch.resample_cap
    return ready >= wanted or (short and ready > 0)


async def claim_batch(store: Store, run_id: str, batch_no: int, owner: str) -> Claim | None:
    """Take a batch: whoever held it before cannot commit it any more. None where it was abandoned. Raises Unknown."""
    async with store.direct() as connection:
        cursor = await connection.execute(_CLAIM, {"run": run_id, "batch": batch_no, "owner": clean(owner)})
        row = await cursor.fetchone()
    if row is None:
        raise Unknown(f"The run {run_id} has no batch {batch_no} to train on.")
    abandoned, *claim = row
    return None if abandoned else Claim(batch_no, *claim)


async def leased_batch(store: Store, run_id: str) -> Leased | None:
    """The batch that somebody trains on, or may."""
    async with store.direct() as connection:
        row = await (await connection.execute(_CURRENT, {"run": run_id})).fetchone()
    return None if row is None else Leased(*row)


async def abandon_batch(store: Store, run_id: str, batch_no: int) -> bool:
    """Free all groups of a leased batch; whether there was one. Its trainer cannot commit it any more."""
    values = {"run": run_id, "batch": batch_no}
    async with store.direct() as connection, connection.transaction():
        await _lock(connection, run_id)
        done = await connection.execute(
            "UPDATE batches SET state = 'abandoned', ended_at = now()"
            " WHERE run_id = %(run)s AND batch_no = %(batch)s AND state = 'leased'",
            values,
        )
        if not done.rowcount:
            return False
        await connection.execute(
            "UPDATE groups g SET state = 'sealed' FROM batch_groups b WHERE b.run_id = %(run)s"
            " AND b.batch_no = %(batch)s AND b.live AND g.run_id = b.run_id AND g.group_no = b.group_no",
            values,
        )
        await connection.execute(
            "UPDATE batch_groups SET live = false WHERE run_id = %(run)s AND batch_no = %(batch)s", values
        )
        await connection.execute(
            "UPDATE groups SET reported_in = NULL WHERE run_id = %(run)s AND reported_in = %(batch)s", values
        )
        return True


async def commit_step(
    store: Store,
    run_id: str,
    claim: Claim,
    *,
    path: str,
    digest: str,
    metrics: Mapping[str, float],
    probe: Mapping[str, Any] | None = None,
) -> StepRow | None:
    """Commit a step: its row, its version, its groups and its batch, or nothing at all.

    None where another trainer took the batch since. Raises BadRecord for metrics that are not finite, Refused where
    the batch does not follow the newest version.
    """
    check_finite(tuple(metrics.values()), "a metric")
    if not digest:
        raise BadRecord("a checkpoint without its hash cannot be committed")
    version = claim.step + 1
    values = {"run": run_id, "batch": claim.batch_no, "fence": claim.fence, "step": claim.step, "version": version}
    async with store.direct() as connection, connection.transaction():
        await _lock(connection, run_id)
        if not (await connection.execute(_COMMIT, values)).rowcount:
            return None
        newest = await head_of(connection, run_id)
        if newest.version != claim.step:
            raise Refused(f"Step {claim.step} of {run_id} cannot follow version {newest.version}.")
        await connection.execute(
            "INSERT INTO policy_versions (run_id, version, label, path, digest, probe)"
            " VALUES (%(run)s, %(version)s, %(label)s, %(path)s, %(digest)s, %(probe)s::jsonb)",
            values
            | {"label": weight_label(run_id, version), "path": path, "digest": digest}
            | {"probe": None if probe is None else json.dumps(probe)},
        )
        # Engines ask for the newest version and at most the one before it; older probes are only weight.
        await connection.execute(
            "UPDATE policy_versions SET probe = NULL"
            " WHERE run_id = %(run)s AND version BETWEEN 1 AND %(version)s - 3 AND probe IS NOT NULL",
            values,
        )
        trained = await connection.execute(
            "UPDATE groups g SET state = 'trained' FROM batch_groups b WHERE b.run_id = %(run)s"
            " AND b.batch_no = %(batch)s AND b.live AND g.run_id = b.run_id AND g.group_no = b.group_no"
            " RETURNING g.oldest_version",
            values,
        )
        oldest = [row[0] for row in await trained.fetchall() if row[0] is not None]
        staleness = claim.step - min(oldest, default=claim.step)
        await connection.execute(
            "INSERT INTO train_steps (run_id, step, batch_no, fence, version, groups, staleness, metrics) VALUES"
            " (%(run)s, %(step)s, %(batch)s, %(fence)s, %(version)s, %(groups)s, %(staleness)s, %(metrics)s::jsonb)",
            values | {"groups": trained.rowcount, "staleness": staleness, "metrics": encode(dict(metrics)).display},
        )
        return StepRow(claim.step, version, claim.batch_no, claim.fence, trained.rowcount, staleness, dict(metrics))


async def train_steps(store: Store, run_id: str, since: int = 0) -> list[StepRow]:
    """Committed steps from number `since` on, in order."""
    async with store.direct() as connection:
        cursor = await connection.execute(
            f"{_STEPS} AND step >= %(since)s ORDER BY step", {"run": run_id, "since": since}
        )
        return [StepRow(*row) for row in await cursor.fetchall()]


async def committed_steps(store: Store, run_id: str) -> int:
    async with store.direct() as connection:
        [count] = await _one(connection, "SELECT count(*) FROM train_steps WHERE run_id = %(run)s", {"run": run_id})
    return int(count)


@dataclass(frozen=True)
class Progress:
    """How far a run's training is. `published` -1: no version has reached every engine yet."""

    committed: int
    published: int
    last: StepRow | None


async def training_progress(store: Store, run_id: str) -> Progress:
    """Steps committed, the newest of them, and the newest version that the engines hold."""
    async with store.direct() as connection:
        committed, published = await _one(
            connection,
            "SELECT (SELECT count(*) FROM train_steps WHERE run_id = %(run)s),"
            " (SELECT coalesce(max(version), -1) FROM policy_versions WHERE run_id = %(run)s"
            " AND published_at IS NOT NULL)",
            {"run": run_id},
        )
    newest = await train_steps(store, run_id, since=max(0, committed - 1))
    return Progress(committed, published, newest[-1] if newest else None)


async def read_head(store: Store, run_id: str) -> Head:
    """The newest version. Raises Unknown where the run has none that could be loaded."""
    async with store.direct() as connection:
        return await head_of(connection, run_id)


async def head_of(connection: Direct, run_id: str) -> Head:
    cursor = await connection.execute(
        "SELECT version, path, digest FROM policy_versions WHERE run_id = %(run)s ORDER BY version DESC LIMIT 1",
        {"run": run_id},
    )
    row = await cursor.fetchone()
    if row is None or row[1] is None:
        raise Unknown(f"The run {run_id} has no weights to train; its trainer has not begun.")
    return Head(*row)


async def live_checkpoints(store: Store, run_id: str, keep: int) -> set[str]:
    """Paths of the checkpoints that must stay: the newest `keep`, and those a running evaluation is pinned to."""
    async with store.direct() as connection:
        cursor = await connection.execute(
            "SELECT path FROM (SELECT path, row_number() OVER (ORDER BY version DESC) AS age, version"
            " FROM policy_versions WHERE run_id = %(run)s AND path IS NOT NULL) AS v"
            " WHERE age <= %(keep)s OR version IN (SELECT policy_version FROM evaluations"
            " WHERE run_id = %(run)s AND state = 'running')",
            {"run": run_id, "keep": keep},
        )
        return {row[0] for row in await cursor.fetchall()}


async def _lock(connection: Direct, run_id: str) -> None:
    if not (await connection.execute(_LOCK, {"run": run_id})).rowcount:
        raise unknown_run(run_id)


async def _config(connection: Direct, run_id: str) -> RunConfig:
    [document] = await _one(connection, "SELECT config FROM runs WHERE run_id = %(run)s", {"run": run_id})
    return RunConfig.model_validate(document)


async def _one(connection: Direct, query: str, values: Mapping[str, Any]) -> Sequence[Any]:
    row = await (await connection.execute(query, values)).fetchone()
    if row is None:
        raise LookupError("an aggregate without a row")
    return row
