"""What a trainer is given: the groups of a batch as token-contiguous segments.

Invariant: nothing is retokenised and nothing invented. A segment is the concatenation of what its turns added and
sampled; only sampled tokens carry a logprob, a temperature and a mask. Of each member the newest attempt counts, and
only where it is valid.
"""

from itertools import groupby
from typing import Any, Final

from ..contracts.training import SampleEpisode, SampleGroup, SampleSegment
from .encoding import unpack_floats, unpack_ids
from .store import Store

_MEMBERS: Final = """
SELECT e.group_no, g.environment, e.member, e.attempt,
  CASE %(scores)s WHEN 'first' THEN e.reward
    ELSE coalesce(episode_reward(b.run_id, e.group_no, e.member, e.attempt, %(scores)s), e.reward) END
FROM batch_groups b
JOIN groups g ON g.run_id = b.run_id AND g.group_no = b.group_no
JOIN LATERAL (
  SELECT DISTINCT ON (e.member) e.group_no, e.member, e.attempt, e.reward, e.state FROM episodes e
  WHERE e.run_id = b.run_id AND e.group_no = b.group_no ORDER BY e.member, e.attempt DESC
) AS e ON true
WHERE b.run_id = %(run)s AND b.batch_no = %(batch)s AND e.state = 'done'
ORDER BY e.group_no, e.member
"""

_TURNS: Final = """
SELECT t.group_no, t.member, t.attempt, t.segment, coalesce(s.prompt, t.prompt_delta), t.sampled, t.logprobs, t.mask,
  t.temperature
FROM batch_groups b
JOIN turns t ON t.run_id = b.run_id AND t.group_no = b.group_no
LEFT JOIN segments s ON t.opens_segment AND t.segment > 0
  AND (s.run_id, s.group_no, s.member, s.attempt, s.segment)
    = (t.run_id, t.group_no, t.member, t.attempt, t.segment)
WHERE b.run_id = %(run)s AND b.batch_no = %(batch)s
ORDER BY t.group_no, t.member, t.attempt, t.turn
"""


async def read_batch(store: Store, run_id: str, batch_no: int, scores: str = "first") -> list[SampleGroup]:
    """The groups of a batch in order of their numbers, members in order of theirs.

    `scores`: the version of the scorers whose rewards count, or `first` or `latest`; the same at every try, since no
    score of a leased group changes (`db.rescoring`).
    """
    values = {"run": run_id, "batch": batch_no, "scores": scores}
    async with store.direct() as connection:
        members = await (await connection.execute(_MEMBERS, values)).fetchall()
        turns = await (await connection.execute(_TURNS, values, binary=True)).fetchall()
    segments = {
        key: tuple(_segment(list(rows)) for _, rows in groupby(said, key=lambda row: row[3]))
        for key, said in groupby(turns, key=lambda row: (row[0], row[1], row[2]))
    }
    groups = []
    for (group_no, environment), rows in groupby(members, key=lambda row: (row[0], row[1])):
        episodes = tuple(
            SampleEpisode(member, reward, segments.get((group_no, member, attempt), ()))
            for _, _, member, attempt, reward in rows
        )
        groups.append(SampleGroup(group_no, environment, episodes))
    return groups


def _segment(turns: list[tuple[Any, ...]]) -> SampleSegment:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    temperatures: list[float] = []
    for _, _, _, _, delta, sampled, drawn, trains, temperature in turns:
        added, said = unpack_ids(delta), unpack_ids(sampled)
        ids += added + said
        mask += [0] * len(added) + list(trains)
        logprobs += [0.0] * len(added) + unpack_floats(drawn)
        temperatures += [1.0] * len(added) + [temperature] * len(said)
    return SampleSegment(ids, mask, logprobs, temperatures)
