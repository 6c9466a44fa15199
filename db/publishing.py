"""Which version the engines of a run should hold, what each was given, and what that means for turns.

Invariant: a turn with a token of a version that its engine has not proved yet is provisional. Settling a publication
locks its row before it looks for such turns, and storing a turn locks the same row, so none is missed: each becomes
confirmed, or its episode fails as `engine`. A proof covers what was sampled since its own load, and nothing else.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from ..contracts.states import PublicationState, RunState, sources
from .batches import Head, head_of
from .encoding import check_finite, clean, clean_or_none
from .errors import Unknown
from .store import Store


@dataclass(frozen=True)
class Wanted:
    """The version that every engine of the run should hold."""

    run_state: RunState
    version: int
    label: str
    path: str | None
    """None: engines hold it from their start, and nobody can load it again."""
    digest: str | None
    probe: dict[str, Any] | None
    published: bool
    """Whether every engine that could be reached has held it."""
    noise: float | None
    """Mean distance between an engine's logprobs and the trainer's at version 0; None: not measured."""
    borrowed: bool = False
    """Engines hold it from their start, and another run made it: path, digest and probe are what its rows say."""


_WANTED: Final = """
SELECT r.state, v.version, v.label, coalesce(v.path, made.path), coalesce(v.digest, made.digest),
  coalesce(v.probe, made.probe), v.published_at IS NOT NULL,
  (SELECT max(distance) FROM publications p WHERE p.run_id = r.run_id AND p.version = 0),
  made.path IS NOT NULL
FROM runs r
JOIN LATERAL (SELECT max(version) AS version FROM policy_versions WHERE run_id = r.run_id) AS newest ON true
LEFT JOIN LATERAL (
  SELECT min(policy_version) AS version FROM evaluations WHERE run_id = r.run_id AND state = 'running'
) AS pinned ON true
JOIN policy_versions v ON v.run_id = r.run_id AND v.version = least(newest.version, pinned.version)
LEFT JOIN policy_versions made ON v.path IS NULL AND made.path IS NOT NULL AND made.label = v.label
  AND made.run_id = regexp_replace(v.label, '@[0-9]+$', '') AND made.run_id <> v.run_id
WHERE r.run_id = %(run)s
"""

_HERE: Final = "run_id = %(run)s AND engine_id = %(engine)s AND incarnation = %(incarnation)s"

_BEGIN: Final = """
INSERT INTO publications (run_id, engine_id, incarnation, version)
VALUES (%(run)s, %(engine)s, %(incarnation)s, %(version)s)
ON CONFLICT (run_id, engine_id, incarnation, version) DO UPDATE
SET state = 'loading', reason = NULL, distance = NULL, seq = nextval('turns_seq'), changed_at = now()
"""

_LOCK: Final = "SELECT FROM runs WHERE run_id = %(run)s FOR NO KEY UPDATE"
"""One publication of a run is settled at a time: a turn may wait for two, and the second has to see the first."""

_SETTLE: Final = f"""
UPDATE publications SET state = %(state)s, reason = %(reason)s, distance = %(distance)s, changed_at = now(),
  proved = proved OR %(state)s IN ('verified', 'unverified')
WHERE {_HERE} AND version = %(version)s AND state = ANY(%(sources)s) RETURNING seq
"""

_TOUCHED: Final = """EXISTS (
    SELECT FROM jsonb_array_elements(t.spans) AS span
    WHERE coalesce(span->>4, t.engine_id) = %(engine)s AND coalesce(span->>5, t.incarnation) = %(incarnation)s
      AND (span->>1)::int = %(version)s
  )"""
"""Whether this life of the engine sampled a token of `t` with the version."""

_CONFIRM: Final = f"""
UPDATE turns t SET provisional = false
WHERE t.run_id = %(run)s AND t.provisional AND t.seq > %(seq)s AND {_TOUCHED}
  AND NOT EXISTS (
    SELECT FROM jsonb_array_elements(t.spans) AS span
    JOIN publications p ON p.run_id = t.run_id AND p.engine_id = coalesce(span->>4, t.engine_id)
      AND p.incarnation = coalesce(span->>5, t.incarnation) AND p.version = (span->>1)::int
    WHERE p.state IN ('loading', 'failed')
  )
"""

_DOUBTED: Final = f"""
SELECT e.run_id, e.group_no, e.member, e.attempt FROM episodes e JOIN groups g USING (run_id, group_no)
WHERE e.run_id = %(run)s AND e.state IN ('running', 'done') AND g.closed_at IS NULL
  AND (e.group_no, e.member, e.attempt) IN (
    SELECT t.group_no, t.member, t.attempt FROM turns t WHERE t.run_id = %(run)s AND t.provisional AND {_TOUCHED}
  )
