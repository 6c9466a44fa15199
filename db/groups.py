"""Groups: from admission to the one transaction that closes them.

Invariant: a group is closed once, behind the lock of its row, and a closed group has no running episode: what still
runs is ended in the same transaction. Only valid, scored members vote in its mean. A task whose
group failed, except by a cancel or as an orphan, leaves the draw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, exists, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from ..contracts.activities import GroupResult
from ..contracts.ids import EpisodeKey, GroupKey
from ..contracts.reasons import FailureKind, StopReason
from ..contracts.records import BadRecord
from ..contracts.states import OPEN_GROUPS, EpisodeState, GroupState, check_transition
from .encoding import clean, clean_or_none
from .errors import Unknown, Unsettled
from .models import EpisodeRow, Group, TaskRow, TurnRow
from .store import Store


@dataclass(frozen=True)
class GroupRow:
    """A group as admission and its workflow see it."""

    key: GroupKey
    kind: str
    """`train` or `eval`."""
    environment: str
    task_key: str
    size: int
    state: GroupState
    evaluation: str | None
    admitted_at: datetime
    draw: int


@dataclass(frozen=True)
class MemberFacts:
    """The newest attempt of one member, without its tokens."""

    key: EpisodeKey
    state: EpisodeState
    stop: StopReason | None
    failure: FailureKind | None
    reason: str | None
    reward: float | None
    turns: int
    """Counted when the episode ended, as the next two."""
    sampled_tokens: int
    policy_version: int | None


@dataclass(frozen=True)
class GroupFacts:
    """A group, how it ended if it did, and its members in order."""

    group: GroupRow
    failure: FailureKind | None
    reason: str | None
    valid: int | None
    mean_reward: float | None
    closed_at: datetime | None
    members: tuple[MemberFacts, ...]
    """Members that started."""


async def load_group(store: Store, key: GroupKey) -> GroupFacts:
    """The group and the newest attempt of each member. Raises Unknown."""
    async with store.begin() as connection:
        row = await _row(connection, key, lock=False)
        attempts = await connection.execute(
            select(EpisodeRow.__table__)
            .where(EpisodeRow.run_id == key.run_id, EpisodeRow.group_no == key.group_no, newest_attempt())
            .order_by(EpisodeRow.member)
        )
        return GroupFacts(
            group=group_of(row),
            failure=None if row.failure is None else FailureKind(row.failure),
            reason=row.reason,
            valid=row.valid,
            mean_reward=row.mean_reward,
            closed_at=row.closed_at,
            members=tuple(_member_of(key, attempt) for attempt in attempts),
        )


async def open_groups(store: Store, run_id: str) -> list[GroupRow]:
    """Groups whose workflow still has work to do, in order of their numbers."""
    async with store.begin() as connection:
        rows = await connection.execute(
            select(Group.__table__).where(Group.run_id == run_id, Group.state.in_(OPEN_GROUPS)).order_by(Group.group_no)
        )
        return [group_of(row) for row in rows]


async def failing_streak(store: Store, run_id: str, length: int, since: datetime) -> str | None:
    """What the newest `length` closed training groups died of, where all of them failed after `since`; else None."""
    newest = (
        select(Group.state, Group.failure, Group.reason, Group.closed_at)
        .where(Group.run_id == run_id, Group.kind == "train", Group.closed_at.is_not(None))
        .order_by(Group.group_no.desc())
        .limit(length)
    )
    async with store.begin() as connection:
        rows = (await connection.execute(newest)).all()
    failed = [row for row in rows if row.state == GroupState.FAILED and row.closed_at > since]
    if len(failed) < length:
        return None
    return f"the last {length} groups failed, the newest by {failed[0].failure}: {failed[0].reason}"


async def close_group(
    store: Store,
    key: GroupKey,
    members: Sequence[EpisodeKey],
    state: GroupState,
    failure: FailureKind | None,
    reason: str | None,
    *,
    min_valid: int = 0,
    has_signal: Callable[[Sequence[float | None]], bool] | None = None,
) -> GroupResult:
    """Close a group as SEALED or FAILED (with a failure kind); an earlier closing stands and is returned.

    `members`: the attempt of each member that counts. FAILED quarantines the task unless the failure is `cancelled`.
    `has_signal`: of the rewards of valid members (None: unscored), whether they can train anything; where they cannot,
    a group that would be sealed is FILTERED. One with fewer than `min_valid` members left, since weights in doubt
    sampled the others, fails as `engine`, and its task stays in the draw.
    Raises Unsettled while a member's turns are provisional; Unknown, IllegalTransition, or BadRecord where state and
    failure contradict each other.
    """
    if (state is GroupState.FAILED) != (failure is not None):
        raise BadRecord(f"a group that is closed as {state} cannot have the failure kind {failure}")
    if any(member.group != key for member in members):
        raise BadRecord(f"a member of another group cannot count in {key.workflow_id}")
    async with store.begin() as connection:
        row = await _row(connection, key, lock=True)
        if row.closed_at is not None:
            return _result(key, row)
        if failure is not None and failure is not FailureKind.CANCELLED:
            await _quarantine(connection, row, reason or f"a group of it failed: {failure}")
        if state is GroupState.SEALED:
            rewards = await _settled_rewards(connection, key, members)
            if len(rewards) < min_valid:
                state, failure = GroupState.FAILED, FailureKind.ENGINE
                reason = f"{len(rewards)} of {row.size} members are left: weights in doubt sampled the others"
            elif has_signal is not None and not has_signal(rewards):
                state = GroupState.FILTERED
        check_transition(GroupState(row.state), state)
        return await _close(connection, row, members, state, failure, reason)


async def _settled_rewards(
    connection: AsyncConnection, key: GroupKey, members: Sequence[EpisodeKey]
) -> list[float | None]:
    """The reward of each member that is valid. Raises Unsettled while a turn of one is provisional."""
    provisional = exists().where(
        TurnRow.run_id == EpisodeRow.run_id,
        TurnRow.group_no == EpisodeRow.group_no,
        TurnRow.member == EpisodeRow.member,
        TurnRow.attempt == EpisodeRow.attempt,
        TurnRow.provisional,
    )
    rows = await connection.execute(
        select(EpisodeRow.reward, provisional).where(
            EpisodeRow.run_id == key.run_id,
            EpisodeRow.group_no == key.group_no,
            tuple_(EpisodeRow.member, EpisodeRow.attempt).in_([(one.member, one.attempt) for one in members]),
            EpisodeRow.state == EpisodeState.DONE,
        )
    )
    found = rows.all()
    if any(unsettled for _, unsettled in found):
        raise Unsettled(f"{key.workflow_id} waits until its engine has proved which weights it holds.")
    return [reward for reward, _ in found]


async def fail_orphans(store: Store, keys: Sequence[GroupKey], reason: str) -> int:
    """Close open groups that no workflow works on as `infrastructure`; their tasks stay in the draw. Counts them."""
    closed = 0
    for key in sorted(keys, key=lambda one: (one.run_id, one.group_no)):
        async with store.begin() as connection:
            row = await _row(connection, key, lock=True)
            if row.closed_at is None:
                await _close(connection, row, (), GroupState.FAILED, FailureKind.INFRASTRUCTURE, reason)
                closed += 1
    return closed


def newest_attempt() -> ColumnElement[bool]:
    """Condition on `EpisodeRow`: no later attempt of the same member exists."""
    later = aliased(EpisodeRow)
    return ~exists().where(
        later.run_id == EpisodeRow.run_id,
        later.group_no == EpisodeRow.group_no,
        later.member == EpisodeRow.member,
        later.attempt > EpisodeRow.attempt,
    )


def group_of(row: Any) -> GroupRow:
    """A row of `groups` as GroupRow."""
    return GroupRow(
        key=GroupKey(run_id=row.run_id, group_no=row.group_no),
        kind=row.kind,
        environment=row.environment,
        task_key=row.task_key,
        size=row.size,
        state=GroupState(row.state),
        evaluation=row.evaluation,
        admitted_at=row.admitted_at,
        draw=row.draw,
    )


async def _row(connection: AsyncConnection, key: GroupKey, *, lock: bool) -> Any:
    query = select(Group.__table__).where(Group.run_id == key.run_id, Group.group_no == key.group_no)
    row = (await connection.execute(query.with_for_update(key_share=True) if lock else query)).one_or_none()
    if row is None:
        raise Unknown(f"There is no group {key.workflow_id} in the store.")
    return row


async def _close(
    connection: AsyncConnection,
    row: Any,
    members: Sequence[EpisodeKey],
    state: GroupState,
    failure: FailureKind | None,
    reason: str | None,
) -> GroupResult:
    here = (EpisodeRow.run_id == row.run_id, EpisodeRow.group_no == row.group_no)
    await _end_running(connection, row, failure)
    chosen = [(member.member, member.attempt) for member in members]
    valid, mean = (
        await connection.execute(
            select(func.count(), func.avg(EpisodeRow.reward)).where(
                *here,
                tuple_(EpisodeRow.member, EpisodeRow.attempt).in_(chosen),
                EpisodeRow.state == EpisodeState.DONE,
            )
        )
    ).one()
    tokens = select(func.coalesce(func.sum(EpisodeRow.sampled_tokens), 0)).where(*here).scalar_subquery()
    oldest = select(func.min(EpisodeRow.policy_version)).where(*here, EpisodeRow.state == EpisodeState.DONE)
    closed = await connection.execute(
        update(Group)
        .where(Group.run_id == row.run_id, Group.group_no == row.group_no)
        .values(
            state=state,
            failure=failure,
            reason=clean_or_none(reason),
            valid=valid,
            mean_reward=mean,
            sampled_tokens=tokens,
            oldest_version=oldest.scalar_subquery(),
            closed_at=func.now(),
        )
        .returning(*Group.__table__.columns)
    )
    return _result(GroupKey(run_id=row.run_id, group_no=row.group_no), closed.one())


async def _end_running(connection: AsyncConnection, row: Any, failure: FailureKind | None) -> None:
    """End what still runs in the group: cancelled with it, else given up."""
    kind = FailureKind.CANCELLED if failure is FailureKind.CANCELLED else FailureKind.INFRASTRUCTURE
    running = (
        (EpisodeRow.run_id == row.run_id)
        & (EpisodeRow.group_no == row.group_no)
        & (EpisodeRow.state == EpisodeState.RUNNING)
    )
    await connection.execute(select(EpisodeRow.member).where(running).with_for_update(key_share=True))
    spent = [
        select(counted)
        .where(
            TurnRow.run_id == EpisodeRow.run_id,
            TurnRow.group_no == EpisodeRow.group_no,
            TurnRow.member == EpisodeRow.member,
            TurnRow.attempt == EpisodeRow.attempt,
        )
        .correlate(EpisodeRow)
        .scalar_subquery()
        for counted in (
            func.count(),
            func.coalesce(func.sum(func.coalesce(TurnRow.told_sampled, func.octet_length(TurnRow.sampled) / 4)), 0),
            func.min(TurnRow.policy_version),
        )
    ]
    await connection.execute(
        update(EpisodeRow)
        .where(running)
        .values(
            state=EpisodeState.FAILED,
            stop=StopReason.FAILED,
            failure=kind,
            reason="its group was closed while it was running",
            turns=spent[0],
            sampled_tokens=spent[1],
            policy_version=spent[2],
            ended_at=func.now(),
        )
    )


async def _quarantine(connection: AsyncConnection, row: Any, reason: str) -> None:
    await connection.execute(
        update(TaskRow)
        .where(
            TaskRow.run_id == row.run_id,
            TaskRow.environment == row.environment,
            TaskRow.task_key == row.task_key,
            TaskRow.quarantined_at.is_(None),
        )
        .values(quarantined_at=func.now(), quarantine_reason=clean(reason))
    )


def _result(key: GroupKey, row: Any) -> GroupResult:
    return GroupResult(key=key, state=GroupState(row.state), valid=row.valid or 0, mean_reward=row.mean_reward)


def _member_of(key: GroupKey, row: Any) -> MemberFacts:
    return MemberFacts(
        key=key.episode(row.member, row.attempt),
        state=EpisodeState(row.state),
        stop=None if row.stop is None else StopReason(row.stop),
        failure=None if row.failure is None else FailureKind(row.failure),
        reason=row.reason,
        reward=row.reward,
        turns=row.turns,
        sampled_tokens=row.sampled_tokens,
        policy_version=row.policy_version,
    )
