"""Tool calls and the environment's steps: written once, by whoever commits first.

Invariant: the records given together are stored in one implicit transaction (a pipeline up to its sync), and each
brings the state after it, so the newest state is a consequence of the rows. Equal states are stored once.
"""

import json
from dataclasses import asdict
from typing import Any, Final

from ..contracts.ids import EpisodeKey
from ..contracts.messages import ToolCall
from ..contracts.records import CallRecord
from .encoding import (
    StoredState,
    check_bounded,
    clean,
    clean_or_none,
    decode_messages,
    decode_state,
    encode,
    encode_state,
    plain_message,
)
from .late import ENDED, TAKEN, keep_late, params
from .store import Store
from .turns import PUT_BLOB, refuse_unknown

_INSERT: Final = """
INSERT INTO tool_calls (
  run_id, group_no, member, attempt, turn, call_index, call, content, error, replies, reward, done, truncated, info,
  exact, lossy, state, state_blob, seconds
)
SELECT
  run_id, group_no, member, attempt, %(turn)s, %(index)s, %(call)s::jsonb, %(content)s, %(error)s, %(replies)s::jsonb,
  %(reward)s, %(done)s, %(truncated)s, %(info)s::jsonb, %(exact)b, %(lossy)s, %(state)s::jsonb, %(digest)s, %(seconds)s
FROM episodes
WHERE run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s
  AND state = 'running'
FOR SHARE
ON CONFLICT DO NOTHING
"""

_COLUMNS: Final = """
SELECT c.turn, c.call_index, c.call::text, c.content, c.error, c.replies::text, c.reward, c.done, c.truncated,
  c.info::text, c.exact, c.seconds"""
_OF_EPISODE: Final = """
WHERE c.run_id = %(run)s AND c.group_no = %(group)s AND c.member = %(member)s AND c.attempt = %(attempt)s
"""
SELECT_CALLS: Final = _COLUMNS + " FROM tool_calls c" + _OF_EPISODE + "ORDER BY c.turn, c.call_index"
"""Rows for `call_of`, of all calls of an episode in order; without states."""
SELECT_CALLS_FROM: Final = (
    _COLUMNS + " FROM tool_calls c" + _OF_EPISODE + "AND c.turn >= %(first)s ORDER BY c.turn, c.call_index"
)
_SELECT_CALL: Final = (
    _COLUMNS
    + ", c.state::text, b.data FROM tool_calls c LEFT JOIN blobs b ON b.run_id = c.run_id AND b.digest = c.state_blob"
    + _OF_EPISODE
    + "AND c.turn = %(turn)s AND c.call_index = %(index)s"
)


async def save_calls(store: Store, key: EpisodeKey, calls: list[CallRecord]) -> list[CallRecord]:
    """Store what answered a turn unless the keys are taken; the records that are stored, in the order given.

    A different record for a taken key, or any for an episode that has ended, goes to `late_results`; in the latter case
    the given record comes back. Raises Unknown where there is no such episode, BadRecord for a reward or duration
    that is not finite or a state above 256 KiB; then nothing is stored.
    """
    given = [(record, params(key) | call_values(record)) for record in calls]
    if not given:
        return []
    async with store.direct() as connection:
        async with connection.pipeline():
            inserted = []
            for _, values in given:
                if values["data"] is not None:
                    await connection.execute(PUT_BLOB, values)
                inserted.append(await connection.execute(_INSERT, values))
        if all(cursor.rowcount for cursor in inserted):
            return calls
        stored = []
        for (record, values), cursor in zip(given, inserted, strict=True):
            if cursor.rowcount:
                stored.append(record)
                continue
            row = await (await connection.execute(_SELECT_CALL, values, binary=True)).fetchone()
            if row is None:
                await refuse_unknown(connection, key)
            kept = record if row is None else call_of(row[:-2], decode_state(row[-2], row[-1]))
            if row is None or kept != record:
                await keep_late(connection, "call", key, _plain(record), ENDED if row is None else TAKEN)
            stored.append(kept)
    return stored


def call_of(row: tuple[Any, ...], state: dict[str, Any] | None = None) -> CallRecord:
    """A call from a row of `SELECT_CALLS`, read in binary."""
    turn, index, call, content, error, replies, reward, done, truncated, info, exact, seconds = row
    if exact is None:
        plain = (call and json.loads(call), content, error, _loaded(replies), _loaded(info))
    else:
        plain = json.loads(exact)
    call, content, error, replies, info = plain
    return CallRecord(
        turn=turn,
        index=index,
        call=None if call is None else ToolCall.model_validate(call),
        content=content,
        error=error,
        state=state,
        replies=decode_messages(replies) if replies else (),
        reward=reward,
        done=done,
        truncated=truncated,
        info=info,
        seconds=seconds,
    )


def _loaded(text: str) -> Any:
    return json.loads(text) if len(text) > 2 else {"{}": {}, "[]": []}[text]


def call_values(record: CallRecord) -> dict[str, Any]:
    """The columns of a call, without the key of its episode."""
    check_bounded((record.reward, record.seconds), f"turn {record.turn}: a reward or duration")
    call = None if record.call is None else record.call.model_dump()
    replies = [plain_message(message) for message in record.replies]
    parts = (call, record.content, record.error, replies, record.info)
    shown = [encode(part) for part in (call, replies, record.info)]
    whole = encode(parts) if _is_lossy(record, shown) else None
    state = StoredState(None, None, None) if record.state is None else encode_state(record.state)
    return {
        "turn": record.turn,
        "index": record.index,
        "call": None if call is None else shown[0].display,
        "content": clean(record.content),
        "error": clean_or_none(record.error),
        "replies": shown[1].display,
        "reward": record.reward,
        "done": record.done,
        "truncated": record.truncated,
        "info": shown[2].display,
        "exact": None if whole is None else whole.exact,
        "lossy": whole is not None,
        "state": state.inline,
        "digest": state.digest,
        "data": state.data,
        "seconds": record.seconds,
    }


def _is_lossy(record: CallRecord, shown: list[Any]) -> bool:
    texts_differ = clean(record.content) != record.content or clean_or_none(record.error) != record.error
    return texts_differ or any(part.lossy for part in shown)


def _plain(record: CallRecord) -> dict[str, Any]:
    call = None if record.call is None else record.call.model_dump()
    return asdict(record) | {"call": call, "replies": [plain_message(message) for message in record.replies]}