"""

_LOCK_DOUBTED: Final = _DOUBTED + "ORDER BY 2, 3, 4 FOR NO KEY UPDATE OF e"
"""Behind this lock no turn is added any more, so that the next statement counts all of them."""

_INVALIDATE: Final = f"""
WITH doubted AS MATERIALIZED ({_DOUBTED}), spent AS (
  SELECT d.group_no, d.member, d.attempt, s.turns, s.tokens, s.version
  FROM doubted d CROSS JOIN LATERAL (
    SELECT count(*) AS turns, sum(octet_length(t.sampled) / 4) AS tokens, min(t.policy_version) AS version FROM turns t
    WHERE t.run_id = d.run_id AND t.group_no = d.group_no AND t.member = d.member AND t.attempt = d.attempt
  ) AS s
)
UPDATE episodes e SET state = 'failed', stop = 'failed', failure = 'engine', reason = %(reason)s, reward = NULL,
  turns = spent.turns, sampled_tokens = spent.tokens, policy_version = spent.version,
  ended_at = coalesce(e.ended_at, now())
FROM spent
WHERE e.run_id = %(run)s AND (e.group_no, e.member, e.attempt) = (spent.group_no, spent.member, spent.attempt)
"""

_FORGET: Final = f"DELETE FROM partial_turns t WHERE t.run_id = %(run)s AND {_TOUCHED}"


async def wanted(store: Store, run_id: str) -> Wanted | None:
    """What engines should hold: the newest version, or an older one that a running evaluation is pinned to.

    None where the run has no version yet. Raises Unknown.
    """
    async with store.direct() as connection:
        row = await (await connection.execute(_WANTED, {"run": run_id})).fetchone()
        if row is None:
            found = await connection.execute("SELECT FROM runs WHERE run_id = %s", (run_id,))
            if not found.rowcount:
                raise Unknown(f"There is no run called {run_id}.")
            return None
    return Wanted(RunState(row[0]), *row[1:])


async def publication_state(
    store: Store, run_id: str, engine_id: str, incarnation: str, version: int
) -> PublicationState | None:
    """What is known of a version on one life of an engine; None: it was never given it."""
    async with store.direct() as connection:
        cursor = await connection.execute(
            f"SELECT state FROM publications WHERE {_HERE} AND version = %(version)s",
            _named(run_id, engine_id, incarnation, version),
        )
        row = await cursor.fetchone()
    return None if row is None else PublicationState(row[0])


async def begin_publication(store: Store, run_id: str, engine_id: str, incarnation: str, version: int) -> None:
    """From now on turns that this life of the engine samples with `version` are provisional.

    A load of it that nobody settled, since whoever published was gone, is settled as failed.
    """
    async with store.direct() as connection:
        cursor = await connection.execute(
            "SELECT incarnation, version FROM publications"
            " WHERE run_id = %(run)s AND engine_id = %(engine)s AND state = 'loading'",
            _named(run_id, engine_id, incarnation, version),
        )
        unsettled = await cursor.fetchall()
    for life, given in unsettled:
        reason = "its load ended before the engine had proved what it held"
        await settle_publication(store, run_id, engine_id, life, given, PublicationState.FAILED, reason)
    async with store.direct() as connection:
        await connection.execute(_BEGIN, _named(run_id, engine_id, incarnation, version))


async def settle_publication(
    store: Store,
    run_id: str,
    engine_id: str,
    incarnation: str,
    version: int,
    state: PublicationState,
    reason: str | None = None,
    distance: float | None = None,
) -> None:
    """Say what a probe found. FAILED fails the episodes with turns that stood on it; else those are confirmed.

    Settling what is settled already changes nothing.
    """
    check_finite((distance,), "the distance of a probe")
    values = _named(run_id, engine_id, incarnation, version) | {
        "state": state,
        "sources": [str(old) for old in sources(state)],
        "reason": clean_or_none(reason),
        "distance": distance,
    }
    async with store.direct() as connection, connection.transaction():
        await connection.execute(_LOCK, values)
        settled = await (await connection.execute(_SETTLE, values)).fetchone()
        if settled is None:
            return
        if state is PublicationState.FAILED:
            doubt = clean(f"sampled by weights in doubt: {reason}")
            await connection.execute(_LOCK_DOUBTED, values)
            await connection.execute(_INVALIDATE, values | {"reason": doubt})
            await connection.execute(_FORGET, values)
        else:
            await connection.execute(_CONFIRM, values | {"seq": settled[0]})


async def mark_published(store: Store, run_id: str, version: int) -> bool:
    """Every engine that could be reached holds the version. Whether that is news."""
    async with store.direct() as connection:
        done = await connection.execute(
            "UPDATE policy_versions SET published_at = now()"
            " WHERE run_id = %s AND version = %s AND published_at IS NULL",
            (run_id, version),
        )
        return bool(done.rowcount)


async def add_first_version(store: Store, run_id: str, label: str, path: str, digest: str | None, probe: Any) -> Head:
    """Write version 0 unless there is one; what stands."""
    async with store.direct() as connection:
        await connection.execute(
            "INSERT INTO policy_versions (run_id, version, label, path, digest, probe)"
            " VALUES (%s, 0, %s, %s, %s, %s::jsonb) ON CONFLICT DO NOTHING",
            (run_id, label, path, digest, None if probe is None else json.dumps(probe)),
        )
        return await head_of(connection, run_id)


def _named(run_id: str, engine_id: str, incarnation: str, version: int) -> dict[str, Any]:
    return {"run": run_id, "engine": engine_id, "incarnation": clean(incarnation), "version": version}
