"""How an episode ends: once.

Invariant: the last scores, the reward and what was counted (turns, tokens, oldest version) are written in one implicit
transaction behind the lock of the episode's row, so that no turn is missed. The first ending stands; a
different one goes to `late_results`. A failure never becomes a number: a failed episode carries no reward.
"""

from collections.abc import Sequence
from typing import Any, Final

from ..contracts.activities import EpisodeResult
from ..contracts.episode import Score
from ..contracts.ids import EpisodeKey
from ..contracts.messages import preview
from ..contracts.numbers import LARGEST_TOTAL
from ..contracts.reasons import FailureKind, StopReason
from ..contracts.records import BadRecord
from ..contracts.states import EpisodeState
from .encoding import check_bounded, clean_or_none
from .late import ENDED, keep_late, params
from .scores import INSERT as INSERT_SCORE
from .scores import LOCK, score_values
from .store import Store
from .turns import unknown_episode

VALID_FAILURES: Final = frozenset({FailureKind.POLICY, FailureKind.JUDGE})
"""With these an episode still counts: the policy's own fault is data, a judge's leaves it unscored."""

_OF_EPISODE: Final = "run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s"

_CLOSE: Final = f"""
UPDATE episodes SET state = %(state)s, stop = %(stop)s, failure = %(failure)s, reason = %(reason)s,
  reward = %(reward)s::float8, turns = spent.turns, sampled_tokens = spent.tokens, policy_version = spent.version,
  ended_at = now()
FROM (
  SELECT count(*) AS turns, coalesce(sum(coalesce(told_sampled, octet_length(sampled) / 4)), 0) AS tokens,
    min(policy_version) AS version
  FROM turns WHERE {_OF_EPISODE}
) AS spent
WHERE {_OF_EPISODE} AND state = 'running'
"""

_SWEEP: Final = f"DELETE FROM partial_turns WHERE {_OF_EPISODE}"
"""What a turn that never became whole left behind, or a write that raced with the whole turn."""

_NEVER_STARTED: Final = """
INSERT INTO episodes (run_id, group_no, member, attempt, environment_version, prompt, start_state,
  state, stop, failure, reason, ended_at)
SELECT g.run_id, g.group_no, %(member)s, %(attempt)s, e.version, '[]', '{}',
  'failed', %(stop)s, %(failure)s, %(reason)s, now()
FROM groups g JOIN environments e ON e.run_id = g.run_id AND e.label = g.environment
WHERE g.run_id = %(run)s AND g.group_no = %(group)s AND %(member)s < g.size
ON CONFLICT DO NOTHING
"""

_READ: Final = f"""
SELECT state, stop, failure, reason, reward, turns, sampled_tokens, policy_version FROM episodes WHERE {_OF_EPISODE}
"""


async def finish_episode(
    store: Store,
    key: EpisodeKey,
    *,
    stop: StopReason,
    failure: FailureKind | None,
    reason: str | None,
    reward: float | None,
    scores: Sequence[Score] = (),
    scorer_version: str | None = None,
) -> EpisodeResult:
    """End an episode with its last scores and its reward; the ending that is stored, which may be an earlier one.

    It fails for every failure kind but `policy` and `judge`; then `reward` is not kept. A failure of an episode that
    never started makes its row. `scorer_version` defaults to the episode's environment version.
    Raises Unknown where there is nothing to end, BadRecord for numbers that are not finite or `failed` without a kind.
    """
    check_bounded((reward,), "the reward", LARGEST_TOTAL)
    if stop is StopReason.FAILED and (failure is None or failure in VALID_FAILURES):
        raise BadRecord(
            f"an episode that stopped as `failed` needs a failure kind that makes it invalid, not {failure}"
        )
    failed = failure is not None and failure not in VALID_FAILURES
    ending = {
        "state": EpisodeState.FAILED if failed else EpisodeState.DONE,
        "stop": stop,
        "failure": failure,
        "reason": clean_or_none(reason),
        "reward": None if failed else reward,
    }
    last = [score_values(key, score, scorer_version, ("running",)) for score in scores]
    async with store.direct() as connection:
        async with connection.pipeline():
            await connection.execute(LOCK, params(key))
            for values in last:
                await connection.execute(INSERT_SCORE, values)
            closed = await connection.execute(_CLOSE, params(key) | ending)
            await connection.execute(_SWEEP, params(key))
            stored = await connection.execute(_READ, params(key), binary=True)
        row, wrote = await stored.fetchone(), bool(closed.rowcount)
        if row is None and failed:
            wrote = bool((await connection.execute(_NEVER_STARTED, params(key) | ending)).rowcount)
            row = await (await connection.execute(_READ, params(key), binary=True)).fetchone()
        if row is None:
            raise unknown_episode(key)
        if not wrote and row[:5] != tuple(ending.values()):
            await keep_late(connection, "ending", key, ending, ENDED)
    return result_of(key, row)


def result_of(key: EpisodeKey, row: Sequence[Any]) -> EpisodeResult:
    """The result of an ended episode from (state, stop, failure, reason, reward, turns, sampled_tokens, version)."""
    state, stop, failure, reason, reward, turns, tokens, version = row
    return EpisodeResult(
        key=key,
        valid=state == EpisodeState.DONE,
        stop=StopReason(stop),
        failure=None if failure is None else FailureKind(failure),
        reason=None if reason is None else preview(reason),
        reward=reward,
        turns=turns,
        sampled_tokens=tokens,
        policy_version=version,
    )
