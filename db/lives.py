"""What of a run is open as its rows say: the store's half of a comparison with whoever runs it.

Invariant: one snapshot, read without locks; nothing is derived that a row does not say.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ..contracts.states import OPEN_GROUPS, EpisodeState, EvaluationState, RunState, is_live
from ..contracts.training import TrainerKind
from .runs import unknown_run
from .store import Store

_RUN: Final = "SELECT state, config->'trainer'->>'kind' FROM runs WHERE run_id = %(run)s"
_CHOSEN: Final = "run_id = %(run)s AND (%(all)s OR group_no = ANY(%(groups)s::int[]))"
_GROUPS: Final = f"SELECT group_no, state FROM groups WHERE {_CHOSEN} ORDER BY group_no"
_EPISODES: Final = f"""
SELECT group_no, member, attempt, state FROM episodes WHERE {_CHOSEN} ORDER BY group_no, member, attempt
"""
_EVALUATIONS: Final = "SELECT name, state FROM evaluations WHERE run_id = %(run)s ORDER BY created_at, name"


@dataclass(frozen=True)
class Lives:
    """Whether each part of a run is open: work is to be done on it. Episodes by (group, member, attempt)."""

    run: bool
    trains: bool
    """Whether it has a trainer."""
    evaluations: Mapping[str, bool]
    groups: Mapping[int, bool]
    episodes: Mapping[tuple[int, int, int], bool]


async def lives_of(store: Store, run_id: str, groups: Collection[int] | None = None) -> Lives:
    """What of a run is open; of its groups and their episodes only these, where some are named. Raises Unknown."""
    values = {"run": run_id, "all": groups is None, "groups": list(groups or ())}
    async with store.direct() as connection, connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = await (await connection.execute(_RUN, values)).fetchone()
        if row is None:
            raise unknown_run(run_id)
        evaluations = await (await connection.execute(_EVALUATIONS, values)).fetchall()
        found = await (await connection.execute(_GROUPS, values)).fetchall()
        episodes = await (await connection.execute(_EPISODES, values)).fetchall()
    state, trainer = row
    return Lives(
        run=is_live(RunState(state)),
        trains=trainer not in (None, TrainerKind.NONE),
        evaluations={name: state == EvaluationState.RUNNING for name, state in evaluations},
        groups={group: state in OPEN_GROUPS for group, state in found},
        episodes={
            (group, member, attempt): state == EpisodeState.RUNNING for group, member, attempt, state in episodes
        },
    )
