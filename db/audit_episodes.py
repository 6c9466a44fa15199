"""Checks of the ledger: episodes, and the turns, tool calls and scores they are made of.

Invariant: keys are not trusted either, so each check that counts rows of an episode counts distinct keys: a row that is
there twice is one contradiction, not several.
"""

from typing import Final

from .audit_check import EPISODE_NAME, EPISODE_ORDER, TURN_NAME, TURN_ORDER, Check
from .endings import VALID_FAILURES

_VALID: Final = ", ".join(f"'{kind}'" for kind in sorted(VALID_FAILURES))
_EPISODE: Final = ("group_no", "member", "attempt")
_KEYS: Final = {
    "groups": ("group", ("group_no",)),
    "episodes": ("episode", _EPISODE),
    "turns": ("turn", (*_EPISODE, "turn")),
    "segments": ("segment", (*_EPISODE, "segment")),
    "tool_calls": ("call", (*_EPISODE, "turn", "call_index")),
    "scores": ("score", (*_EPISODE, "name", "scorer_version")),
    "batches": ("batch", ("batch_no",)),
    "batch_groups": ("member", ("batch_no", "group_no")),
    "train_steps": ("step", ("step",)),
    "policy_versions": ("version", ("version",)),
}
"""Table → what a row of it is called, and its key inside a run."""


def _twice(table: str) -> str:
    word, key = _KEYS[table]
    columns = ", ".join(key)
    return (
        f"(SELECT '{word} ' || concat_ws('/', {columns}) AS name FROM {table}"
        f" WHERE run_id = %(run)s GROUP BY {columns} HAVING count(*) > 1 ORDER BY {columns})"
    )


def _lost(table: str, owner: str, *, shared: tuple[str, ...], where: str = "true") -> str:
    """Rows of `table` whose `owner`, the row with the same `shared` columns, does not exist."""
    word, key = _KEYS[table]
    same = " AND ".join(f"o.{column} = t.{column}" for column in ("run_id", *shared))
    return (
        f"(SELECT '{word} ' || concat_ws('/', {', '.join(f't.{column}' for column in key)}) AS name"
        f" FROM {table} t WHERE t.run_id = %(run)s AND {where} AND NOT EXISTS (SELECT FROM {owner} o WHERE {same})"
        " ORDER BY name)"
    )


_NO_KEY_TWICE: Final = " UNION ALL ".join(_twice(table) for table in _KEYS)
_NO_ORPHANS: Final = " UNION ALL ".join(
    (
        _lost("episodes", "groups", shared=("group_no",)),
        _lost("turns", "episodes", shared=_EPISODE),
        _lost("turns", "segments", shared=(*_EPISODE, "segment")),
        _lost("tool_calls", "turns", shared=(*_EPISODE, "turn")),
        _lost("scores", "episodes", shared=_EPISODE),
        _lost("batch_groups", "groups", shared=("group_no",)),
    )
)

_ENDING: Final = f"""
SELECT DISTINCT {EPISODE_NAME}, e.group_no, e.member, e.attempt FROM episodes e
WHERE e.run_id = %(run)s AND (
  e.state = 'running' AND num_nonnulls(e.stop, e.ended_at, e.failure, e.reward) = 0
  OR e.ended_at IS NOT NULL AND e.stop IS NOT NULL AND (
    e.state = 'done' AND e.stop <> 'failed' AND coalesce(e.failure IN ({_VALID}), true)
    OR e.state = 'failed' AND e.failure NOT IN ({_VALID}) AND e.reward IS NULL
  )
) IS NOT TRUE
{EPISODE_ORDER}
"""
_STOP: Final = f"""
WITH last AS (
  SELECT DISTINCT ON (t.group_no, t.member, t.attempt) t.group_no, t.member, t.attempt, t.turn, t.finish
  FROM turns t WHERE t.run_id = %(run)s ORDER BY t.group_no, t.member, t.attempt, t.turn DESC
), answers AS (
  SELECT c.group_no, c.member, c.attempt, c.turn, bool_or(c.done) AS done, bool_or(c.truncated) AS truncated
  FROM tool_calls c WHERE c.run_id = %(run)s GROUP BY c.group_no, c.member, c.attempt, c.turn
)
SELECT DISTINCT {EPISODE_NAME}, e.group_no, e.member, e.attempt
FROM episodes e LEFT JOIN last l USING (group_no, member, attempt)
LEFT JOIN answers a ON (a.group_no, a.member, a.attempt, a.turn) = (e.group_no, e.member, e.attempt, l.turn)
WHERE e.run_id = %(run)s AND e.state = 'done' AND CASE e.stop
  WHEN 'answered' THEN l.finish = 'stop' AND a.turn IS NULL
  WHEN 'length' THEN l.finish = 'length'
  WHEN 'done' THEN a.done
  WHEN 'truncated' THEN a.truncated AND NOT a.done
  ELSE true
END IS NOT TRUE
{EPISODE_ORDER}
"""
_COUNTS: Final = f"""
WITH spent AS (
  SELECT group_no, member, attempt, count(*) AS turns, max(turn) + 1 AS numbers, sum(tokens) AS tokens,
    min(policy_version) AS version
  FROM (
    SELECT DISTINCT ON (t.group_no, t.member, t.attempt, t.turn) t.group_no, t.member, t.attempt, t.turn,
      coalesce(t.told_sampled, octet_length(t.sampled) / 4) AS tokens, t.policy_version
    FROM turns t WHERE t.run_id = %(run)s {TURN_ORDER}
  ) AS each GROUP BY group_no, member, attempt
)
SELECT DISTINCT {EPISODE_NAME}, e.group_no, e.member, e.attempt
FROM episodes e LEFT JOIN spent s USING (group_no, member, attempt)
WHERE e.run_id = %(run)s AND (s.numbers <> s.turns OR e.state <> 'running' AND (
  e.turns <> coalesce(s.turns, 0) OR e.sampled_tokens <> coalesce(s.tokens, 0)
  OR e.policy_version IS DISTINCT FROM s.version))
{EPISODE_ORDER}
"""
_REWARD: Final = f"""
WITH first AS (
  SELECT DISTINCT ON (s.group_no, s.member, s.attempt, s.name) s.*
  FROM scores s WHERE s.run_id = %(run)s ORDER BY s.group_no, s.member, s.attempt, s.name, s.value IS NULL, s.seq
), sums AS (
  SELECT group_no, member, attempt, created_at, seq,
    CASE WHEN bool_or(value IS NULL) OVER so_far THEN NULL ELSE sum(weight * value) OVER so_far END AS total
  FROM first WHERE NOT metric WINDOW so_far AS (PARTITION BY group_no, member, attempt ORDER BY seq)
), parts AS (
  SELECT group_no, member, attempt, min(created_at) AS began, array_agg(total ORDER BY seq) AS totals
  FROM sums GROUP BY group_no, member, attempt
)
SELECT DISTINCT {EPISODE_NAME}, e.group_no, e.member, e.attempt
FROM episodes e JOIN groups g USING (run_id, group_no) JOIN parts p USING (group_no, member, attempt)
WHERE e.run_id = %(run)s AND e.state = 'done' AND (g.closed_at IS NULL OR p.began <= g.closed_at) AND NOT EXISTS (
  SELECT FROM unnest(CASE WHEN g.closed_at IS NULL THEN p.totals[cardinality(p.totals):] ELSE p.totals END) AS t(total)
  WHERE coalesce(abs(t.total - e.reward) <= 1e-9 * greatest(1, abs(t.total)), num_nonnulls(t.total, e.reward) = 0)
)
{EPISODE_ORDER}
"""
"""Scores that came after their group had closed leave the reward as it is: then any number of the first ones may be
what it is the sum of."""

