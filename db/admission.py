"""Admission: which groups a run starts next, decided and written in one transaction.

Invariant: the number of the next group and the position of each draw move under the lock of the run's row, in the
transaction that inserts the groups, so capacity is never exceeded and no draw is lost, skipped or made twice. A draw
that hits a task of another split, or one in quarantine, is consumed and leads to no group.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import case, func, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from ..contracts.ids import GroupKey
from ..contracts.limits import Limits
from ..contracts.records import NewGroup
from ..contracts.runfile import RunConfig
from ..contracts.states import OPEN_GROUPS, GroupState, RunState
from .encoding import encode
from .errors import Refused, Unknown
from .groups import GroupRow, group_of
from .models import EnvironmentRow, EpisodeRow, Evaluation, Group, PolicyVersion, Run, TaskRow, TrainStep
from .runs import unknown_run
from .store import Store

QUARANTINED = "quarantined"
_BUSY = """
SELECT coalesce(sum(1 - done.n::numeric / g.size), 0) - 0.000001 AS worth
FROM groups g
JOIN LATERAL (
  SELECT count(*) AS n FROM episodes e WHERE e.run_id = g.run_id AND e.group_no = g.group_no AND e.state = 'done'
) AS done ON true
WHERE g.run_id = %(run)s AND g.state IN ('admitted', 'running')
"""
"""An episode that failed may be played again, so only what is done has left. Thirds do not add up to a whole."""
_LEFT = f"""
SELECT ceil(busy.worth) < ceil(busy.worth + 1.0 / g.size) FROM ({_BUSY}) AS busy
JOIN groups g ON g.run_id = %(run)s AND g.group_no = %(group)s AND g.kind = 'train'
"""
_WORTH = text(f"SELECT ceil(worth) FROM ({_BUSY.replace('%(run)s', ':run')}) AS busy")
COUNTED = OPEN_GROUPS | {GroupState.SEALED, GroupState.LEASED, GroupState.TRAINED, GroupState.FILTERED}
"""Training groups that count against the budget of a run; failed and stale ones are replaced."""


@dataclass(frozen=True)
class EnvironmentLoad:
    """An environment of the mixture: what it is and what it has in flight. Counts are groups."""

    label: str
    ref: str
    version: str
    args: dict[str, object]
    limits: Limits
    group_size: int
    weight: float
    next_draw: int
    """Position of the seeded order to draw next."""
    open: int
    """Training groups whose workflow still has work to do."""
    counted: int
    """Training groups that count against the budget, the open ones included."""
    states: dict[GroupState, int]
    """Training groups by state."""


@dataclass(frozen=True)
class AdmissionState:
    """What a run has in flight and has spent, read under the lock of its row."""

    run_id: str
    state: RunState
    config: RunConfig
    seed: int
    concurrency: int
    """Groups in flight at once."""
    environments: tuple[EnvironmentLoad, ...]
    open: int
    """All open groups, those of evaluations included."""
    busy: int
    """What they still play, in groups and rounded up: of a group with three of eight episodes done, five eighths."""
    counted: int
    sampled_tokens: int
    """Tokens sampled by episodes that have ended, evaluations included."""
    committed: int
    """Train steps that were committed."""
    published: int
    """The newest version that was published; -1: none yet."""
    unpublished: int
    """Groups of steps whose version was not published yet."""
    started_at: datetime
    now: datetime
    """The database's clock."""
    _connection: AsyncConnection = field(repr=False, compare=False)

    async def known(self, environment: str, task_keys: Sequence[str]) -> dict[str, str]:
        """Which of these tasks are stored: key → its split, or `quarantined`."""
        return await _known(self._connection, self.run_id, environment, task_keys)


Propose = Callable[[AdmissionState], Awaitable[list[NewGroup]]]


async def admit(store: Store, run_id: str, propose: Propose) -> list[GroupRow]:
    """Ask `propose` what to admit and admit it; the groups that were admitted, in order of their numbers.

    `propose` is called while the run's row is locked, whatever the run's state; where the run is not `running`, nothing
    is admitted. Raises Unknown, or Refused for an unknown environment or a position that was drawn before.
    """
    async with store.begin() as connection:
        state = await _state(connection, run_id)
        groups = await propose(state)
        if not groups or state.state is not RunState.RUNNING:
            return []
        labels = {load.label for load in state.environments}
        for group in groups:
            if group.environment not in labels:
                raise Refused(f"The run {run_id} has no environment called {group.environment!r}.")
            if group.evaluation is not None or group.split != "train":
                raise Refused("Groups of an evaluation are admitted by the evaluation.")
        for load in state.environments:
            draws = sorted(group.draw for group in groups if group.environment == load.label)
            if draws and (draws[0] < load.next_draw or len(set(draws)) < len(draws)):
                raise Refused(f"The draw of {load.label} is at {load.next_draw}; {draws} would repeat one.")
            if draws:
                await connection.execute(
                    update(EnvironmentRow)
                    .where(EnvironmentRow.run_id == run_id, EnvironmentRow.label == load.label)
                    .values(next_draw=draws[-1] + 1)
                )
        await _insert_tasks(connection, run_id, groups)
        drawn = await _drawable(connection, run_id, groups)
        return await _insert_groups(connection, run_id, drawn)


