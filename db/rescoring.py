"""Scores that are given later: which groups may get them, and writing them beside those that are there.

Invariant: a score that has a value never changes, and no score of a group changes while a trainer holds its lease, so
a step that is repeated sees the rewards that it saw before. A reward that was missing (a judge was away) is filled in
once every part has a value; one that is there stays, and the new version stands beside it.
"""

from typing import Any, Final

from ..contracts.episode import Score
from ..contracts.ids import EpisodeKey, GroupKey
from ..contracts.states import GroupState
from .late import params
from .scores import FIRST, score_values
from .store import Store

_CLOSED: Final = [
    str(state)
    for state in (GroupState.SEALED, GroupState.LEASED, GroupState.TRAINED, GroupState.FILTERED, GroupState.STALE)
]
_WANTED: Final = """
FROM groups g WHERE g.run_id = %(run)s AND g.environment = %(environment)s AND g.group_no > %(after)s
  AND g.state = ANY (%(closed)s) AND g.closed_at IS NOT NULL AND (NOT %(unscored)s OR EXISTS (
    SELECT FROM episodes e WHERE e.run_id = g.run_id AND e.group_no = g.group_no
      AND e.state = 'done' AND e.reward IS NULL))
"""
_PAGE: Final = f"SELECT g.group_no {_WANTED} ORDER BY g.group_no LIMIT %(limit)s"
_COUNT: Final = f"SELECT count(*) {_WANTED}"
_KNOWN: Final = """
SELECT member, attempt, name FROM scores
WHERE run_id = %(run)s AND group_no = %(group)s AND scorer_version = %(version)s AND value IS NOT NULL
"""
_LOCK: Final = "SELECT state FROM groups WHERE run_id = %(run)s AND group_no = %(group)s FOR SHARE"
_PUT: Final = """
INSERT INTO scores (run_id, group_no, member, attempt, name, scorer_version, value, weight, metric)
VALUES (%(run)s, %(group)s, %(member)s, %(attempt)s, %(name)s, %(scorer)s, %(value)s, %(weight)s, %(metric)s)
ON CONFLICT (run_id, group_no, member, attempt, name, scorer_version) DO UPDATE
SET value = excluded.value, weight = excluded.weight WHERE scores.value IS NULL AND scores.metric = excluded.metric
"""
_FILL: Final = f"""
UPDATE episodes SET reward = parts.total
FROM (SELECT sum(weight * value ORDER BY seq) AS total, count(value) = count(*) AS whole FROM ({FIRST}) AS first
  WHERE NOT metric) AS parts
WHERE run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s
  AND state = 'done' AND reward IS NULL AND parts.whole AND parts.total IS NOT NULL
"""
_MEAN: Final = """
UPDATE groups SET mean_reward = found.mean
FROM (SELECT avg(reward) AS mean FROM (
  SELECT DISTINCT ON (member) state, reward FROM episodes WHERE run_id = %(run)s AND group_no = %(group)s
  ORDER BY member, attempt DESC) AS newest WHERE state = 'done') AS found
WHERE run_id = %(run)s AND group_no = %(group)s AND mean_reward IS DISTINCT FROM found.mean
"""


async def closed_groups(
    store: Store, run_id: str, environment: str, after: int, limit: int, *, unscored: bool
) -> list[int]:
    """Numbers of the next closed groups of an environment behind `after`, evaluations' too; `unscored`: only those
    with an episode that has no reward."""
    async with store.direct() as connection:
        rows = await connection.execute(_PAGE, _wanted(run_id, environment, after, unscored) | {"limit": limit})
        return [number for (number,) in await rows.fetchall()]


async def count_closed_groups(store: Store, run_id: str, environment: str, *, unscored: bool) -> int:
    async with store.direct() as connection:
        row = await (await connection.execute(_COUNT, _wanted(run_id, environment, -1, unscored))).fetchone()
    return 0 if row is None else int(row[0])


async def scored_by(store: Store, key: GroupKey, version: str) -> set[tuple[int, int, str]]:
    """(member, attempt, name) of every score that has a value of that version in a group."""
    values = {"run": key.run_id, "group": key.group_no, "version": version}
    async with store.direct() as connection:
        return set(await (await connection.execute(_KNOWN, values)).fetchall())


async def save_rescored(store: Store, key: GroupKey, scores: list[tuple[EpisodeKey, Score]], version: str) -> bool:
    """Store scores of a group's episodes unless the version has given them; False where a trainer holds the group.

    Then nothing was written. Raises BadRecord for a value or weight that is not finite.
    """
    given = [(episode, score_values(episode, score, version, ())) for episode, score in scores]
    of_group: dict[str, Any] = {"run": key.run_id, "group": key.group_no}
    async with store.direct() as connection, connection.transaction():
        row = await (await connection.execute(_LOCK, of_group)).fetchone()
        if row is None or row[0] == GroupState.LEASED:
            return False
        async with connection.pipeline():
            for _, values in given:
                await connection.execute(_PUT, values)
            for episode in dict.fromkeys(episode for episode, _ in given):
                await connection.execute(_FILL, params(episode))
            await connection.execute(_MEAN, of_group)
    return True


def _wanted(run_id: str, environment: str, after: int, unscored: bool) -> dict[str, Any]:
    return {"run": run_id, "environment": environment, "after": after, "unscored": unscored, "closed": _CLOSED}
