"""Model calls: written once, by whoever commits first.

Invariant: one statement writes the turn and the segment it opens, holding a share lock on a running episode, so no turn
is added to an episode that has ended and no segment exists without its first turn. In the normal case that is one
round trip. A turn that opens a later segment leaves its prompt in the segment's row: rendered again, stored once.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, Final

from ..contracts.ids import EpisodeKey
from ..contracts.reasons import FinishReason
from ..contracts.records import TurnRecord, VersionSpan
from .encoding import (
    clean,
    clean_or_none,
    decode_message,
    encode_message,
    pack_floats,
    pack_ids,
    pack_mask,
    plain_message,
    unpack_floats,
    unpack_ids,
)
from .errors import Unknown, WrongWeights
from .late import ENDED, TAKEN, keep_late, params
from .store import Direct, Store

_STORE: Final = """
WITH episode AS (
  SELECT FROM episodes
  WHERE run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s
    AND state = 'running'
  FOR SHARE
), unsettled AS (
  SELECT state FROM publications
  WHERE run_id = %(run)s AND state IN ('loading', 'failed') AND (engine_id, incarnation, version)
    IN (SELECT * FROM unnest(%(engines)s::text[], %(lives)s::text[], %(versions)s::int[]))
  FOR SHARE
), kept AS (
  INSERT INTO turns (
    run_id, group_no, member, attempt, turn, segment, opens_segment, agent, message, message_exact, lossy,
    prompt_delta, sampled, logprobs, mask, finish, spans, policy_version, temperature,
    engine_id, incarnation, request_id, provisional, told_prompt, told_sampled, answer_blob
  )
  SELECT
    %(run)s, %(group)s, %(member)s, %(attempt)s, %(turn)s, %(segment)s, %(opens)s, %(agent)s,
    %(message)s::jsonb, %(exact)b, %(lossy)s, %(delta)b, %(sampled)b, %(logprobs)b, %(mask)b, %(finish)s,
    %(spans)s::jsonb, %(version)s, %(temperature)s, %(engine)s, %(incarnation)s, %(request)s,
    %(provisional)s OR EXISTS (SELECT FROM unsettled), %(told_prompt)s, %(told_sampled)s, %(digest)s
  FROM episode
  WHERE NOT EXISTS (SELECT FROM unsettled WHERE state = 'failed')
  ON CONFLICT DO NOTHING
  RETURNING segment
), opened AS (
  INSERT INTO segments (run_id, group_no, member, attempt, segment, first_turn, agent, prompt)
  SELECT %(run)s, %(group)s, %(member)s, %(attempt)s, segment, %(turn)s, %(agent)s, %(prompt)b
  FROM kept WHERE %(opens)s
)"""
_INSERT: Final = _STORE + " SELECT FROM kept"
_INSERT_LONG: Final = (
    _STORE
    + """, grown AS (
  DELETE FROM partial_turns
  WHERE run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s
    AND turn = %(turn)s AND EXISTS (SELECT FROM kept)
)
SELECT FROM kept
"""
)
"""The same, and what was kept of the turn while it grew goes; a statement of its own, so that most turns do not pay."""

_FAILED: Final = """
SELECT engine_id, reason FROM publications
WHERE run_id = %(run)s AND state = 'failed' AND (engine_id, incarnation, version)
  IN (SELECT * FROM unnest(%(engines)s::text[], %(lives)s::text[], %(versions)s::int[]))
"""
_FORGET: Final = """
DELETE FROM partial_turns
WHERE run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s AND turn = %(turn)s
"""

_COLUMNS: Final = """
SELECT t.turn, t.segment, t.opens_segment, t.message::text, t.message_exact, coalesce(s.prompt, t.prompt_delta),
  t.sampled, t.logprobs, t.mask, t.finish, t.spans::text, t.temperature, t.engine_id, t.incarnation, t.request_id,
  t.agent, t.provisional, t.told_prompt, t.told_sampled
FROM turns t
LEFT JOIN segments s
  ON t.opens_segment AND t.segment > 0
  AND (s.run_id, s.group_no, s.member, s.attempt, s.segment)
    = (t.run_id, t.group_no, t.member, t.attempt, t.segment)