async def admission_state(store: Store, run_id: str) -> AdmissionState:
    """What the run has in flight and has spent, now. Raises Unknown."""
    async with store.begin() as connection:
        return await _state(connection, run_id)


async def left_a_place(store: Store, key: GroupKey) -> bool:
    """Whether the episode of this training group that has just ended made room for another group's worth of them.

    Of two that end at the same moment neither may be told so; whoever asks for admission looks again by itself.
    """
    async with store.direct() as connection:
        row = await (await connection.execute(_LEFT, {"run": key.run_id, "group": key.group_no})).fetchone()
    return row is not None and bool(row[0])


async def insert_evaluation_groups(
    store: Store, run_id: str, evaluation: str, groups: Sequence[NewGroup]
) -> list[GroupRow]:
    """Admit the groups of an evaluation; those whose position is taken are there already. Returns those asked for.

    Raises Unknown for an unknown evaluation, Refused for a task that belongs to another split.
    """
    async with store.begin() as connection:
        await _lock(connection, run_id)
        split = await connection.scalar(
            select(Evaluation.split).where(Evaluation.run_id == run_id, Evaluation.name == evaluation)
        )
        if split is None:
            raise Unknown(f"The run {run_id} has no evaluation called {evaluation!r}.")
        if any(group.evaluation != evaluation or group.split != split for group in groups):
            raise Refused(f"A group of another evaluation or split cannot be admitted to {evaluation!r}.")
        await _insert_tasks(connection, run_id, groups)
        await _refuse_overlap(connection, run_id, groups)
        mine = (Group.run_id == run_id, Group.evaluation == evaluation)
        asked = sorted(group.draw for group in groups)
        there = set(await connection.scalars(select(Group.draw).where(*mine, Group.draw.in_(asked))))
        await _insert_groups(connection, run_id, [group for group in groups if group.draw not in there])
        rows = await connection.execute(
            select(Group.__table__).where(*mine, Group.draw.in_(asked)).order_by(Group.group_no)
        )
        return [group_of(row) for row in rows]


async def _lock(connection: AsyncConnection, run_id: str) -> None:
    found = await connection.scalar(select(Run.run_id).where(Run.run_id == run_id).with_for_update(key_share=True))
    if found is None:
        raise unknown_run(run_id)


async def _state(connection: AsyncConnection, run_id: str) -> AdmissionState:
    await _lock(connection, run_id)
    run = (await connection.execute(select(Run.__table__, func.now().label("now")).where(Run.run_id == run_id))).one()
    counts = await connection.execute(
        select(Group.kind, Group.environment, Group.state, func.count(), func.sum(Group.sampled_tokens))
        .where(Group.run_id == run_id)
        .group_by(Group.kind, Group.environment, Group.state)
    )
    train: dict[str, dict[GroupState, int]] = {}
    in_flight, tokens = 0, 0
    for kind, label, state, count, sampled in counts:
        tokens += int(sampled)
        in_flight += count if GroupState(state) in OPEN_GROUPS else 0
        if kind == "train":
            train.setdefault(label, {})[GroupState(state)] = count
    unsettled = await connection.scalar(
        select(func.coalesce(func.sum(EpisodeRow.sampled_tokens), 0))
        .join(Group, (Group.run_id == EpisodeRow.run_id) & (Group.group_no == EpisodeRow.group_no))
        .where(Group.run_id == run_id, Group.state.in_(OPEN_GROUPS))
    )
    tokens += int(unsettled or 0)
    published = await connection.scalar(
        select(func.coalesce(func.max(PolicyVersion.version), -1)).where(
            PolicyVersion.run_id == run_id, PolicyVersion.published_at.is_not(None)
        )
    )
    committed, unpublished = (
        await connection.execute(
            select(
                func.count(),
                func.coalesce(func.sum(TrainStep.groups).filter(TrainStep.version > published), 0),
            ).where(TrainStep.run_id == run_id)
        )
    ).one()
    loads = tuple(
        _load(row, train.get(row.label, {}))
        for row in await connection.execute(
            select(EnvironmentRow.__table__).where(EnvironmentRow.run_id == run_id).order_by(EnvironmentRow.label)
        )
    )
    return AdmissionState(
        run_id=run_id,
        state=RunState(run.state),
        config=RunConfig.model_validate(run.config),
        seed=run.seed,
        concurrency=run.concurrency,
        environments=loads,
        open=in_flight,
        busy=int(await connection.scalar(_WORTH, {"run": run_id}) or 0),
        counted=sum(load.counted for load in loads),
        sampled_tokens=tokens,
        committed=committed,
        published=-1 if published is None else published,
        unpublished=unpublished,
        started_at=run.created_at,
        now=run.now,
        _connection=connection,
    )


