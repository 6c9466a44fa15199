"""The loop that turns batches into versions, and the one that brings versions to the engines.

Invariant: this workflow knows nothing that is not in rows. It asks for a batch, has it trained, and has what was
committed published, and may be lost and started anew at any moment: a batch is leased once, a step committed once.
Rollouts go on meanwhile; how far they may run ahead is for admission to say.
"""

import asyncio

from temporalio import workflow
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError

from ..contracts import activities as act
from ..contracts import activities_training as train
from ..contracts.ids import evaluation_workflow_id, rollout_workflow_id
from ..contracts.queues import WORKFLOWS
from ..contracts.workflows import EVALUATION_WORKFLOW, TRAINED, TRAINER_WORKFLOW, WAKE, EvaluationInput, TrainerInput
from .calls import scheduled
from .group import search_attributes


@workflow.defn(name=TRAINER_WORKFLOW)
class TrainerWorkflow:
    @workflow.init
    def __init__(self, trainer: TrainerInput) -> None:
        self._run = act.RunRef(run_id=trainer.run_id)
        self._builtin = trainer.builtin
        self._published = trainer.published
        self._trained = trainer.finished
        self._ended = False
        self._leaving = False
        self._why = "starting"

    @workflow.run
    async def run(self, trainer: TrainerInput) -> None:
        parts = [asyncio.create_task(self._publish()), asyncio.create_task(self._train())]
        try:
            await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()
        if not self._ended:
            await workflow.wait_condition(workflow.all_handlers_finished)
            workflow.continue_as_new(
                TrainerInput(
                    run_id=self._run.run_id,
                    builtin=self._builtin,
                    published=self._published,
                    finished=self._trained,
                )
            )

    async def _train(self) -> None:
        """Step after step, until there is none to take or the history is long."""
        if self._trained:
            return
        if self._builtin:
            plan = await scheduled(train.PREPARE_TRAINING, self._run, summary="load the first weights")
            for name in plan.evaluations:
                await self._evaluate(name)
        while not self._ended:
            lease = await scheduled(train.LEASE_BATCH, self._run, summary="lease a batch")
            if lease.done:
                self._trained = True
                break
            if lease.batch_no is None:
                self._say(f"step {lease.step}: {lease.waiting_for}")
            else:
                await self._step(lease.batch_no, lease.step, lease.groups)
            if workflow.info().is_continue_as_new_suggested():
                self._leaving = True
                return
        await self._tell(rollout_workflow_id(self._run.run_id), WAKE)
        await self._tell(self._run.run_id, TRAINED)

    async def _step(self, batch_no: int, step: int, groups: int) -> None:
        self._say(f"step {step}: training on {groups} groups")
        batch = train.BatchRef(run_id=self._run.run_id, batch_no=batch_no)
        result = await scheduled(train.TRAIN_STEP, batch, summary=f"step {step}: {groups} groups")
        if result.version is None:
            self._say(f"step {step}: its batch was abandoned")
            return
        loss, reward = (f"{value:.4g}" if value is not None else "?" for value in (result.loss, result.reward))
        self._say(f"step {step} made version {result.version}: loss {loss}, reward {reward}")
        for name in result.evaluations:
            await self._evaluate(name)

    async def _evaluate(self, name: str) -> None:
        """Pin the version just made before the next one can be, and let the evaluation run beside the training."""
        reference = act.EvaluationRef(run_id=self._run.run_id, name=name)
        await scheduled(act.START_EVALUATION, reference, summary=f"pin {name}")
        try:
            await workflow.start_child_workflow(
                EVALUATION_WORKFLOW,
                EvaluationInput(run_id=self._run.run_id, name=name),
                id=evaluation_workflow_id(self._run.run_id, name),
                task_queue=WORKFLOWS,
                parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                search_attributes=search_attributes(self._run.run_id),
            )
        except WorkflowAlreadyStartedError:
            workflow.logger.info("the evaluation %s runs already", name)

    async def _publish(self) -> None:
        """Keep the engines at the version they should hold, until the run has ended or this history is left."""
        while not self._leaving:
            request = train.Publish(run_id=self._run.run_id, known=self._published)
            found = await scheduled(train.PUBLISH, request, summary=f"publish (known: {self._published})")
            if found.ended:
                self._ended = True
                return
            if found.version is not None and found.version != self._published:
                self._published = found.version
                await self._tell(rollout_workflow_id(self._run.run_id), WAKE)
            if workflow.info().is_continue_as_new_suggested() and self._trained:
                self._leaving = True

    async def _tell(self, workflow_id: str, signal: str) -> None:
        """Something changed in the rows. Who is gone or not there yet looks at those by itself."""
        try:
            await workflow.get_external_workflow_handle(workflow_id).signal(signal)
        except ApplicationError:
            workflow.logger.info("%s has ended or not begun", workflow_id)

    def _say(self, text: str) -> None:
        self._why = text
        workflow.set_current_details(f"{text}\n\nengines hold version {self._published}")

    @workflow.signal(name=WAKE)
    def wake(self) -> None:
        """Something changed in the rows. The activities look at those by themselves."""

    @workflow.query
    def why(self) -> str:
        """What it does or waits for, in words."""
        return self._why
