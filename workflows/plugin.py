"""The one plugin that client, worker, replayer and tests share.

Invariant: converter and sandbox rules are the same wherever a history is written or read. Payloads leave out fields
that were not set, which keeps histories small; our models ignore fields they do not know, so builds can differ.
"""

import dataclasses
from collections.abc import Callable

from temporalio.contrib.pydantic import PydanticPayloadConverter, ToJsonOptions, pydantic_data_converter
from temporalio.plugin import SimplePlugin
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from .episode import EpisodeWorkflow
from .evaluation import EvaluationWorkflow
from .group import GroupWorkflow
from .rescore import RescoreWorkflow
from .rollout import RolloutWorkflow
from .run import RunWorkflow
from .trainer import TrainerWorkflow

WORKFLOWS = (
    RunWorkflow,
    RolloutWorkflow,
    GroupWorkflow,
    EpisodeWorkflow,
    EvaluationWorkflow,
    TrainerWorkflow,
    RescoreWorkflow,
)
"""Every workflow a worker serves and a replayer knows."""


class CompactPayloadConverter(PydanticPayloadConverter):
    """Pydantic JSON without the fields nobody set."""

    def __init__(self) -> None:
        super().__init__(ToJsonOptions(exclude_unset=True))


DATA_CONVERTER = dataclasses.replace(pydantic_data_converter, payload_converter_class=CompactPayloadConverter)


class _Runner(SandboxedWorkflowRunner):
    """The sandbox without serialization contexts, which our converter does not have.

    The SDK asks a workflow for the context of every payload, and the sandbox compiles and runs code to answer: a sixth
    of a workflow worker's time for an answer that changes nothing.
    """

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        instance = super().create_instance(det)
        instance.get_serialization_context = _no_context  # type: ignore[method-assign]
        return instance


def _no_context(command_info: object) -> None:
    return None


def _runner(passed_through: tuple[str, ...]) -> Callable[[WorkflowRunner | None], WorkflowRunner]:
    restrictions = SandboxRestrictions.default.with_passthrough_modules(*passed_through)
    return lambda existing: _Runner(restrictions=restrictions)


class AtroposPlugin(SimplePlugin):
    """Give it to `Client.connect(plugins=[…])`; workers made from that client inherit it. Also for `Replayer`.

    Our modules are loaded once per process: to load the workflows again for each instance takes a tenth of a workflow
    worker's time. `strict` loads them inside the sandbox, which then refuses what is not deterministic; the recorded
    histories are replayed that way.
    """

    def __init__(self, *, strict: bool = False) -> None:
        passed_through = ("atropos.contracts",) if strict else ("atropos.contracts", "atropos.workflows")
        super().__init__("atropos", data_converter=DATA_CONVERTER, workflow_runner=_runner(passed_through))