WHERE t.run_id = %(run)s AND t.group_no = %(group)s AND t.member = %(member)s AND t.attempt = %(attempt)s
"""
SELECT_TURNS: Final = _COLUMNS + "ORDER BY t.turn"
"""Rows for `turn_of`, of all turns of an episode in order."""
SELECT_TURNS_FROM: Final = _COLUMNS + "AND t.turn >= %(turn)s ORDER BY t.turn"
_SELECT_TURN: Final = _COLUMNS + "AND t.turn = %(turn)s"


PUT_BLOB: Final = """
INSERT INTO blobs (run_id, digest, data) VALUES (%(run)s, %(digest)s, %(data)b) ON CONFLICT DO NOTHING
"""
_ANSWERS: Final = """
SELECT t.turn, b.data FROM turns t JOIN blobs b ON b.run_id = t.run_id AND b.digest = t.answer_blob
WHERE t.run_id = %(run)s AND t.group_no = %(group)s AND t.member = %(member)s AND t.attempt = %(attempt)s
"""


async def save_turn(
    store: Store, key: EpisodeKey, record: TurnRecord, *, had_partial: bool = False, answer: bytes | None = None
) -> tuple[TurnRecord, bool]:
    """Store a model call unless its key is taken; the record that is stored, and whether it is this one.

    `had_partial`: parts of it were stored as it grew; they are removed in the same statement. `answer`: the bytes that
    an engine without tokens answered with.
    Saving the same record again is a no-op that says True. A different one for a taken key, or one for an episode that
    has ended, goes to `late_results`; in the latter case the given record comes back, with False.
    A turn of weights that its engine has not proved to hold yet is stored as provisional.
    Raises WrongWeights where the engine failed to prove it; Unknown where there is no such episode, Refused or
    BadRecord for what the schema forbids.
    """
    digest = None if answer is None else hashlib.sha256(answer).hexdigest()
    values = params(key) | turn_values(record) | {"digest": digest, "data": answer}
    async with store.direct() as connection:
        if answer is not None:
            await connection.execute(PUT_BLOB, values)
        if (await connection.execute(_INSERT_LONG if had_partial else _INSERT, values)).rowcount:
            return record, True
        row = await (await connection.execute(_SELECT_TURN, values, binary=True)).fetchone()
        if row is None:
            await _refuse_wrong_weights(connection, values)
            await refuse_unknown(connection, key)
            await keep_late(connection, "turn", key, _plain(record), ENDED)
            return record, False
        stored = turn_of(row)
        kept = replace(record, logprobs=unpack_floats(pack_floats(record.logprobs)), provisional=stored.provisional)
        same = stored == kept
        if not same:
            await keep_late(connection, "turn", key, _plain(record), TAKEN)
    return stored, same


async def load_answers(store: Store, key: EpisodeKey) -> dict[int, bytes]:
    """Turn → what an engine without tokens answered, byte for byte."""
    async with store.direct() as connection:
        cursor = await connection.execute(_ANSWERS, params(key), binary=True)
        return dict(await cursor.fetchall())


def turn_of(row: tuple[Any, ...]) -> TurnRecord:
    """A turn from a row of `SELECT_TURNS`, read in binary."""
    (
        turn, segment, opens, message, exact, delta, sampled, logprobs, mask, finish,
        spans, temperature, engine, incarnation, request, agent, provisional, told_prompt, told_sampled,
    ) = row  # fmt: skip
    return TurnRecord(
        turn=turn,
        segment=segment,
        opens_segment=opens,
        message=decode_message(message, exact),
        prompt_delta=unpack_ids(delta),
        sampled=unpack_ids(sampled),
        logprobs=unpack_floats(logprobs),
        mask=list(mask),
        finish=FinishReason(finish),
        spans=load_spans(spans),
        temperature=temperature,
        engine_id=engine,
        incarnation=incarnation,
        request_id=request,
        agent=agent,
        provisional=provisional,
        told_prompt=told_prompt,
        told_sampled=told_sampled,
    )


def turn_values(record: TurnRecord) -> dict[str, Any]:
    """The columns of a turn, without the key of its episode."""
    message = encode_message(record.message)
    delta = pack_ids(record.prompt_delta)
    forked = record.opens_segment and record.segment > 0
    return {
        "turn": record.turn,
        "segment": record.segment,
        "opens": record.opens_segment,
        "agent": clean_or_none(record.agent),
        "message": message.display,
        "exact": message.exact,
        "lossy": message.lossy,
        "delta": b"" if forked else delta,
        "prompt": delta if forked else None,
        "sampled": pack_ids(record.sampled),
        "logprobs": pack_floats(record.logprobs),
        "mask": pack_mask(record.mask),
        "finish": record.finish,
        "spans": dump_spans(record.spans),
        "version": record.policy_version,
        **_sampled_by(record),
        "temperature": record.temperature,
        "engine": clean(record.engine_id),
        "incarnation": clean(record.incarnation),
        "request": clean(record.request_id),
        "provisional": record.provisional,
        "told_prompt": record.told_prompt,
        "told_sampled": record.told_sampled,
    }


def _sampled_by(record: TurnRecord) -> dict[str, Any]:
    """Which versions sampled it, each on which life of which engine: three lists."""
    lives = sorted(
        {
            (span.engine_id or record.engine_id, span.incarnation or record.incarnation, span.version)
            for span in record.spans
        }
    )
    return {
        "engines": [clean(engine) for engine, _, _ in lives],
        "lives": [clean(life) for _, life, _ in lives],
        "versions": [version for _, _, version in lives],
    }


def dump_spans(spans: Iterable[VersionSpan]) -> str:
    """JSON: `[label, version, start, end]` and, where known, engine and incarnation."""
    return json.dumps([[*_span(span), *_life(span)] for span in spans])


def _span(span: VersionSpan) -> list[str | int]:
    return [clean(span.label), span.version, span.start, span.end]


def _life(span: VersionSpan) -> list[str | None]:
    if span.engine_id is None and span.incarnation is None:
        return []
    return [clean_or_none(span.engine_id), clean_or_none(span.incarnation)]


def load_spans(text: str) -> tuple[VersionSpan, ...]:
    """The other way; rows of older builds have four elements a span."""
    return tuple(VersionSpan(*span) for span in json.loads(text))


def _plain(record: TurnRecord) -> dict[str, Any]:
    return asdict(record) | {"message": plain_message(record.message)}


async def _refuse_wrong_weights(connection: Direct, values: dict[str, Any]) -> None:
    """Raise WrongWeights where they were wrong. What was kept of the turn goes: a retry must not begin there again."""
    found = await connection.execute(_FAILED, values)
    row = await found.fetchone()
    if row is not None:
        await connection.execute(_FORGET, values)
        raise WrongWeights(f"the engine {row[0]} sampled with weights it does not hold: {row[1]}")


async def refuse_unknown(connection: Direct, key: EpisodeKey) -> None:
    """Raise Unknown where the episode has no row."""
    found = await connection.execute(
        "SELECT FROM episodes"
        " WHERE run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s",
        params(key),
    )
    if not found.rowcount:
        raise unknown_episode(key)


def unknown_episode(key: EpisodeKey) -> Unknown:
    return Unknown(f"There is no episode {key.workflow_id} in the store.")
