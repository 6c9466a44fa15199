"""The ledger of a run, checked: does every row about training agree with every other?

Invariant: an audit only reads, in one snapshot, and trusts no constraint and no code that wrote the rows: each check is
a query for what contradicts it. Of a run without trainer only what its turns say can be checked.
"""

from dataclasses import dataclass
from typing import Any, Final

from .store import Store

_SEATS: Final = """
seats AS (
  SELECT g.group_no, g.state,
    (SELECT count(*) FROM batch_groups s JOIN batches b USING (run_id, batch_no)
     WHERE s.run_id = g.run_id AND s.group_no = g.group_no AND s.live AND b.state = 'leased') AS leased,
    (SELECT count(*) FROM batch_groups s JOIN batches b USING (run_id, batch_no)
     WHERE s.run_id = g.run_id AND s.group_no = g.group_no AND b.state = 'committed') AS committed
  FROM groups g WHERE g.run_id = %(run)s AND g.kind = 'train' AND g.closed_at IS NOT NULL
)
"""
"""Closed training groups, and in how many leased and committed batches each is."""

_GROUP_STATE: Final = f"""
WITH {_SEATS} SELECT 'group ' || group_no FROM seats
WHERE NOT (state IN ('sealed', 'filtered', 'failed', 'stale') AND leased = 0
  OR state = 'leased' AND leased = 1 AND committed = 0
  OR state = 'trained' AND leased = 0)
ORDER BY group_no
"""
_TRAINED_ONCE: Final = f"""
WITH {_SEATS} SELECT 'group ' || group_no FROM seats
WHERE (state = 'trained') <> (committed > 0) ORDER BY group_no
"""
_NEVER_TWICE: Final = f"WITH {_SEATS} SELECT 'group ' || group_no FROM seats WHERE committed > 1 ORDER BY group_no"

_STEPS: Final = """
WITH numbered AS (
  SELECT step, version, batch_no, groups, row_number() OVER (ORDER BY step) - 1 AS place
  FROM train_steps WHERE run_id = %(run)s
)
SELECT 'step ' || step FROM numbered n
WHERE step <> place OR version <> step + 1
  OR NOT EXISTS (SELECT FROM policy_versions v WHERE v.run_id = %(run)s AND v.version = n.version)
ORDER BY step
"""
_BATCHES: Final = """
SELECT 'batch ' || b.batch_no FROM batches b
LEFT JOIN train_steps s ON s.run_id = b.run_id AND s.batch_no = b.batch_no
LEFT JOIN LATERAL (
  SELECT count(*) AS n, count(*) FILTER (WHERE g.live) AS live
  FROM batch_groups g WHERE g.run_id = b.run_id AND g.batch_no = b.batch_no
) AS members ON true
WHERE b.run_id = %(run)s AND ((b.state = 'committed') <> (s.step IS NOT NULL)
  OR members.n = 0 OR members.live <> CASE b.state WHEN 'abandoned' THEN 0 ELSE members.n END
  OR b.state = 'committed' AND (s.step <> b.step OR s.groups <> members.n))
ORDER BY b.batch_no
"""

_TURN: Final = "'turn ' || concat_ws('/', t.group_no, t.member, t.attempt, t.turn)"
_IN_ORDER: Final = "ORDER BY t.group_no, t.member, t.attempt, t.turn"

