"""What a check of the ledger is.

Invariant: a check is one query for what contradicts it, over the rows of one run (`%(run)s`), and trusts no constraint
and no code that wrote them. What it finds is named as people name it: `group 3`, `episode 3/0/0`, `turn 3/0/0/1`.
"""

from dataclasses import dataclass
from typing import Final

TURN_NAME: Final = "'turn ' || concat_ws('/', t.group_no, t.member, t.attempt, t.turn)"
TURN_ORDER: Final = "ORDER BY t.group_no, t.member, t.attempt, t.turn"
EPISODE_NAME: Final = "'episode ' || concat_ws('/', e.group_no, e.member, e.attempt)"
EPISODE_ORDER: Final = "ORDER BY e.group_no, e.member, e.attempt"


@dataclass(frozen=True)
class Check:
    """`proves`: what is true where it finds nothing; `looks_at`: rows of which kind, a name of `Audit.checked`."""

    name: str
    proves: str
    looks_at: str
    query: str
