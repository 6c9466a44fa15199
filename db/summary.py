"""What can be said about a run at a glance: counts from rows, nothing remembered elsewhere."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import and_, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ..contracts.reasons import FailureKind, StopReason
from ..contracts.states import OPEN_GROUPS, EpisodeState, GroupState, RunState
from .errors import Unknown
from .models import EpisodeRow, Group, Run, TurnRow
from .store import Store


@dataclass(frozen=True)
class GroupCount:
    """How many groups of a kind and environment are in a state."""

    kind: str
    environment: str
    state: GroupState
    count: int


@dataclass(frozen=True)
class EpisodeTotals:
    """Attempts of episodes of one kind (`train` or `eval`)."""

    states: dict[EpisodeState, int]
    stops: dict[StopReason, int]
    failures: dict[FailureKind, int]
    mean_reward: float | None
    """Over scored ones."""
    scored: int


@dataclass(frozen=True)
class RunSummary:
    """A run at a glance. Turns and tokens are those of every attempt, running ones included."""

    run_id: str
    name: str
    state: RunState
    reason: str | None
    waiting_for: str | None
    concurrency: int
    groups: tuple[GroupCount, ...]
    episodes: dict[str, EpisodeTotals]
    """`train` and `eval`."""
    open_groups: int
    """Training groups in flight."""
    turns: int
    sampled_tokens: int
    created_at: datetime
    ended_at: datetime | None
    evaluating_groups: int = 0
    """Groups of evaluations in flight."""


async def run_summary(store: Store, run_id: str) -> RunSummary:
    """Count the rows of a run. Raises Unknown."""
    async with store.begin() as connection:
        run = (await connection.execute(select(Run.__table__).where(Run.run_id == run_id))).one_or_none()
        if run is None:
            raise Unknown(f"There is no run called {run_id}; `atropos run list` shows those there are.")
        groups = await connection.execute(
            select(Group.kind, Group.environment, Group.state, func.count())
            .where(Group.run_id == run_id)
            .group_by(Group.kind, Group.environment, Group.state)
            .order_by(Group.kind, Group.environment, Group.state)
        )
        counts = tuple(GroupCount(kind, label, GroupState(state), count) for kind, label, state, count in groups)
        turns, tokens = await _spent(connection, run_id)
        return RunSummary(
            run_id=run_id,
            name=run.name,
            state=RunState(run.state),
            reason=run.reason,
            waiting_for=run.waiting_for,
            concurrency=run.concurrency,
            groups=counts,
            episodes={kind: await _totals(connection, run_id, kind) for kind in ("train", "eval")},
            open_groups=_open(counts, "train"),
            evaluating_groups=_open(counts, "eval"),
            turns=turns,
            sampled_tokens=tokens,
            created_at=run.created_at,
            ended_at=run.ended_at,
        )


def _open(counts: tuple[GroupCount, ...], kind: str) -> int:
    return sum(count.count for count in counts if count.kind == kind and count.state in OPEN_GROUPS)


async def _spent(connection: AsyncConnection, run_id: str) -> tuple[int, int]:
    """Turns and sampled tokens: ended episodes by their own counts, running ones by their turns."""
    ended = select(func.sum(EpisodeRow.turns), func.sum(EpisodeRow.sampled_tokens)).where(EpisodeRow.run_id == run_id)
    running = (
        select(func.count(), func.sum(func.coalesce(TurnRow.told_sampled, func.octet_length(TurnRow.sampled) / 4)))
        .join(
            EpisodeRow,
            and_(
                EpisodeRow.run_id == TurnRow.run_id,
                EpisodeRow.group_no == TurnRow.group_no,
                EpisodeRow.member == TurnRow.member,
                EpisodeRow.attempt == TurnRow.attempt,
            ),
        )
        .where(TurnRow.run_id == run_id, EpisodeRow.state == EpisodeState.RUNNING)
    )
    turns, tokens = 0, 0
    for query in (ended, running):
        counted, sampled = (await connection.execute(query)).one()
        turns += int(counted or 0)
        tokens += int(sampled or 0)
    return turns, tokens


async def _totals(connection: AsyncConnection, run_id: str, kind: str) -> EpisodeTotals:
    rows = await connection.execute(
        select(
            EpisodeRow.state,
            EpisodeRow.stop,
            EpisodeRow.failure,
            func.count(),
            func.count(EpisodeRow.reward),
            func.sum(EpisodeRow.reward),
        )
        .join(Group, and_(Group.run_id == EpisodeRow.run_id, Group.group_no == EpisodeRow.group_no))
        .where(EpisodeRow.run_id == run_id, Group.kind == kind)
        .group_by(EpisodeRow.state, EpisodeRow.stop, EpisodeRow.failure)
        .order_by(EpisodeRow.state, EpisodeRow.stop, EpisodeRow.failure)
    )
    states: dict[EpisodeState, int] = {}
    stops: dict[StopReason, int] = {}
    failures: dict[FailureKind, int] = {}
    scored, total = 0, 0.0
    for state, stop, failure, count, with_reward, rewards in rows:
        states[EpisodeState(state)] = states.get(EpisodeState(state), 0) + count
        if stop is not None:
            stops[StopReason(stop)] = stops.get(StopReason(stop), 0) + count
        if failure is not None:
            failures[FailureKind(failure)] = failures.get(FailureKind(failure), 0) + count
        scored, total = scored + with_reward, total + (rewards or 0.0)
    return EpisodeTotals(states, stops, failures, total / scored if scored else None, scored)
