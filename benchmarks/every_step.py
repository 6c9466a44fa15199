"""The same workflows with every step a scheduled activity: what most integrations do, as the baseline.

A worker process that loads this module has `quick` as `scheduled` in the product's workflows. Like the product's, they
write every row.
"""

from atropos.contracts.activities import EpisodeResult, GroupResult
from atropos.contracts.workflows import EPISODE_WORKFLOW, GROUP_WORKFLOW, EpisodeInput, GroupInput
from atropos.workflows import episode, group
from atropos.workflows.calls import scheduled
from temporalio import workflow

episode.quick = scheduled  # type: ignore[attr-defined]
group.quick = scheduled  # type: ignore[attr-defined]


@workflow.defn(name=EPISODE_WORKFLOW, failure_exception_types=[Exception])
class EveryStepEpisode(episode.EpisodeWorkflow):
    @workflow.init
    def __init__(self, start: EpisodeInput) -> None:
        super().__init__(start)

    @workflow.run
    async def run(self, start: EpisodeInput) -> EpisodeResult:
        return await super().run(start)


@workflow.defn(name=GROUP_WORKFLOW, failure_exception_types=[Exception])
class EveryStepGroup(group.GroupWorkflow):
    @workflow.init
    def __init__(self, group: GroupInput) -> None:
        super().__init__(group)

    @workflow.run
    async def run(self, group: GroupInput) -> GroupResult:
        return await super().run(group)