def _load(row: Any, states: dict[GroupState, int]) -> EnvironmentLoad:
    return EnvironmentLoad(
        label=row.label,
        ref=row.ref,
        version=row.version,
        args=row.args,
        limits=Limits.model_validate(row.limits),
        group_size=row.group_size,
        weight=row.weight,
        next_draw=row.next_draw,
        open=sum(count for state, count in states.items() if state in OPEN_GROUPS),
        counted=sum(count for state, count in states.items() if state in COUNTED),
        states=states,
    )


async def _known(
    connection: AsyncConnection, run_id: str, environment: str, task_keys: Sequence[str]
) -> dict[str, str]:
    standing = case((TaskRow.quarantined_at.is_not(None), QUARANTINED), else_=TaskRow.split)
    rows = await connection.execute(
        select(TaskRow.task_key, standing).where(
            TaskRow.run_id == run_id, TaskRow.environment == environment, TaskRow.task_key.in_(list(task_keys))
        )
    )
    return dict(rows.all())


async def _standing(connection: AsyncConnection, run_id: str, groups: Sequence[NewGroup]) -> dict[tuple[str, str], str]:
    out: dict[tuple[str, str], str] = {}
    for environment in sorted({group.environment for group in groups}):
        keys = [group.task_key for group in groups if group.environment == environment]
        for key, split in (await _known(connection, run_id, environment, keys)).items():
            out[environment, key] = split
    return out


async def _drawable(connection: AsyncConnection, run_id: str, groups: Sequence[NewGroup]) -> list[NewGroup]:
    standing = await _standing(connection, run_id, groups)
    return [group for group in groups if standing[group.environment, group.task_key] == group.split]


async def _refuse_overlap(connection: AsyncConnection, run_id: str, groups: Sequence[NewGroup]) -> None:
    standing = await _standing(connection, run_id, groups)
    for group in groups:
        split = standing[group.environment, group.task_key]
        if split not in (group.split, QUARANTINED):
            raise Refused(
                f"{group.environment}: task {group.task_key} of the {group.split} split is in the {split} split too; "
                "splits must not share tasks."
            )


async def _insert_tasks(connection: AsyncConnection, run_id: str, groups: Sequence[NewGroup]) -> None:
    rows = {}
    for group in groups:
        whole = encode([group.task_data, group.task_info])
        data, info = json.loads(whole.display)
        rows[group.environment, group.task_key] = {
            "run_id": run_id,
            "environment": group.environment,
            "task_key": group.task_key,
            "split": group.split,
            "data": data,
            "info": info,
            "exact": whole.exact,
            "lossy": whole.lossy,
        }
    if rows:
        await connection.execute(upsert(TaskRow).values(list(rows.values())).on_conflict_do_nothing())


async def _insert_groups(connection: AsyncConnection, run_id: str, groups: Sequence[NewGroup]) -> list[GroupRow]:
    if not groups:
        return []
    after = await connection.scalar(
        update(Run)
        .where(Run.run_id == run_id)
        .values(next_group_no=Run.next_group_no + len(groups))
        .returning(Run.next_group_no)
    )
    first = int(after or 0) - len(groups)
    rows = await connection.execute(
        upsert(Group)
        .values(
            [
                {
                    "run_id": run_id,
                    "group_no": first + position,
                    "kind": "train" if group.evaluation is None else "eval",
                    "environment": group.environment,
                    "task_key": group.task_key,
                    "draw": group.draw,
                    "size": group.size,
                    "evaluation": group.evaluation,
                }
                for position, group in enumerate(groups)
            ]
        )
        .returning(*Group.__table__.columns)
    )
    return sorted((group_of(row) for row in rows), key=lambda group: group.key.group_no)
