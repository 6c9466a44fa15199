"""Engines of a run without trainer that hold other weights than the run samples from.

Invariant: such a run samples from what its engines began with and from nothing else. An engine that is found to hold
something else (it was restarted, or somebody loaded it) gets no work, and its row says what a person can do. Where an
ended run made the weights, its rows say where they are; then what publishes for runs that train gives them back, and
keeps them there until the run has ended. Only the oldest of the runs that use an engine may do so: two would take it
from each other for ever.
"""

from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from temporalio.exceptions import WorkflowAlreadyStartedError

from ..contracts import search
from ..contracts.ids import rollout_workflow_id, trainer_workflow_id
from ..contracts.queues import WORKFLOWS
from ..contracts.states import EngineState
from ..contracts.workflows import TRAINER_WORKFLOW, WAKE, TrainerInput
from ..db.engines import engines_of, set_engine_state
from ..db.publishing import Wanted, wanted
from ..db.registration import first_user
from .services import Services
from .waking import wake


async def set_aside(services: Services, run_id: str, engine_id: str, label: str) -> None:
    """The engine sampled with weights called `label`, of which the run knows nothing. Does nothing for runs that
    train: whoever publishes finds that out and loads it."""
    if (await services.run(run_id)).config.trains:
        return
    target = await wanted(services.store, run_id)
    for record in await engines_of(services.store, run_id):
        seen = EngineState(record.state)
        if target is None or record.engine_id != engine_id or seen not in (EngineState.READY, EngineState.DOWN):
            continue
        user = await first_user(services.store, record.url)
        reason = why_set_aside(run_id, label, target, user)
        await set_engine_state(services.store, run_id, engine_id, EngineState.QUARANTINED, reason, seen=seen)
        await keep_restored(services, run_id)
        await wake(services, rollout_workflow_id(run_id), WAKE)


def why_set_aside(run_id: str, label: str, target: Wanted, first: str | None) -> str:
    """What the engine holds, what it should hold, and what becomes of that. `first`: the oldest run that uses it."""
    says = f"it holds weights {label!r}, and this run samples from {target.label!r}"
    if target.path is None:
        return (
            f"{says}, of which nobody knows where they are: load those into it under that name, or end this run with "
            f"`atropos run cancel {run_id}` and start it again"
        )
    if first not in (None, run_id):
        return (
            f"{says}, which cannot be loaded into it while {first}, which began before, uses it too: end that run or "
            f"this one with `atropos run cancel`"
        )
    return f"{says}, which is being loaded into it again from {target.path}"


async def keep_restored(services: Services, run_id: str) -> None:
    """Have the engines of a run without trainer kept at what it samples from, until it ends. Doing so twice is doing
    it once."""
    attributes = [SearchAttributePair(SearchAttributeKey.for_keyword(search.RUN), run_id)]
    try:
        await services.client.start_workflow(
            TRAINER_WORKFLOW,
            TrainerInput(run_id=run_id, builtin=False, finished=True),
            id=trainer_workflow_id(run_id),
            task_queue=WORKFLOWS,
            search_attributes=TypedSearchAttributes(attributes),
        )
    except WorkflowAlreadyStartedError:
        return