_PROVISIONAL: Final = f"""
SELECT {_TURN} FROM turns t
JOIN episodes e USING (run_id, group_no, member, attempt) JOIN groups g USING (run_id, group_no)
WHERE t.run_id = %(run)s AND t.provisional AND e.state = 'done' AND g.closed_at IS NOT NULL AND g.state <> 'failed'
{_IN_ORDER}
"""
_PUBLISHED: Final = f"""
SELECT {_TURN} FROM turns t
WHERE t.run_id = %(run)s AND NOT t.provisional AND EXISTS (
  SELECT FROM jsonb_array_elements(t.spans) AS s(span)
  LEFT JOIN policy_versions v ON v.run_id = t.run_id AND v.version = (s.span->>1)::int AND v.label = s.span->>0
  LEFT JOIN publications p ON p.run_id = t.run_id AND p.version = v.version
    AND p.engine_id = coalesce(s.span->>4, t.engine_id) AND p.incarnation = coalesce(s.span->>5, t.incarnation)
    AND p.proved AND p.first_seq < t.seq
  WHERE v.version IS NULL OR v.path IS NOT NULL AND p.version IS NULL
)
{_IN_ORDER}
"""
_LENGTHS: Final = f"""
SELECT {_TURN} FROM turns t
LEFT JOIN LATERAL (
  SELECT coalesce(max(finish), 0) AS finish,
    coalesce(bool_and(start >= 0 AND finish > start AND start = before), true) AS joined
  FROM (
    SELECT (s.span->>2)::int AS start, (s.span->>3)::int AS finish,
      lag((s.span->>3)::int, 1, 0) OVER (ORDER BY s.place) AS before
    FROM jsonb_array_elements(t.spans) WITH ORDINALITY AS s(span, place)
  ) AS parts
) AS spans ON true
WHERE t.run_id = %(run)s AND (octet_length(t.sampled) %% 4 <> 0 OR octet_length(t.logprobs) <> octet_length(t.sampled)
  OR octet_length(t.mask) * 4 <> octet_length(t.sampled) OR spans.finish * 4 <> octet_length(t.sampled)
  OR NOT spans.joined)
{_IN_ORDER}
"""

CHECKS: Final[dict[str, str]] = {
    "group_state": _GROUP_STATE,
    "trained_once": _TRAINED_ONCE,
    "never_twice": _NEVER_TWICE,
    "steps": _STEPS,
    "batches": _BATCHES,
    "provisional": _PROVISIONAL,
    "published": _PUBLISHED,
    "lengths": _LENGTHS,
}
"""Name → the query for what contradicts it. In their order:

a closed training group is exactly one of sealed, filtered, failed, stale, leased (and then in one leased batch) and
trained; a group is trained exactly where a committed batch has it; none is in two; steps are numbered from 0 without a
gap, and each made the version of the next number; a batch is committed exactly where its step is, with
all its groups;
no turn that counts is provisional; every version that sampled a token of a confirmed turn was given to that life of
the engine before, and the engine did not fail to prove it; tokens, logprobs, mask and spans are equally long.
"""

_CHECKED: Final = """
SELECT (SELECT count(*) FROM groups WHERE run_id = %(run)s AND kind = 'train' AND closed_at IS NOT NULL),
  (SELECT count(*) FROM batches WHERE run_id = %(run)s),
  (SELECT count(*) FROM train_steps WHERE run_id = %(run)s),
  (SELECT count(*) FROM turns WHERE run_id = %(run)s),
  (SELECT coalesce(sum(jsonb_array_length(spans)), 0)::bigint FROM turns WHERE run_id = %(run)s AND NOT provisional)
"""
_COUNTED: Final = ("groups", "batches", "steps", "turns", "spans")


@dataclass(frozen=True)
class Violation:
    """A row that contradicts another. `check`: a name of `CHECKS`; `row`: which one, as `group 3` or `turn 3/0/0/1`."""

    check: str
    row: str


@dataclass(frozen=True)
class Audit:
    """What an audit found. `checked`: how many rows of which kind it looked at."""

    violations: tuple[Violation, ...]
    checked: dict[str, int]


async def audit_run(store: Store, run_id: str) -> Audit:
    """Check the ledger of a run, also while it runs."""
    values: dict[str, Any] = {"run": run_id}
    violations: list[Violation] = []
    async with store.direct() as connection, connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        for name, query in CHECKS.items():
            found = await (await connection.execute(query, values)).fetchall()
            violations += [Violation(name, row) for (row,) in found]
        counts = await (await connection.execute(_CHECKED, values)).fetchone()
    return Audit(tuple(violations), dict(zip(_COUNTED, counts or (), strict=True)))