_PROVISIONAL: Final = f"""
SELECT {TURN_NAME} FROM turns t
JOIN episodes e USING (run_id, group_no, member, attempt) JOIN groups g USING (run_id, group_no)
WHERE t.run_id = %(run)s AND t.provisional AND e.state = 'done' AND g.closed_at IS NOT NULL AND g.state <> 'failed'
{TURN_ORDER}
"""
_PUBLISHED: Final = f"""
SELECT {TURN_NAME} FROM turns t
WHERE t.run_id = %(run)s AND NOT t.provisional AND EXISTS (
  SELECT FROM jsonb_array_elements(t.spans) AS s(span)
  LEFT JOIN policy_versions v ON v.run_id = t.run_id AND v.version = (s.span->>1)::int AND v.label = s.span->>0
  LEFT JOIN publications p ON p.run_id = t.run_id AND p.version = v.version
    AND p.engine_id = coalesce(s.span->>4, t.engine_id) AND p.incarnation = coalesce(s.span->>5, t.incarnation)
    AND p.proved AND p.first_seq < t.seq
  WHERE v.version IS NULL OR v.path IS NOT NULL AND p.version IS NULL
)
{TURN_ORDER}
"""
_LENGTHS: Final = f"""
SELECT {TURN_NAME} FROM turns t
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
{TURN_ORDER}
"""
_VERSION: Final = f"""
SELECT {TURN_NAME} FROM turns t
WHERE t.run_id = %(run)s AND t.policy_version IS DISTINCT FROM (
  SELECT min((s.span->>1)::int) FROM jsonb_array_elements(t.spans) AS s(span)
)
{TURN_ORDER}
"""

EPISODE_CHECKS: Final = (
    Check("no_key_twice", "no key has two rows, whatever the schema says", "rows", _NO_KEY_TWICE),
    Check("no_orphans", "every row belongs to a row that exists", "rows", _NO_ORPHANS),
    Check(
        "episode_ending",
        "an episode either runs, or is done with a stop reason, or has failed with a kind and without a reward",
        "episodes",
        _ENDING,
    ),
    Check("episode_stop", "a stop reason is what the episode's last turn and its answer say", "episodes", _STOP),
    Check(
        "episode_counts",
        "an episode's turns have no gap, and an ended one counts its turns, tokens and oldest version",
        "episodes",
        _COUNTS,
    ),
    Check("episode_reward", "a reward is the weighted sum of its scores", "episodes", _REWARD),
    Check("provisional", "no turn that counts is unconfirmed", "turns", _PROVISIONAL),
    Check(
        "published",
        "every confirmed token was sampled by a version that this life of the engine had been given before, and proved",
        "spans",
        _PUBLISHED,
    ),
    Check("lengths", "tokens, logprobs, mask and spans of a turn are equally long", "turns", _LENGTHS),
    Check("turn_version", "a turn names the oldest version of its spans", "turns", _VERSION),
)
