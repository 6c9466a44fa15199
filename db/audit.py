"""The ledger of a run, checked: does every row agree with every other?

Invariant: an audit only reads, in one snapshot, and trusts no constraint and no code that wrote the rows: each check is
a query for what contradicts it. Of a run without trainer only what its groups and episodes say can be checked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .audit_check import Check
from .audit_episodes import EPISODE_CHECKS
from .audit_training import TRAINING_CHECKS
from .store import Store

CHECKS: Final[tuple[Check, ...]] = (*TRAINING_CHECKS, *EPISODE_CHECKS)

_TABLES: Final = {
    "groups": "groups",
    "episodes": "episodes",
    "batches": "batches",
    "steps": "train_steps",
    "turns": "turns",
    "calls": "tool_calls",
    "scores": "scores",
}
_CHECKED: Final = "SELECT {}, ({})".format(
    ", ".join(f"(SELECT count(*) FROM {table} WHERE run_id = %(run)s)" for table in _TABLES.values()),
    "SELECT coalesce(sum(jsonb_array_length(spans)), 0)::bigint FROM turns WHERE run_id = %(run)s AND NOT provisional",
)

_PLAN: Final = "SET LOCAL enable_nestloop = off"
"""Statistics of a young run call its tables empty; loops in loops over what they hold by now would be quadratic."""


@dataclass(frozen=True)
class Violation:
    """A row that contradicts another. `check`: the name of a check; `row`: which, as `group 3` or `turn 3/0/0/1`."""

    check: str
    row: str


@dataclass(frozen=True)
class Audit:
    """What an audit found. `checked`: how many of which kind it looked at; `unknown`: workflows nobody can say
    anything of, since Temporal has not begun them or keeps them no longer."""

    violations: tuple[Violation, ...]
    checked: Mapping[str, int]
    unknown: int = 0


async def audit_run(store: Store, run_id: str) -> Audit:
    """Check the rows of a run, also while it runs."""
    values: dict[str, Any] = {"run": run_id}
    violations: list[Violation] = []
    async with store.direct() as connection, connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.execute(_PLAN)
        for check in CHECKS:
            found = await (await connection.execute(check.query.encode(), values)).fetchall()
            violations += [Violation(check.name, row) for row in dict.fromkeys(row[0] for row in found)]
        counts = await (await connection.execute(_CHECKED.encode(), values)).fetchone()
    return Audit(tuple(violations), dict(zip((*_TABLES, "spans"), counts or (), strict=True)))
