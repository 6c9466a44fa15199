"""What lost the race for its key: kept in `late_results` for the record, never used."""

from typing import Any, Final

from ..contracts.ids import EpisodeKey
from .encoding import encode
from .store import Direct

TAKEN: Final = "another result was stored first"
ENDED: Final = "the episode had ended"

_INSERT: Final = """
INSERT INTO late_results (run_id, kind, group_no, member, attempt, record, reason)
VALUES (%(run)s, %(kind)s, %(group)s, %(member)s, %(attempt)s, %(record)s::jsonb, %(reason)s)
"""


def params(key: EpisodeKey) -> dict[str, Any]:
    """The parameters by which every statement over an episode names it."""
    return {"run": key.run_id, "group": key.group_no, "member": key.member, "attempt": key.attempt}


async def keep_late(connection: Direct, kind: str, key: EpisodeKey, record: dict[str, Any], reason: str) -> None:
    """Write down a result that was not stored. `kind`: turn, call, score or ending; `record`: plain data."""
    values = params(key) | {"kind": kind, "record": encode(record).display, "reason": reason}
    await connection.execute(_INSERT, values)
