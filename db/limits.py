"""How long a connection may wait and hold: for its turn, for a lock, for a statement, for whoever has it.

Invariant: nothing that talks to the store waits for ever or makes others wait for ever. What is limited fails with a
sentence and may be tried again; what takes as long as there are rows (an export, an audit, a dump) waits for no lock
that a run holds for long and holds none that a run needs. Options in the database's URL win over these, and these over
what Postgres has for the user; through a transaction-pooling PgBouncer (`prepare=False`) only the latter count.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Of every connection of a pool, in seconds."""

    wait: float
    """For a connection of the pool, where others have all of them."""
    lock: float
    """For a lock that another transaction has."""
    statement: float | None
    """For a statement, waiting included; None: as Postgres has it for the user."""
    idle: float
    """For the next statement of a transaction: whoever stops in the middle of one loses it and its locks."""

    @property
    def options(self) -> str:
        """For the connection's start."""
        given = {
            "lock_timeout": self.lock, "statement_timeout": self.statement,
            "idle_in_transaction_session_timeout": self.idle,
        }  # fmt: skip
        return " ".join(f"-c {name}={round(seconds * 1000)}" for name, seconds in given.items() if seconds is not None)


WORK: Final = TimeLimits(wait=30, lock=20, statement=60, idle=60)
"""Of workers, and trainers of one's own: statements of a moment, of which the longest reads a batch."""
PAGES: Final = TimeLimits(wait=15, lock=5, statement=60, idle=60)
"""Of the dashboard and of commands at which a person looks: nobody waits for a page that long."""
LONG: Final = TimeLimits(wait=60, lock=60, statement=None, idle=3600)
"""Of exports, audits, imports, dumps and the like. One that is stopped in its middle holds back vacuum for an hour."""

NO_HURRY: Final = "SET LOCAL statement_timeout = 0"
"""For statements that take as long as there are rows: whoever asked for one waits for it."""
