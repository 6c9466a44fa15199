"""An episode as activities write and read it: start, load, and what scorers see of it.

Invariant: everything the next activity needs is read in one round trip, a pipeline of three statements over rows that
are only ever added; an episode is started only in a group whose work is not over.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from ..contracts.activities import EpisodeResult
from ..contracts.episode import Episode, Score, ToolOutcome, Turn
from ..contracts.ids import EpisodeKey
from ..contracts.reasons import FailureKind, StopReason
from ..contracts.records import STEP_INDEX, CallRecord, EpisodeFacts, EpisodeStart
from ..contracts.states import EpisodeState, RunState
from .calls import SELECT_CALLS, SELECT_CALLS_FROM, call_of, save_calls
from .encoding import decode, decode_messages, decode_state, encode, encode_state, plain_message
from .endings import finish_episode
from .errors import Refused
from .late import params
from .scores import episode_scores, save_scores
from .store import Direct, Store
from .turns import PUT_BLOB, SELECT_TURNS, SELECT_TURNS_FROM, save_turn, turn_of, unknown_episode

__all__ = [
    "episode_result",
    "episode_scores",
    "episode_view",
    "finish_episode",
    "load_episode",
    "refresh_episode",
    "save_calls",
    "save_scores",
    "save_turn",
    "start_episode",
    "unknown_episode",
]

_START_GROUP: Final = """
UPDATE groups SET state = 'running', started_at = now()
WHERE run_id = %(run)s AND group_no = %(group)s AND state = 'admitted'
"""

_INSERT: Final = """
INSERT INTO episodes (
  run_id, group_no, member, attempt, environment_version, prompt, prompt_exact, lossy, start_state, start_state_blob
)
SELECT run_id, group_no, %(member)s, %(attempt)s, %(version)s, %(prompt)s::jsonb, %(exact)b, %(lossy)s,
  %(state)s::jsonb, %(digest)s
FROM groups
WHERE run_id = %(run)s AND group_no = %(group)s AND %(member)s < size AND closed_at IS NULL
FOR SHARE
ON CONFLICT DO NOTHING
"""

_LAST_STATE: Final = """
LEFT JOIN LATERAL (
  SELECT c.state, c.state_blob FROM tool_calls c
  WHERE c.run_id = e.run_id AND c.group_no = e.group_no AND c.member = e.member AND c.attempt = e.attempt
    AND num_nonnulls(c.state, c.state_blob) = 1
  ORDER BY c.turn DESC, c.call_index DESC LIMIT 1
) AS last ON true
LEFT JOIN blobs b
  ON b.run_id = e.run_id
  AND b.digest = CASE WHEN last.state IS NULL THEN coalesce(last.state_blob, e.start_state_blob) END
WHERE e.run_id = %(run)s AND e.group_no = %(group)s AND e.member = %(member)s AND e.attempt = %(attempt)s
"""

_SELECT: Final = (
    """
SELECT g.kind, g.environment, g.task_key, t.data::text, t.info::text, t.exact, g.evaluation, e.prompt::text,
  e.prompt_exact, coalesce(last.state, e.start_state)::text, b.data, e.environment_version,
  e.state, e.stop, e.failure, e.reward, r.state,
  (SELECT v.policy_version FROM evaluations v WHERE v.run_id = g.run_id AND v.name = g.evaluation)
FROM episodes e
JOIN runs r ON r.run_id = e.run_id
JOIN groups g ON g.run_id = e.run_id AND g.group_no = e.group_no
JOIN tasks t ON t.run_id = g.run_id AND t.environment = g.environment AND t.task_key = g.task_key
"""
    + _LAST_STATE
)


_NEWEST: Final = (
    """
