"""Scores: parts of the reward and metrics, written once for each scorer's version.

Invariant: of several versions of a scorer the first that gave a value counts for the episode's reward; later ones stand
beside it. Scores
that arrive between an episode's end and the end of its group (rewards of a whole group, a judge that came back)
bring the reward up to date in the same transaction.
"""

from typing import Any, Final

from ..contracts.episode import Score
from ..contracts.ids import EpisodeKey
from .encoding import check_bounded, clean
from .late import ENDED, TAKEN, keep_late, params
from .store import Direct, Store
from .turns import refuse_unknown

_OF_EPISODE: Final = "run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s"

_LOCK_GROUP: Final = "SELECT FROM groups WHERE run_id = %(run)s AND group_no = %(group)s FOR SHARE"
LOCK: Final = f"SELECT state FROM episodes WHERE {_OF_EPISODE} FOR NO KEY UPDATE"

INSERT: Final = f"""
INSERT INTO scores (run_id, group_no, member, attempt, name, scorer_version, value, weight, metric)
SELECT run_id, group_no, member, attempt, %(name)s, coalesce(%(scorer)s, environment_version),
  %(value)s, %(weight)s, %(metric)s
FROM episodes WHERE {_OF_EPISODE} AND state = ANY (%(states)s)
ON CONFLICT DO NOTHING
"""

FIRST: Final = f"""
SELECT DISTINCT ON (name) name, value, weight, metric, seq, scorer_version FROM scores WHERE {_OF_EPISODE}
ORDER BY name, value IS NULL, seq
"""
_SELECT: Final = f"SELECT name, value, weight, metric FROM ({FIRST}) AS first ORDER BY seq"
_SELECT_BESIDE: Final = f"""
SELECT scorer_version, name, value, weight, metric FROM scores
WHERE {_OF_EPISODE} AND (name, scorer_version) NOT IN (SELECT name, scorer_version FROM ({FIRST}) AS first) ORDER BY seq
"""
_SELECT_ONE: Final = f"""
SELECT name, value, weight, metric FROM scores
WHERE {_OF_EPISODE} AND name = %(name)s AND scorer_version = %(scorer)s
"""

_UPDATE_REWARD: Final = f"""
UPDATE episodes SET reward = parts.total
FROM (
  SELECT CASE WHEN bool_or(value IS NULL) THEN NULL ELSE sum(weight * value ORDER BY seq) END AS total,
    count(*) AS parts
  FROM ({FIRST}) AS first WHERE NOT metric
) AS parts, groups
WHERE episodes.run_id = %(run)s AND episodes.group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s
  AND episodes.state = 'done' AND parts.parts > 0 AND episodes.reward IS DISTINCT FROM parts.total
  AND groups.run_id = episodes.run_id AND groups.group_no = episodes.group_no AND groups.closed_at IS NULL
"""


async def save_scores(store: Store, key: EpisodeKey, scores: list[Score], scorer_version: str) -> list[Score]:
    """Store scores unless (name, version) is taken; the scores that are stored, in the order given.

    A different value for a taken key, or any for a failed episode, goes to `late_results`.
    Raises Unknown where there is no such episode, BadRecord for a value or weight that is not finite.
    """
    given = [(score, score_values(key, score, scorer_version, ("running", "done"))) for score in scores]
    if not given:
        return []
    async with store.direct() as connection:
        async with connection.pipeline():
            await connection.execute(_LOCK_GROUP, params(key))
            await connection.execute(LOCK, params(key))
            inserted = [await connection.execute(INSERT, values) for _, values in given]
            await connection.execute(_UPDATE_REWARD, params(key))
        stored = []
        for (score, values), cursor in zip(given, inserted, strict=True):
            stored.append(score if cursor.rowcount else await _loser(connection, key, score, values))
    return stored


async def episode_scores(store: Store, key: EpisodeKey) -> list[Score]:
    """The scores of an episode, the first version of each, in the order they were written."""
    async with store.direct() as connection:
        rows = await (await connection.execute(_SELECT, params(key), binary=True)).fetchall()
    return [_score_of(row) for row in rows]


async def scores_beside(store: Store, key: EpisodeKey) -> list[tuple[str, Score]]:
    """Scores of versions that do not count: (version, score) in the order they were written."""
    async with store.direct() as connection:
        rows = await (await connection.execute(_SELECT_BESIDE, params(key))).fetchall()
    return [(version, _score_of(tuple(row))) for version, *row in rows]


def score_values(key: EpisodeKey, score: Score, version: str | None, states: tuple[str, ...]) -> dict[str, Any]:
    """Parameters of `INSERT`; a version of None is the episode's environment version."""
    check_bounded((score.value, score.weight), f"score {score.name!r}: a value or weight")
    return params(key) | {
        "name": clean(score.name),
        "scorer": version,
        "value": score.value,
        "weight": score.weight,
        "metric": score.metric,
        "states": list(states),
    }


async def _loser(connection: Direct, key: EpisodeKey, score: Score, values: dict[str, Any]) -> Score:
    row = await (await connection.execute(_SELECT_ONE, values, binary=True)).fetchone()
    if row is None:
        await refuse_unknown(connection, key)
        await keep_late(connection, "score", key, score.model_dump(), ENDED)
        return score
    stored = _score_of(row)
    if stored != score:
        await keep_late(connection, "score", key, score.model_dump(), TAKEN)
    return stored


def _score_of(row: tuple[Any, ...]) -> Score:
    name, value, weight, metric = row
    return Score(name=name, value=value, weight=weight, metric=metric)
