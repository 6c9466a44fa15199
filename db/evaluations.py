"""Evaluations: fixed tasks, n samples each, and what came of them.

Invariant: a result is computed from rows in the transaction that ends the evaluation and never changes afterwards;
each number names its samples in `evaluation_samples`. Unscored and invalid samples are left out, never counted as 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from ..contracts.activities import EvaluationOutcome
from ..contracts.sampling import Sampling
from ..contracts.states import OPEN_GROUPS, EpisodeState, EvaluationState, check_transition
from .encoding import clean_or_none
from .errors import Refused, Unknown
from .groups import GroupRow, group_of, newest_attempt
from .models import EpisodeRow, Evaluation, EvaluationSample, Group
from .store import Store

SUCCESS = 1.0
"""Reward from which a sample is a success, unless the evaluation says another."""


@dataclass(frozen=True)
class EvaluationRow:
    """An evaluation as stored."""

    run_id: str
    name: str
    environment: str
    split: str
    tasks: int
    samples: int
    threshold: float
    sampling: Sampling
    policy_version: int | None
    state: EvaluationState
    outcome: EvaluationOutcome


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples succeeds, from c successes among n ≥ k samples."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} cannot be estimated from {c} successes among {n} samples")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def ks_of(samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two, and the number of samples."""
    return sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})


async def start_evaluation(
    store: Store,
    run_id: str,
    name: str,
    *,
    environment: str,
    split: str,
    tasks: int,
    samples: int,
    sampling: Sampling,
    threshold: float = SUCCESS,
    policy_version: int | None = None,
) -> EvaluationRow:
    """Write the evaluation's row, or read back the one there is. `environment` is a label of the run.

    Raises Refused where the name is taken by a different set or the run has no such environment.
    """
    wanted = (environment, split, tasks, samples, threshold, sampling)
    async with store.begin() as connection:
        await connection.execute(
            upsert(Evaluation)
            .values(
                run_id=run_id,
                name=name,
                environment=environment,
                split=split,
                tasks=tasks,
                samples=samples,
                threshold=threshold,
                sampling=sampling.model_dump(mode="json"),
                policy_version=policy_version,
            )
            .on_conflict_do_nothing()
        )
        row = _evaluation_of(await _row(connection, run_id, name, lock=False))
    if (row.environment, row.split, row.tasks, row.samples, row.threshold, row.sampling) != wanted:
        raise Refused(f"The run {run_id} has an evaluation called {name!r} already, over another set.")
    return row


async def get_evaluation(store: Store, run_id: str, name: str) -> EvaluationRow:
    """The evaluation. Raises Unknown."""
    async with store.begin() as connection:
        return _evaluation_of(await _row(connection, run_id, name, lock=False))


async def list_evaluations(store: Store, run_id: str) -> list[EvaluationRow]:
    """The evaluations of a run in the order in which they started."""
    async with store.begin() as connection:
        rows = await connection.execute(
            select(Evaluation.__table__)
            .where(Evaluation.run_id == run_id)
            .order_by(Evaluation.created_at, Evaluation.name)
        )
        return [_evaluation_of(row) for row in rows]


async def evaluation_groups(store: Store, run_id: str, name: str) -> list[GroupRow]:
    """Groups of an evaluation whose workflow still has work to do, in order of their position in the set."""
    async with store.begin() as connection:
        rows = await connection.execute(
            select(Group.__table__)
            .where(Group.run_id == run_id, Group.evaluation == name, Group.state.in_(OPEN_GROUPS))
            .order_by(Group.draw)
        )
        return [group_of(row) for row in rows]


