"""Runs: registering one, changing its state and its pace, and what can be said about it at a glance.

Invariant: a run's document never changes; its state moves only along the arrows of `contracts.states`, guarded by the
state it is in, so of two writers that race one sees that it was too late.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from ..contracts.limits import Limits
from ..contracts.numbers import LARGEST
from ..contracts.runfile import RunConfig, RunFileError, parse_run
from ..contracts.states import IllegalTransition, RunState, is_live, sources
from ..contracts.tasks import content_hash
from ..contracts.text import one_line
from .encoding import clean_or_none, encode
from .errors import Refused, RunExists, Unknown, Unreadable
from .models import EnvironmentRow, Run
from .store import Store
from .summary import RunSummary, run_summary

__all__ = [
    "NewEnvironment",
    "RunRow",
    "RunSummary",
    "UnreadableRun",
    "create_run",
    "get_run",
    "insert_run",
    "list_runs",
    "readable",
    "run_state",
    "run_summary",
    "set_run_state",
    "set_waiting",
    "tune_run",
    "unknown_run",
]


@dataclass(frozen=True)
class NewEnvironment:
    """An environment of the mixture as it was found when the run was registered."""

    label: str
    ref: str
    version: str
    args: dict[str, Any]
    group_size: int
    weight: float
    limits: Limits


@dataclass(frozen=True)
class RunRow:
    """A run as stored."""

    run_id: str
    config: RunConfig
    state: RunState
    reason: str | None
    waiting_for: str | None
    concurrency: int
    """Groups in flight at once, as it is now."""
    weights: dict[str, float]
    """Environment's label → weight, as it is now."""
    environments: tuple[NewEnvironment, ...]
    created_at: datetime
    changed_at: datetime
    ended_at: datetime | None

    @property
    def name(self) -> str:
        return self.config.name


@dataclass(frozen=True)
class UnreadableRun:
    """A run whose file this build does not accept, for lists: it hides no other one."""

    run_id: str
    name: str
    state: RunState
    reason: str
    """A sentence: what is wrong with its file."""
    created_at: datetime
    ended_at: datetime | None
    waiting_for: None = None
    weights: dict[str, float] = field(default_factory=dict)


async def create_run(store: Store, run_id: str, config: RunConfig, environments: list[NewEnvironment]) -> RunRow:
    """Write a run down without its engines, whoever else has them; otherwise as `registration.register_run`."""
    async with store.begin() as connection:
        return await insert_run(connection, run_id, config, environments)


async def insert_run(
    connection: AsyncConnection, run_id: str, config: RunConfig, environments: list[NewEnvironment]
) -> RunRow:
    """The same, in the caller's transaction.

    Raises RunExists for another document under this id, RunFileError for text that Postgres cannot hold.
    """
    document = config.model_dump(mode="json")
    if encode([run_id, document]).lossy:
        raise RunFileError(["the run file contains a NUL character, a lone surrogate or a number that is not finite"])
    digest = content_hash(document)
    await connection.execute(
        upsert(Run)
        .values(
            run_id=run_id,
            name=config.name,
            config=document,
            config_hash=digest,
            seed=config.seed,
            concurrency=config.concurrency,
        )
        .on_conflict_do_nothing()
    )
    stored = await connection.scalar(select(Run.config_hash).where(Run.run_id == run_id))
    if stored != digest:
        raise RunExists(f"A run called {run_id} exists already, with another run file; choose another id.")
    for environment in environments:
        await connection.execute(
            upsert(EnvironmentRow)
            .values(
                run_id=run_id,
                label=environment.label,
                ref=environment.ref,
                version=environment.version,
                args=environment.args,
                group_size=environment.group_size,
                weight=environment.weight,
                limits=environment.limits.model_dump(mode="json"),
            )
            .on_conflict_do_nothing()
        )
    return await _read_one(connection, run_id)


async def get_run(store: Store, run_id: str) -> RunRow | None:
    """The run, or None. Raises Unreadable where this build does not accept its file."""
    async with store.begin() as connection:
        found = await _read(connection, Run.run_id == run_id, 1)
    return readable(found[0]) if found else None


async def run_state(store: Store, run_id: str) -> RunState | None:
    """What changes about a run while others wait, read without its file."""
    async with store.direct() as connection:
        row = await (await connection.execute("SELECT state FROM runs WHERE run_id = %s", (run_id,))).fetchone()
    return None if row is None else RunState(row[0])


async def list_runs(store: Store, limit: int = 50) -> list[RunRow | UnreadableRun]:
    """The newest runs first, those too that cannot be read."""
    async with store.begin() as connection:
        return await _read(connection, None, limit)


