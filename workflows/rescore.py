"""Scoring stored episodes again, group after group.

Invariant: what was scored is in rows under the scorer's version, so whatever is done twice is done once; the workflow
only remembers behind which group it is, and goes on there in a history of its own before this one grows long.
"""

import asyncio

from temporalio import workflow

from ..contracts import rescoring as act
from ..contracts.ids import GroupKey
from ..contracts.rescoring import RESCORE_WORKFLOW, Rescored, RescoreInput, RescoreProgress
from .calls import scheduled


@workflow.defn(name=RESCORE_WORKFLOW, failure_exception_types=[Exception])
class RescoreWorkflow:
    @workflow.init
    def __init__(self, rescore: RescoreInput) -> None:
        self._rescoring = rescore.rescoring
        self._so_far = rescore.so_far
        self._version: str | None = None
        self._total: int | None = None

    @workflow.run
    async def run(self, rescore: RescoreInput) -> Rescored:
        after, begin = rescore.after, rescore.after < 0
        while True:
            page = await scheduled(
                act.NEXT_GROUPS,
                act.RescorePage(rescoring=self._rescoring, after=after, begin=begin),
                summary="next groups",
            )
            self._version, self._total, begin = page.version, self._total or page.total, False
            if not page.groups:
                return await scheduled(
                    act.END_RESCORING,
                    act.RescoreEnd(rescoring=self._rescoring, version=page.version, outcome=self._so_far),
                    summary="note down what was done",
                )
            await asyncio.gather(*(self._group(group_no, page.version) for group_no in page.groups))
            after = page.groups[-1]
            workflow.set_current_details(f"{self._so_far.groups} groups, {self._so_far.written} scores")
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(RescoreInput(rescoring=self._rescoring, after=after, so_far=self._so_far))

    async def _group(self, group_no: int, version: str) -> None:
        key = GroupKey(run_id=self._rescoring.run_id, group_no=group_no)
        request = act.RescoreGroup(key=key, rescoring=self._rescoring, version=version)
        found = await scheduled(act.RESCORE_GROUP, request, summary=f"group {group_no}")
        self._so_far += found  # by now others may have been added

    @workflow.query
    def progress(self) -> RescoreProgress:
        return RescoreProgress(version=self._version, total=self._total, so_far=self._so_far)
