"""Admission with its surroundings: draw tasks from environments, ask engines whether they are there.

Invariant: the decision itself is `contracts.admission` over counts read under the run row's lock; this module only
brings the tasks and writes nothing of its own.
"""

import asyncio
from dataclasses import dataclass

from ..contracts.admission import next_environment, room, room_training, task_index
from ..contracts.records import EngineRecord, NewGroup
from ..contracts.runfile import RunConfig
from ..contracts.states import EngineState, GroupState
from ..contracts.training import TrainerKind
from ..db.admission import AdmissionState, admission_state, admit
from ..db.engines import engines_of, set_engine_state
from ..db.groups import GroupRow
from ..db.runs import RunRow
from ..db.store import Store
from ..environments.loaded import LoadedEnvironment
from ..inference.engines import EngineAddress
from ..inference.errors import EngineFailure
from .restoring import keep_restored
from .services import Services

PAGE = 8
"""Groups a call admits at most, and at most half of what may be in flight: steadily, not in waves."""


@dataclass(frozen=True)
class Admitted:
    """What was admitted. `more`: there is room for another page; `fruitless`: no draw led to a group."""

    groups: list[GroupRow]
    open: int
    more: bool
    fruitless: bool
    done: bool
    waiting_for: str | None = None


async def admit_some(services: Services, row: RunRow) -> Admitted:
    """Admit up to a page of groups. Raises EnvironmentProblem where an environment cannot make its task."""
    environments = {label: await services.environment(row.run_id, label) for label in row.weights}
    seen: list[tuple[AdmissionState, int]] = []

    async def propose(state: AdmissionState) -> list[NewGroup]:
        places = _places(row, state)
        seen.append((state, places))
        return await _draw(row, state, environments, min(places, page(state.concurrency)))

    groups = await admit(services.store, row.run_id, propose)
    state, places = seen[-1]
    open_after = state.open + len(groups)
    done = finished(row, state) and open_after == 0
    fruitless = bool(places) and not groups
    waiting_for = _why_full(row, state) if not places and not done else None
    return Admitted(groups, open_after, places > len(groups), fruitless, done, waiting_for)


def page(concurrency: int) -> int:
    """Groups to admit at once."""
    return max(1, min(PAGE, concurrency // 2))


def _places(row: RunRow, state: AdmissionState) -> int:
    if finished(row, state):
        return 0
    config = row.config
    if not config.trains:
        return room(
            concurrency=state.concurrency, running=state.busy, counted=state.counted, budget=config.budget.groups
        )
    if state.published < 0:
        return 0
    places = room_training(
        concurrency=state.concurrency,
        running=state.busy,
        batch=config.batch.groups,
        ahead=config.staleness.max,
        unconsumed=unconsumed(state),
        unpublished=state.unpublished,
        wanted=(config.trainer.steps - state.committed) * config.batch.groups,
    )
    return places if config.budget.groups is None else min(places, max(0, config.budget.groups - state.counted))


def unconsumed(state: AdmissionState) -> int:
    """Training groups that a step may still consume. Those that wait for people have freed their place."""
    held = (GroupState.ADMITTED, GroupState.RUNNING, GroupState.SEALED, GroupState.LEASED)
    return sum(load.states.get(one, 0) for load in state.environments for one in held)


def finished(row: RunRow, state: AdmissionState) -> bool:
    """Whether nothing more may be admitted, ever: the steps are done, or the budget is spent."""
    config = row.config
    return (config.trains and state.committed >= config.trainer.steps) or budget_spent(config, state)


async def rollouts_over(store: Store, run_id: str, config: RunConfig) -> bool:
    """Whether a run with a budget will bring no further batch: it is spent, and too little is left of it."""
    if config.budget.unlimited:
        return False
    state = await admission_state(store, run_id)
    return budget_spent(config, state) and unconsumed(state) < config.batch.groups


def _why_full(row: RunRow, state: AdmissionState) -> str | None:
    """Why a run with a trainer admits nothing although it could run more; None where enough is in flight."""
    if not row.config.trains or state.open:
        return None
    if state.published < 0:
        loading = "the first weights are being loaded into the engines"
        return loading if row.config.trainer.kind is TrainerKind.BUILTIN else f"its trainer has not begun, or {loading}"
    if state.unpublished:
        return f"version {state.committed} is on its way to the engines"
    return f"the trainer works on step {state.committed}"


def budget_spent(config: RunConfig, state: AdmissionState) -> bool:
    """Whether nothing more may be admitted, ever. Groups in flight still finish."""
    budget = config.budget
    hours = (state.now - state.started_at).total_seconds() / 3600
    return (
        (budget.groups is not None and state.counted >= budget.groups)
        or (budget.sampled_tokens is not None and state.sampled_tokens >= budget.sampled_tokens)
        or (budget.hours is not None and hours >= budget.hours)
    )


async def _draw(
    row: RunRow, state: AdmissionState, environments: dict[str, LoadedEnvironment], count: int
) -> list[NewGroup]:
    counted = {load.label: load.counted for load in state.environments}
    draws = {load.label: load.next_draw for load in state.environments}
    sizes = {load.label: load.group_size for load in state.environments}
    weights = {load.label: load.weight for load in state.environments}
    groups = []
    for _ in range(count):
        label = next_environment(weights, counted)
        environment = environments[label]
        index = task_index(draws[label], await environment.size("train"), row.config.seed)
        task = await environment.make_task("train", index)
        groups.append(
            NewGroup(
                environment=label,
                split="train",
                task_key=task.key,
                task_data=task.plain_data(),
                task_info=dict(task.info),
                draw=draws[label],
                size=sizes[label],
            )
        )
        draws[label] += 1
        counted[label] += 1
    return groups


async def engine_outage(services: Services, run_id: str) -> str | None:
    """Why no engine of the run can take work, in words; None where one can. Asks each and writes what it found."""
    records = await engines_of(services.store, run_id)
    quarantined = any(record.state == EngineState.QUARANTINED for record in records)
    if quarantined and not (await services.run(run_id)).config.trains:
        await keep_restored(services, run_id)
    usable = [record for record in records if record.state in (EngineState.READY, EngineState.DOWN)]
    found = await asyncio.gather(*(_probe(services, record) for record in usable))
    problems = [f"{record.url}: {record.reason or record.state}" for record in records if record not in usable]
    answering = 0
    for record, problem in zip(usable, found, strict=True):
        state = EngineState.READY if problem is None else EngineState.DOWN
        if state != record.state:
            # Whoever publishes may have withdrawn or quarantined it meanwhile; that stands.
            seen = EngineState(record.state)
            await set_engine_state(services.store, run_id, record.engine_id, state, problem, seen=seen)
        if problem is None:
            answering += 1
        else:
            problems.append(problem)
    if answering:
        return None
    return ("no engine answers: " if usable else "no engine may be given work: ") + "; ".join(problems)


async def _probe(services: Services, record: EngineRecord) -> str | None:
    secret = services.secret(record.api_key_env) if record.api_key_env else None
    if record.api_key_env and not secret:
        return f"{record.url}: its key is in {record.api_key_env}, which the workers' environment does not have"
    engine = services.connect(EngineAddress.of(record, secret))
    try:
        await engine.health()
    except EngineFailure as failure:
        return failure.message
    finally:
        await engine.close()
    return None