async def set_run_state(store: Store, run_id: str, new: RunState, reason: str | None) -> RunState:
    """Move the run to `new` and return the state it is in. A no-op where it is there already.

    Raises Unknown, or IllegalTransition where no arrow leads from its state to `new`.
    """
    ended = not is_live(new)
    async with store.begin() as connection:
        moved = await connection.execute(
            update(Run)
            .where(Run.run_id == run_id, Run.state.in_(sources(new)))
            .values(
                state=new,
                reason=clean_or_none(reason),
                waiting_for=None if ended else Run.waiting_for,
                changed_at=func.now(),
                ended_at=func.now() if ended else None,
            )
        )
        if moved.rowcount:
            return new
        state = await connection.scalar(select(Run.state).where(Run.run_id == run_id))
    if state is None:
        raise unknown_run(run_id)
    if state != new:
        raise IllegalTransition(f"The run {run_id} is {state} and cannot become {new}.")
    return new


async def tune_run(store: Store, run_id: str, concurrency: int | None, weights: Mapping[str, float]) -> RunRow:
    """Change the pace or the mixture of a live run; None and missing labels leave things as they are.

    Raises Unknown, or Refused for an unknown label, a number out of range or a run that has ended.
    """
    if concurrency is not None and not 1 <= concurrency <= 2000:
        raise Refused(f"concurrency: must be between 1 and 2000 groups, not {concurrency}")
    for label, weight in weights.items():
        if not 0 < weight <= LARGEST:
            raise Refused(f"weights: {label} must have a weight above 0 and of at most {LARGEST:g}, not {weight}")
    async with store.begin() as connection:
        state = await connection.scalar(select(Run.state).where(Run.run_id == run_id).with_for_update(key_share=True))
        if state is None:
            raise unknown_run(run_id)
        if not is_live(RunState(state)):
            raise Refused(f"The run {run_id} is {state}; only a live run can be changed.")
        if concurrency is not None:
            await connection.execute(update(Run).where(Run.run_id == run_id).values(concurrency=concurrency))
        for label, weight in weights.items():
            changed = await connection.execute(
                update(EnvironmentRow)
                .where(EnvironmentRow.run_id == run_id, EnvironmentRow.label == label)
                .values(weight=weight)
            )
            if not changed.rowcount:
                raise Refused(f"weights: the run {run_id} has no environment called {label!r}")
        return await _read_one(connection, run_id)


async def set_waiting(store: Store, run_id: str, reason: str | None, state: RunState = RunState.RUNNING) -> None:
    """Say why nothing is admitted, or that it is again. Writes nothing where it says so already.

    Nor where the run is not in `state` (any more): what was found out before a pause says nothing about the pause.
    """
    reason = clean_or_none(reason)
    async with store.direct() as connection:
        await connection.execute(
            "UPDATE runs SET waiting_for = %(reason)s WHERE run_id = %(run)s"
            " AND state = %(state)s AND waiting_for IS DISTINCT FROM %(reason)s",
            {"run": run_id, "reason": reason, "state": state},
        )


def unknown_run(run_id: str) -> Unknown:
    return Unknown(f"There is no run called {run_id}; `atropos run list` shows those there are.")


async def _read_one(connection: AsyncConnection, run_id: str) -> RunRow:
    return readable((await _read(connection, Run.run_id == run_id, 1))[0])


def readable(run: RunRow | UnreadableRun) -> RunRow:
    """The run. Raises Unreadable where it is one that cannot be read."""
    if isinstance(run, UnreadableRun):
        raise Unreadable(run.reason)
    return run


async def _read(connection: AsyncConnection, condition: Any, limit: int) -> list[RunRow | UnreadableRun]:
    runs = select(Run.__table__).order_by(Run.created_at.desc(), Run.run_id).limit(limit)
    if condition is not None:
        runs = runs.where(condition)
    rows = (await connection.execute(runs)).all()
    chosen = [row.run_id for row in rows]
    mixture: dict[str, list[Any]] = {run_id: [] for run_id in chosen}
    for row in await connection.execute(
        select(EnvironmentRow.__table__).where(EnvironmentRow.run_id.in_(chosen)).order_by(EnvironmentRow.label)
    ):
        mixture[row.run_id].append(row)
    return [_run_of(row, mixture[row.run_id]) for row in rows]


def _run_of(row: Any, environments: list[Any]) -> RunRow | UnreadableRun:
    try:
        config = parse_run(row.config)
        mixture = tuple(_environment_of(one) for one in environments)
    except (RunFileError, ValidationError) as error:
        return UnreadableRun(
            run_id=row.run_id,
            name=row.name,
            state=RunState(row.state),
            reason=f"This build cannot read the file of {row.run_id} ({one_line(str(error))}).",
            created_at=row.created_at,
            ended_at=row.ended_at,
        )
    return RunRow(
        run_id=row.run_id,
        config=config,
        state=RunState(row.state),
        reason=row.reason,
        waiting_for=row.waiting_for,
        concurrency=row.concurrency,
        weights={environment.label: environment.weight for environment in mixture},
        environments=mixture,
        created_at=row.created_at,
        changed_at=row.changed_at,
        ended_at=row.ended_at,
    )


def _environment_of(row: Any) -> NewEnvironment:
    return NewEnvironment(
        label=row.label,
        ref=row.ref,
        version=row.version,
        args=row.args,
        group_size=row.group_size,
        weight=row.weight,
        limits=Limits.model_validate(row.limits),
    )
