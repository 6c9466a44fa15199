"""Rows against workflows: what the store calls open, Temporal still works on, and the other way round.

Invariant: nothing is called a contradiction before the workflow was described and its row read again for some seconds,
since a row commits before its workflow closes. What visibility lists is late, so it is believed only where it says that
the workflow of a closed row is over: everything else is asked for. What Temporal does not know (not
begun, or its history is kept no longer) is counted and contradicts nothing.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from ..contracts import search
from ..contracts.ids import (
    EpisodeKey,
    GroupKey,
    evaluation_workflow_id,
    rollout_workflow_id,
    trainer_workflow_id,
)
from ..db.audit import Violation
from ..db.lives import Lives, lives_of
from ..db.store import Store

OVER: Final = "workflow_over"
LEFT: Final = "workflow_open"
SETTLE_S: Final = 20.0
"""For so long a suspicion has to stand: a worker that dies is noticed after 5 s, and another then closes."""
_AGAIN_S: Final = 0.5
_AT_ONCE: Final = 32
_PAGE: Final = 1000
_RPC: Final = timedelta(seconds=10)
_OVER: Final = frozenset(
    {
        WorkflowExecutionStatus.COMPLETED,
        WorkflowExecutionStatus.FAILED,
        WorkflowExecutionStatus.CANCELED,
        WorkflowExecutionStatus.TERMINATED,
        WorkflowExecutionStatus.TIMED_OUT,
    }
)

_AT_WORK: Final = (
    PendingActivityState.PENDING_ACTIVITY_STATE_STARTED,
    PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED,
)


@dataclass(frozen=True)
class Compared:
    """`known`: workflows that Temporal knows and that were held against their rows; `unknown`: those it does not."""

    violations: tuple[Violation, ...]
    known: int
    unknown: int


@dataclass(frozen=True)
class _Claim:
    """What the store says of a workflow. `may_be_done`: it may complete before its row ends."""

    row: str
    open: bool
    may_be_done: bool = False

    def contradiction(self, status: WorkflowExecutionStatus) -> str | None:
        """Which check this status violates."""
        over = status in _OVER
        if self.open and over and not (self.may_be_done and status is WorkflowExecutionStatus.COMPLETED):
            return OVER
        return LEFT if not self.open and not over else None


@dataclass(frozen=True)
class _Seen:
    """A workflow as a describe finds it. `busy`: a worker is at an activity of it right now."""

    status: WorkflowExecutionStatus
    busy: bool


async def compare(store: Store, client: Client, run_id: str, settle_s: float = SETTLE_S) -> Compared:
    """Hold the rows of a run against its workflows, also while it runs. Raises RPCError where Temporal is away."""
    lives = await lives_of(store, run_id)
    listed = await _listed(client, run_id)
    ids = list(dict.fromkeys((*_workflow_ids(run_id, lives), *sorted(listed))))
    claims = {one: claim for one in ids if (claim := _claim(run_id, lives, one)) is not None}
    unsure = [
        one
        for one, claim in claims.items()
        if claim.open or one not in listed or claim.contradiction(listed[one]) is not None
    ]
    unknown, suspects = 0, dict[str, Violation]()
    deadline, first = time.monotonic() + settle_s, True
    while unsure:
        seen = await _described(client, {*unsure, *_of_run(run_id)} if _level(run_id, unsure) else unsure)
        unknown += sum(1 for one in unsure if seen[one] is None) if first else 0
        lives = await lives_of(store, run_id, _groups_in(run_id, unsure))
        suspects = _suspects(run_id, lives, unsure, seen)
        unsure, first = list(suspects), False
        if not suspects or time.monotonic() >= deadline:
            break
        await asyncio.sleep(_AGAIN_S)
    return Compared(tuple(suspects.values()), len(claims) - unknown, unknown)


def _suspects(
    run_id: str, lives: Lives, unsure: Iterable[str], seen: Mapping[str, _Seen | None]
) -> dict[str, Violation]:
    """What contradicts the rows as they are now. A run that has ended may still be at its last work."""
    ending = any(one is not None and one.busy for one in map(seen.get, _of_run(run_id)))
    found = {}
    for one in unsure:
        claim, facts = _claim(run_id, lives, one), seen[one]
        if claim is None or facts is None:
            continue
        check = claim.contradiction(facts.status)
        if check is not None and not (check == LEFT and ending and one in _of_run(run_id)):
            found[one] = Violation(check, claim.row)
    return found


def _of_run(run_id: str) -> tuple[str, str, str]:
    return run_id, rollout_workflow_id(run_id), trainer_workflow_id(run_id)


def _level(run_id: str, ids: Iterable[str]) -> bool:
    return not set(_of_run(run_id)).isdisjoint(ids)


def _workflow_ids(run_id: str, lives: Lives) -> Iterable[str]:
    """The workflows that the rows of a run speak of."""
    yield run_id
    yield rollout_workflow_id(run_id)
    if lives.trains:
        yield trainer_workflow_id(run_id)
    for name in lives.evaluations:
        yield evaluation_workflow_id(run_id, name)
    for group in lives.groups:
        yield GroupKey(run_id=run_id, group_no=group).workflow_id
    for group, member, attempt in lives.episodes:
        yield EpisodeKey(run_id=run_id, group_no=group, member=member, attempt=attempt).workflow_id


def _claim(run_id: str, lives: Lives, workflow_id: str) -> _Claim | None:
    """What the rows say of a workflow; None where it is none of ours.

    Without a row an episode is as open as its group, since starting it may take long, and an evaluation as its run.
    """
    if workflow_id == run_id:
        return _Claim("run", lives.run)
    if workflow_id == rollout_workflow_id(run_id):
        return _Claim("rollout", lives.run, may_be_done=True)
    if workflow_id == trainer_workflow_id(run_id):
        return _Claim("trainer", lives.run, may_be_done=not lives.trains)
    evaluations = evaluation_workflow_id(run_id, "")
    if workflow_id.startswith(evaluations):
        name = workflow_id.removeprefix(evaluations)
        return _Claim(f"evaluation {name}", lives.evaluations.get(name, lives.run))
    group = _group_in(run_id, workflow_id)
    if group is None:
        return None
    if workflow_id == GroupKey(run_id=run_id, group_no=group).workflow_id:
        return _Claim(f"group {group}", lives.groups.get(group, False))
    try:
        key = EpisodeKey.parse(workflow_id)
    except ValueError:
        return None
    place = (key.group_no, key.member, key.attempt)
    return _Claim(
        f"episode {'/'.join(map(str, place))}", lives.episodes.get(place, lives.groups.get(key.group_no, False))
    )


def _group_in(run_id: str, workflow_id: str) -> int | None:
    """The group that the id of a group's or an episode's workflow names."""
    head, separator, rest = workflow_id.partition(f"{run_id}/group/")
    number = rest.split("/")[0]
    return int(number) if separator and not head and number.isdecimal() else None


def _groups_in(run_id: str, ids: Iterable[str]) -> Collection[int]:
    return {group for one in ids if (group := _group_in(run_id, one)) is not None}


async def _listed(client: Client, run_id: str) -> dict[str, WorkflowExecutionStatus]:
    """The newest execution of each workflow, as visibility has it; nothing where it does not know our attribute."""
    quoted = run_id.replace("\\", "\\\\").replace("'", "\\'")
    newest: dict[str, tuple[datetime, WorkflowExecutionStatus]] = {}
    try:
        async for one in client.list_workflows(f"{search.RUN} = '{quoted}'", page_size=_PAGE, rpc_timeout=_RPC):
            known = newest.get(one.id)
            if one.status is not None and (known is None or known[0] < one.start_time):
                newest[one.id] = (one.start_time, one.status)
    except RPCError as error:
        if error.status is not RPCStatusCode.INVALID_ARGUMENT:
            raise
    return {one: status for one, (_, status) in newest.items()}


async def _described(client: Client, ids: Collection[str]) -> dict[str, _Seen | None]:
    """Each workflow as it is now; None where Temporal does not know it."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def describe(workflow_id: str) -> _Seen | None:
        async with free:
            try:
                found = await client.get_workflow_handle(workflow_id).describe(rpc_timeout=_RPC)
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return None
                raise
        pending = found.raw_description.pending_activities
        return None if found.status is None else _Seen(found.status, any(one.state in _AT_WORK for one in pending))

    return dict(zip(ids, await asyncio.gather(*map(describe, ids)), strict=True))