async def finish_evaluation(
    store: Store, run_id: str, name: str, state: EvaluationState | None = None, reason: str | None = None
) -> EvaluationOutcome:
    """End an evaluation with what its ended episodes were worth; the stored outcome where it has ended already.

    `state` defaults to `completed`, or `failed` where no sample was scored. Raises Unknown, or Refused to complete
    while a group of it is open.
    """
    async with store.begin() as connection:
        row = await _row(connection, run_id, name, lock=True)
        if row.state != EvaluationState.RUNNING:
            return _evaluation_of(row).outcome
        samples = await _samples(connection, run_id, name, row.threshold)
        scored = [sample for sample in samples if sample["reward"] is not None]
        new = state or (EvaluationState.COMPLETED if scored else EvaluationState.FAILED)
        check_transition(EvaluationState.RUNNING, new)
        if state is None and not scored:
            reason = "no sample was scored"
        if new is EvaluationState.COMPLETED:
            await _refuse_open(connection, run_id, name)
        if samples:
            await connection.execute(insert(EvaluationSample), samples)
        ended = await connection.execute(
            update(Evaluation)
            .where(Evaluation.run_id == run_id, Evaluation.name == name)
            .values(
                state=new,
                reason=clean_or_none(reason),
                episodes=len(scored),
                mean_reward=math.fsum(s["reward"] for s in scored) / len(scored) if scored else None,
                pass_at=_pass_at(scored, row.samples),
                ended_at=func.now(),
            )
            .returning(*Evaluation.__table__.columns)
        )
        return _evaluation_of(ended.one()).outcome


def _pass_at(scored: Sequence[dict[str, Any]], samples: int) -> dict[str, float]:
    """Mean over the tasks with at least k scored samples, for each k that any task has."""
    tasks: dict[str, list[bool]] = {}
    for sample in scored:
        tasks.setdefault(sample["task_key"], []).append(sample["success"])
    out = {}
    for k in ks_of(samples):
        each = [pass_at_k(len(wins), sum(wins), k) for wins in tasks.values() if len(wins) >= k]
        if each:
            out[str(k)] = math.fsum(each) / len(each)
    return out


async def _samples(connection: AsyncConnection, run_id: str, name: str, threshold: float) -> list[dict[str, Any]]:
    """The newest attempt of each member that ended, as rows of `evaluation_samples`."""
    rows = await connection.execute(
        select(
            Group.task_key,
            EpisodeRow.group_no,
            EpisodeRow.member,
            EpisodeRow.attempt,
            EpisodeRow.reward,
        )
        .join(Group, (Group.run_id == EpisodeRow.run_id) & (Group.group_no == EpisodeRow.group_no))
        .where(Group.run_id == run_id, Group.evaluation == name, EpisodeRow.state != EpisodeState.RUNNING)
        .where(newest_attempt())
        .order_by(EpisodeRow.group_no, EpisodeRow.member)
    )
    numbers: dict[str, int] = {}
    out = []
    for row in rows:
        sample = numbers[row.task_key] = numbers.get(row.task_key, -1) + 1
        out.append(
            {
                "run_id": run_id,
                "evaluation": name,
                "task_key": row.task_key,
                "sample": sample,
                "group_no": row.group_no,
                "member": row.member,
                "attempt": row.attempt,
                "reward": row.reward,
                "success": None if row.reward is None else row.reward >= threshold,
            }
        )
    return out


async def _refuse_open(connection: AsyncConnection, run_id: str, name: str) -> None:
    still = await connection.scalar(
        select(func.count()).where(Group.run_id == run_id, Group.evaluation == name, Group.closed_at.is_(None))
    )
    if still:
        raise Refused(f"The evaluation {name!r} still has {still} open groups.")


async def _row(connection: AsyncConnection, run_id: str, name: str, *, lock: bool) -> Any:
    query = select(Evaluation.__table__).where(Evaluation.run_id == run_id, Evaluation.name == name)
    row = (await connection.execute(query.with_for_update(key_share=True) if lock else query)).one_or_none()
    if row is None:
        raise Unknown(f"The run {run_id} has no evaluation called {name!r}.")
    return row


def _evaluation_of(row: Any) -> EvaluationRow:
    return EvaluationRow(
        run_id=row.run_id,
        name=row.name,
        environment=row.environment,
        split=row.split,
        tasks=row.tasks,
        samples=row.samples,
        threshold=row.threshold,
        sampling=Sampling.model_validate(row.sampling),
        policy_version=row.policy_version,
        state=EvaluationState(row.state),
        outcome=EvaluationOutcome(
            name=row.name,
            state=EvaluationState(row.state),
            episodes=row.episodes or 0,
            mean_reward=row.mean_reward,
            pass_at=row.pass_at or {},
        ),
    )
