"""Long model calls while they grow: what was sampled so far, so that a retry continues instead of beginning again.

Invariant: a row is a whole prefix of one prompt's completion, never a mixture: it is replaced as a whole, by a longer
prefix of the same prompt or by one of another prompt. None is written for a turn that is stored or an episode that
has ended; one that slips past a racing writer is never read and goes with the episode's end.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

from ..contracts.ids import EpisodeKey
from ..contracts.records import PartialTurn, Sampled
from .encoding import clean, pack_floats, pack_ids, unpack_floats, unpack_ids
from .late import params
from .store import Store
from .turns import dump_spans, load_spans

_UPSERT: Final = """
INSERT INTO partial_turns AS old (
  run_id, group_no, member, attempt, turn, prompt_digest, sampled, logprobs, spans, engine_id, incarnation
)
SELECT run_id, group_no, member, attempt, %(turn)s, %(digest)s, %(sampled)b, %(logprobs)b, %(spans)s::jsonb,
  %(engine)s, %(incarnation)s
FROM episodes e
WHERE run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s
  AND state = 'running'
  AND NOT EXISTS (
    SELECT FROM turns t
    WHERE (t.run_id, t.group_no, t.member, t.attempt, t.turn)
      = (e.run_id, e.group_no, e.member, e.attempt, %(turn)s)
  )
FOR SHARE
ON CONFLICT (run_id, group_no, member, attempt, turn) DO UPDATE SET
  prompt_digest = excluded.prompt_digest, sampled = excluded.sampled, logprobs = excluded.logprobs,
  spans = excluded.spans, engine_id = excluded.engine_id, incarnation = excluded.incarnation, updated_at = now()
WHERE old.prompt_digest <> excluded.prompt_digest OR octet_length(old.sampled) < octet_length(excluded.sampled)
"""

_SELECT: Final = """
SELECT prompt_digest, sampled, logprobs, spans::text, engine_id, incarnation FROM partial_turns
WHERE run_id = %(run)s AND group_no = %(group)s AND member = %(member)s AND attempt = %(attempt)s AND turn = %(turn)s
"""


def prompt_digest(ids: Sequence[int]) -> str:
    """Names a prompt by its ids, in hexadecimal."""
    return hashlib.sha256(pack_ids(ids)).hexdigest()


async def save_partial(store: Store, key: EpisodeKey, turn: int, partial: PartialTurn) -> bool:
    """Keep what was sampled so far of a turn; whether anything was written.

    Raises StoreUnreachable, Refused for what the schema forbids, BadRecord for ids that are none.
    """
    so_far = partial.so_far
    values = params(key) | {
        "turn": turn,
        "digest": partial.prompt_digest,
        "sampled": pack_ids(so_far.sampled),
        "logprobs": pack_floats(so_far.logprobs),
        "spans": dump_spans(so_far.spans),
        "engine": clean(so_far.engine_id),
        "incarnation": clean(so_far.incarnation),
    }
    async with store.direct() as connection:
        return bool((await connection.execute(_UPSERT, values)).rowcount)


async def load_partial(store: Store, key: EpisodeKey, turn: int) -> PartialTurn | None:
    """What was sampled so far of a turn that is not stored; None where nothing was kept."""
    async with store.direct() as connection:
        row = await (await connection.execute(_SELECT, params(key) | {"turn": turn}, binary=True)).fetchone()
    if row is None:
        return None
    digest, sampled, logprobs, spans, engine, incarnation = row
    so_far = Sampled(unpack_ids(sampled), unpack_floats(logprobs), load_spans(spans), engine, incarnation)
    return PartialTurn(digest, so_far)