SELECT e.state, e.stop, e.failure, e.reward, r.state, coalesce(last.state, e.start_state)::text, b.data
FROM episodes e
JOIN runs r ON r.run_id = e.run_id
"""
    + _LAST_STATE
)
"""What of an episode may have changed beside the turns and calls that were added."""


async def start_episode(store: Store, start: EpisodeStart) -> EpisodeFacts:
    """Write the episode's beginning unless it is there, and return what is stored. Its group becomes `running`.

    Raises Refused where the group does not exist, is closed or is smaller; BadRecord for a state above 256 KiB.
    """
    prompt = encode([plain_message(message) for message in start.prompt])
    state = encode_state(start.state)
    values = params(start.key) | {
        "version": start.environment_version,
        "prompt": prompt.display,
        "exact": prompt.exact,
        "lossy": prompt.lossy,
        "state": state.inline,
        "digest": state.digest,
        "data": state.data,
    }
    async with store.direct() as connection:
        async with connection.pipeline():
            await connection.execute(_START_GROUP, values)
            if state.data is not None:
                await connection.execute(PUT_BLOB, values)
            await connection.execute(_INSERT, values)
            facts = await _select(connection, start.key)
        found = await _facts(start.key, facts)
    if found is None:
        raise Refused(f"{start.key.workflow_id} cannot start: its group does not exist, is closed, or is smaller.")
    return found


async def load_episode(store: Store, key: EpisodeKey) -> EpisodeFacts | None:
    """The episode as far as it is stored, or None.

    `state` is the newest one; `calls` come without theirs (`state` None), since only the newest is ever needed.
    """
    async with store.direct() as connection:
        async with connection.pipeline():
            cursors = await _select(connection, key)
        return await _facts(key, cursors)


async def refresh_episode(store: Store, known: EpisodeFacts) -> EpisodeFacts | None:
    """What `load_episode` would return now, reading only what may have been added since `known` was read.

    Turns and calls are never changed once they are stored, so what is known of them stands.
    """
    first = max(0, len(known.turns) - 1)
    values = params(known.key) | {"turn": len(known.turns), "first": first}
    async with store.direct() as connection:
        async with connection.pipeline():
            queries = (_NEWEST, SELECT_TURNS_FROM, SELECT_CALLS_FROM)
            head, turns, calls = [await connection.execute(query, values, binary=True) for query in queries]
        row = await head.fetchone()
        if row is None:
            return None
        status, stop, failure, reward, run_state, state, blob = row
        return replace(
            known,
            status=EpisodeState(status),
            stop=None if stop is None else StopReason(stop),
            failure=None if failure is None else FailureKind(failure),
            reward=reward,
            run_state=RunState(run_state),
            state=decode_state(None if blob is not None else state, blob) or {},
            turns=(*known.turns, *(turn_of(turn) for turn in await turns.fetchall())),
            calls=(
                *(call for call in known.calls if call.turn < first),
                *(call_of(call) for call in await calls.fetchall()),
            ),
        )


def episode_result(facts: EpisodeFacts) -> EpisodeResult:
    """How an episode ended, from its facts. Raises ValueError while it runs."""
    if facts.stop is None:
        raise ValueError(f"{facts.key.workflow_id} has not ended")
    versions = [turn.policy_version for turn in facts.turns if turn.policy_version is not None]
    return EpisodeResult(
        key=facts.key,
        valid=facts.status is EpisodeState.DONE,
        stop=facts.stop,
        failure=facts.failure,
        reward=facts.reward,
        turns=len(facts.turns),
        sampled_tokens=sum(turn.tokens for turn in facts.turns),
        policy_version=min(versions, default=None),
    )


def episode_view(facts: EpisodeFacts, scores: Iterable[Score] = ()) -> Episode:
    """The episode as scorers, stop conditions and judges see it."""
    steps = {call.turn: call for call in facts.calls if call.index == STEP_INDEX}
    tools: dict[int, list[ToolOutcome]] = {}
    for call in facts.calls:
        if call.call is not None:
            tools.setdefault(call.turn, []).append(ToolOutcome(call=call.call, content=call.content, error=call.error))
    turns = []
    for record in facts.turns:
        step = steps.get(record.turn)
        turns.append(
            Turn(
                index=record.turn,
                message=record.message,
                outcomes=tuple(tools.get(record.turn, ())),
                replies=step.replies if step else (),
                reward=step.reward if step else None,
                info=step.info if step else {},
                finish=record.finish,
                sampled_tokens=record.tokens,
                policy_version=record.policy_version,
                agent=record.agent,
            )
        )
    return Episode(
        key=facts.key,
        prompt=facts.prompt,
        turns=tuple(turns),
        stop=facts.stop,
        scores=tuple(scores),
        reward=facts.reward,
    )


async def _select(connection: Direct, key: EpisodeKey) -> list[Any]:
    """Queue the three statements of an episode; call it inside a pipeline."""
    values = params(key)
    return [await connection.execute(query, values, binary=True) for query in (_SELECT, SELECT_TURNS, SELECT_CALLS)]


async def _facts(key: EpisodeKey, cursors: list[Any]) -> EpisodeFacts | None:
    head, turns, calls = cursors
    row = await head.fetchone()
    if row is None:
        return None
    (
        kind, environment, task_key, data, info, exact, evaluation, prompt, prompt_exact, state, blob,
        version, status, stop, failure, reward, run_state, pinned,
    ) = row  # fmt: skip
    task_data, task_info = (json.loads(data), json.loads(info)) if exact is None else json.loads(exact)
    records: tuple[CallRecord, ...] = tuple(call_of(call) for call in await calls.fetchall())
    return EpisodeFacts(
        key=key,
        kind=kind,
        environment=environment,
        task_key=task_key,
        task_data=task_data,
        task_info=task_info,
        evaluation=evaluation,
        prompt=decode_messages(decode(prompt, prompt_exact)),
        state=decode_state(None if blob is not None else state, blob) or {},
        environment_version=version,
        status=EpisodeState(status),
        turns=tuple(turn_of(turn) for turn in await turns.fetchall()),
        calls=records,
        stop=None if stop is None else StopReason(stop),
        failure=None if failure is None else FailureKind(failure),
        reward=reward,
        run_state=RunState(run_state),
        pinned=pinned,
    )
