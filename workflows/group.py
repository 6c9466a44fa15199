"""A group: G episodes of one task as children, scored together, sealed in one transaction.

Invariant: a group closes exactly once, as sealed or as failed with a kind, and never waits for a member that has
ended. Invalid members are tried again with a higher attempt only while too few are valid; after the last top-up the
group fails and its task is quarantined.
"""

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from temporalio.exceptions import ChildWorkflowError, FailureError, is_cancelled_exception

from ..contracts import activities as act
from ..contracts import search
from ..contracts.activities import EpisodeResult, GroupResult
from ..contracts.ids import EpisodeKey
from ..contracts.queues import WORKFLOWS
from ..contracts.reasons import FailureKind, RunAt
from ..contracts.workflows import (
    EPISODE_WORKFLOW,
    GROUP_WORKFLOW,
    EpisodeInput,
    GroupInput,
)
from .calls import quick, root_cause, scheduled, verdict

_EPISODE_TASK_TIMEOUT = timedelta(seconds=5)
"""A workflow worker that dies is noticed after this; the server's default of 10 s only makes recovery slower."""


@workflow.defn(name=GROUP_WORKFLOW, failure_exception_types=[Exception])
class GroupWorkflow:
    @workflow.init
    def __init__(self, group: GroupInput) -> None:
        self._group = group.start
        self._parent = group.parent
        self._members = [group.start.key.episode(member) for member in range(group.start.size)]
        self._results: dict[int, EpisodeResult | None] = {}

    @workflow.run
    async def run(self, group: GroupInput) -> GroupResult:
        cancelled: BaseException | None = None
        failure: tuple[FailureKind, str] | None = None
        try:
            await self._fill()
            failure = await self._judge()
        except (FailureError, asyncio.CancelledError) as error:
            if is_cancelled_exception(error):
                cancelled, failure = error, (FailureKind.CANCELLED, "cancelled")
            else:
                failure = (FailureKind.INFRASTRUCTURE, root_cause(error))
        result = await self._close(failure)
        if cancelled is not None:
            raise cancelled
        return result

    async def _fill(self) -> None:
        """Play all members, then top up while too few are valid."""
        await self._play(self._members)
        for _ in range(self._group.top_up):
            if self._valid >= self._group.min_valid or FailureKind.CANCELLED in self._failures:
                return
            again = [key.model_copy(update={"attempt": key.attempt + 1}) for key in self._members if self._lost(key)]
            for key in again:
                self._members[key.member] = key
            await self._play(again)

    @property
    def _valid(self) -> int:
        return sum(1 for result in self._results.values() if result is not None and result.valid)

    @property
    def _failures(self) -> list[FailureKind]:
        return [result.failure for result in self._results.values() if result is not None and result.failure]

    def _lost(self, key: EpisodeKey) -> bool:
        result = self._results[key.member]
        return result is None or not result.valid

    async def _play(self, keys: list[EpisodeKey]) -> None:
        await asyncio.gather(*(self._episode(key) for key in keys))

    async def _episode(self, key: EpisodeKey) -> None:
        try:
            self._results[key.member] = await workflow.execute_child_workflow(
                EPISODE_WORKFLOW,
                EpisodeInput(
                    key=key,
                    environment=self._group.environment,
                    task_key=self._group.task_key,
                    start_at=self._group.start_at,
                ),
                id=key.workflow_id,
                task_queue=WORKFLOWS,
                task_timeout=_EPISODE_TASK_TIMEOUT,
                result_type=EpisodeResult,
                search_attributes=search_attributes(key.run_id, self._group.environment, self._group.task_key),
            )
        except ChildWorkflowError as error:
            if is_cancelled_exception(error):
                raise
            workflow.logger.warning("episode %s failed: %s", key.workflow_id, error.cause)
            self._results[key.member] = None

    async def _judge(self) -> tuple[FailureKind, str] | None:
        """Score the valid members as a group; say why where there are too few of them."""
        if self._valid < self._group.min_valid:
            kinds = self._failures
            kind = max(kinds, key=kinds.count, default=FailureKind.INFRASTRUCTURE)
            reasons = [result.reason for result in self._results.values() if result is not None and result.reason]
            why = max(reasons, key=reasons.count, default="its members were lost")
            return kind, f"{self._valid} of {self._group.size} members valid, {self._group.min_valid} needed: {why}"
        if self._group.group_scorer_at is not None:
            valid = tuple(key for key in self._members if not self._lost(key))
            score = quick if self._group.group_scorer_at is RunAt.INLINE else scheduled
            try:
                await score(act.SCORE_GROUP, act.ScoreGroup(key=self._group.key, members=valid), summary="score group")
            except FailureError as error:
                found = verdict(error)
                if found is None:
                    raise
                return found
        return None

    async def _close(self, failure: tuple[FailureKind, str] | None) -> GroupResult:
        kind, reason = failure or (None, None)
        argument = act.CloseGroup(
            key=self._group.key,
            members=tuple(self._members),
            failure=kind,
            reason=reason,
            tell=self._parent,
            evaluation=self._group.evaluation,
        )
        return await quick(act.CLOSE_GROUP, argument, summary=f"close: {kind or 'sealed'}")


def search_attributes(
    run_id: str, environment: str | None = None, task_key: str | None = None
) -> TypedSearchAttributes:
    """What a workflow of a run can be found by from its start on."""
    pairs = {search.RUN: run_id, search.ENVIRONMENT: environment, search.TASK: task_key}
    return TypedSearchAttributes(
        [
            SearchAttributePair(SearchAttributeKey.for_keyword(name), value)
            for name, value in pairs.items()
            if value is not None
        ]
    )
