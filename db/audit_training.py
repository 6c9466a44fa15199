"""Checks of the ledger: groups, and the batches and steps that consumed them.

Invariant: each group is counted by the batches that have it, not by what its own row says of them, so that the two
can contradict each other.
"""

from typing import Final

from ..contracts.reasons import FailureKind
from ..contracts.states import OPEN_GROUPS
from .audit_check import Check

_OPEN: Final = ", ".join(f"'{state}'" for state in sorted(OPEN_GROUPS))
_KINDS: Final = ", ".join(f"'{kind}'" for kind in FailureKind)

_SEATS: Final = """
seats AS (
  SELECT g.group_no, g.kind, g.state, g.failure, g.closed_at, coalesce(b.leased, 0) AS leased,
    coalesce(b.committed, 0) AS committed
  FROM groups g LEFT JOIN (
    SELECT s.group_no, count(DISTINCT batch_no) FILTER (WHERE s.live AND b.state = 'leased') AS leased,
      count(DISTINCT batch_no) FILTER (WHERE b.state = 'committed') AS committed
    FROM batch_groups s JOIN batches b USING (run_id, batch_no) WHERE run_id = %(run)s GROUP BY s.group_no
  ) AS b USING (group_no)
  WHERE g.run_id = %(run)s
)
"""
"""Groups, and in how many leased and committed batches each is."""

_GROUP_STATE: Final = f"""
WITH {_SEATS} SELECT DISTINCT 'group ' || group_no, group_no FROM seats
WHERE (
  closed_at IS NULL AND state IN ({_OPEN}) AND failure IS NULL AND leased = 0
  OR closed_at IS NOT NULL AND (
    state = 'failed' AND failure IN ({_KINDS}) AND leased = 0
    OR failure IS NULL AND (
      state = 'sealed' AND leased = 0
      OR kind = 'train' AND (
        state IN ('filtered', 'stale', 'trained') AND leased = 0
        OR state = 'leased' AND leased = 1 AND committed = 0
      )
    )
  )
) IS NOT TRUE
ORDER BY group_no
"""
_TRAINED_ONCE: Final = f"""
WITH {_SEATS} SELECT DISTINCT 'group ' || group_no, group_no FROM seats
WHERE (state = 'trained') <> (committed > 0) ORDER BY group_no
"""
_NEVER_TWICE: Final = f"""
WITH {_SEATS} SELECT DISTINCT 'group ' || group_no, group_no FROM seats WHERE committed > 1 ORDER BY group_no
"""
_NUMBERS: Final = """
SELECT 'group ' || coalesce(g.group_no, n.group_no) FROM (
  SELECT DISTINCT group_no FROM groups WHERE run_id = %(run)s
) AS g FULL JOIN (
  SELECT generate_series(0, next_group_no - 1) AS group_no FROM runs WHERE run_id = %(run)s
) AS n ON n.group_no = g.group_no
WHERE g.group_no IS NULL OR n.group_no IS NULL ORDER BY coalesce(g.group_no, n.group_no)
"""
_TOTALS: Final = """
SELECT DISTINCT 'group ' || g.group_no, g.group_no FROM groups g LEFT JOIN (
  SELECT group_no, sum(sampled_tokens) AS tokens FROM (
    SELECT DISTINCT ON (group_no, member, attempt) group_no, sampled_tokens FROM episodes WHERE run_id = %(run)s
    ORDER BY group_no, member, attempt
  ) AS each GROUP BY group_no
) AS e ON e.group_no = g.group_no
WHERE g.run_id = %(run)s AND g.closed_at IS NOT NULL AND g.sampled_tokens IS DISTINCT FROM coalesce(e.tokens, 0)
ORDER BY g.group_no
"""
_ENDED: Final = """
SELECT DISTINCT 'episode ' || concat_ws('/', e.group_no, e.member, e.attempt), e.group_no, e.member, e.attempt
FROM episodes e JOIN groups g USING (run_id, group_no)
WHERE e.run_id = %(run)s AND e.state = 'running' AND g.closed_at IS NOT NULL
ORDER BY e.group_no, e.member, e.attempt
"""
_STEPS: Final = """
WITH numbered AS (
  SELECT step, version, batch_no, groups, dense_rank() OVER (ORDER BY step) - 1 AS place
  FROM train_steps WHERE run_id = %(run)s
)
SELECT DISTINCT 'step ' || step, step FROM numbered n
WHERE step <> place OR version <> step + 1
  OR NOT EXISTS (SELECT FROM policy_versions v WHERE v.run_id = %(run)s AND v.version = n.version)
ORDER BY step
"""
_BATCHES: Final = """
SELECT DISTINCT 'batch ' || b.batch_no, b.batch_no FROM batches b
LEFT JOIN train_steps s ON s.run_id = b.run_id AND s.batch_no = b.batch_no
LEFT JOIN LATERAL (
  SELECT count(DISTINCT g.group_no) AS n, count(DISTINCT g.group_no) FILTER (WHERE g.live) AS live
  FROM batch_groups g WHERE g.run_id = b.run_id AND g.batch_no = b.batch_no
) AS members ON true
WHERE b.run_id = %(run)s AND ((b.state = 'committed') <> (s.step IS NOT NULL)
  OR members.n = 0 OR members.live <> CASE b.state WHEN 'abandoned' THEN 0 ELSE members.n END
  OR b.state = 'committed' AND (s.step <> b.step OR s.groups <> members.n))
ORDER BY b.batch_no
"""

TRAINING_CHECKS: Final = (
    Check(
        "group_state",
        "every group is exactly one of open, sealed, leased (by one batch), trained, filtered, stale, or failed with "
        "a kind",
        "groups",
        _GROUP_STATE,
    ),
    Check("group_numbers", "every group that was admitted has a row, and no other does", "groups", _NUMBERS),
    Check("group_totals", "a closed group counts the tokens that its episodes sampled", "groups", _TOTALS),
    Check("group_ended", "no episode of a closed group runs", "episodes", _ENDED),
    Check("trained_once", "a group is trained exactly where a committed batch has it", "groups", _TRAINED_ONCE),
    Check("never_twice", "no group is in two committed steps", "groups", _NEVER_TWICE),
    Check("steps", "steps have no gap, and each made the version of the next number", "steps", _STEPS),
    Check(
        "batches", "a batch is committed exactly where its step is, and has kept all its groups", "batches", _BATCHES
    ),
)
