"""How each component is caught in the act: freeze it, look, and kill it where something is in flight, else let it go.

Invariant: a kill lands only where the component was seen in the middle of work, and what was seen is looked up again
afterwards in a record that the killed process could not write: Temporal's history, the engine's journal, the fence of
the committed step, Postgres' own word about the transaction.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import datetime
from typing import Any, Final

from ...contracts.activities_training import TRAIN_STEP
from ...contracts.ids import EpisodeKey, trainer_workflow_id
from .journal import Place
from .plan import Cell
from .stage import Hit, Stage, frozen, kill

_SETTLES_S: Final = 0.4
"""What a frozen or dead process had handed over is stored or noticed within this."""
_LOOKED_AT: Final = 48
"""Workflows asked about at once."""
_NAMED: Final = 12
"""Ids kept for the proof."""


async def while_sampling_worker(stage: Stage, cell: Cell, least: int) -> Hit | None:
    """The worker that calls the model, while tokens that it has not stored are sampled for it."""
    process = stage.ready(cell.part)
    if process is None or len(await stage.open_calls()) < least:
        return None
    with frozen(process):
        if len(await stage.open_calls()) < least:
            return None
        at = await kill(process)
    await asyncio.sleep(_SETTLES_S)  # the engine notices that nobody waits any more
    places = await stage.open_calls()
    return _hit_calls(stage, at, process, places)


async def while_sampling_engine(stage: Stage, cell: Cell, least: int) -> Hit | None:
    """The engine, in the middle of answers."""
    process = stage.ready(cell.part)
    if process is None or len(await stage.open_calls()) < least:
        return None
    with frozen(process):
        await asyncio.sleep(_SETTLES_S)  # what it had answered already is stored now
        places = await stage.open_calls()
        if len(places) < least:
            return None
        at = await kill(process)
    return _hit_calls(stage, at, process, places)


async def while_pending(stage: Stage, cell: Cell, least: int) -> Hit | None:
    """Temporal, while it waits for activities that have begun; their worker stands still until it is dead."""
    process, worker = stage.ready(cell.part), stage.ready("worker-activities")
    if process is None or worker is None:
        return None
    with frozen(worker):
        places = await stage.open_calls()
        described = await _described(stage, _episodes(stage, places))
        begun = [one for one, found in described if _begun(found)]
        if len(begun) < least:
            return None
        at = await kill(process)
    return Hit(at, process, tuple(begun[:_NAMED]), tuple(places), stage.tokens(places))


async def in_workflow_task(stage: Stage, cell: Cell, least: int) -> Hit | None:
    """The workflow worker, with workflow tasks that it has begun."""
    return await _in_task(stage, cell, least, lambda: stage.rows.running(_LOOKED_AT), _any_task)


async def between(stage: Stage, cell: Cell, least: int) -> Hit | None:
    """The workflow worker, when a local activity's row is there and its workflow task does not say so yet."""
    return await _in_task(stage, cell, 1, lambda: stage.rows.answered(8), _unreported)


async def in_train_step(stage: Stage, cell: Cell, least: int) -> Hit | None:
    """The trainer, while it holds a batch and its activity has begun."""
    process, batch = stage.ready(cell.part), await _claimed(stage)
    if process is None or batch is None:
        return None
    with frozen(process):
        described = await stage.describe(trainer_workflow_id(stage.run_id))
        if batch != await _claimed(stage) or not _begun(described, TRAIN_STEP.name):
            return None
        at = await kill(process)
    return Hit(at, process, (f"batch {batch[0]} fence {batch[1]}",))


async def in_transaction(stage: Stage, cell: Cell, least: int) -> Hit | None:
    """Postgres with every process of it at once, while transactions that have written are open."""
    import psycopg

    process = stage.ready(cell.part)
    if process is None:
        return None
    backends = (
        "SELECT pid, CASE pg_xact_status(backend_xid::text::xid8) WHEN 'in progress' THEN backend_xid::text END"
        " FROM pg_stat_activity WHERE backend_type = 'client backend'"
    )
    try:
        async with await psycopg.AsyncConnection.connect(stage.database_url, autocommit=True) as connection:
            mine = connection.info.backend_pid
            others = [row[0] for row in await stage.rows.all(backends, through=connection) if row[0] != mine]
            with ExitStack() as thaw:
                for pid in others:
                    thaw.callback(_signal, pid, signal.SIGCONT)
                    _signal(pid, signal.SIGSTOP)
                found = await stage.rows.all(backends, through=connection)
                writing = [row for row in found if row[1] is not None and row[0] != mine]
                if not writing:
                    return None
                places = await stage.open_calls(connection)
                at = await _kill_server(process, [*others, mine])
    except psycopg.OperationalError:
        return None  # it was on its way down already
    return Hit(at, process, tuple(row[1] for row in writing), tuple(places), stage.tokens(places))


async def _in_task(
    stage: Stage,
    cell: Cell,
    least: int,
    candidates: Callable[[], Awaitable[list[EpisodeKey]]],
    caught: Callable[[Stage, str, Any], Awaitable[bool]],
) -> Hit | None:
    process = stage.ready(cell.part)
    if process is None:
        return None
    with frozen(process):
        described = await _described(stage, await candidates())
        found = [one for one, description in described if await caught(stage, one, description)]
        if len(found) < least:
            return None
        at = await kill(process)
    return Hit(at, process, tuple(found[:_NAMED]))


async def _any_task(stage: Stage, workflow_id: str, description: Any) -> bool:
    from temporalio.api.enums.v1 import PendingWorkflowTaskState

    begun = PendingWorkflowTaskState.PENDING_WORKFLOW_TASK_STATE_STARTED
    return bool(description.HasField("pending_workflow_task") and description.pending_workflow_task.state == begun)


async def _unreported(stage: Stage, workflow_id: str, description: Any) -> bool:
    """The turn is answered in rows, and behind the model's answer history holds no local activity."""
    from temporalio.api.enums.v1 import EventType

    if not await _any_task(stage, workflow_id, description):
        return False
    kinds = [event.event_type for event in await stage.history(workflow_id)]
    heard = max(
        (at for at, kind in enumerate(kinds) if kind == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED), default=-1
    )
    return heard >= 0 and EventType.EVENT_TYPE_MARKER_RECORDED not in kinds[heard:]


async def _claimed(stage: Stage) -> tuple[int, int] | None:
    """The batch that a trainer has taken and not committed, with its fence."""
    query = "SELECT batch_no, fence FROM batches WHERE run_id = %(run)s AND state = 'leased' AND fence > 0"
    found = await stage.rows.all(query)
    return (found[0][0], found[0][1]) if found else None


async def _described(stage: Stage, episodes: Iterable[EpisodeKey]) -> list[tuple[str, Any]]:
    ids = [key.workflow_id for key in episodes][:_LOOKED_AT]
    found = await asyncio.gather(*(stage.describe(one) for one in ids))
    return [(one, description) for one, description in zip(ids, found, strict=True) if description is not None]


def _begun(description: Any, name: str | None = None) -> bool:
    """Whether a worker has begun an activity of this workflow (called `name`) that Temporal waits for."""
    from temporalio.api.enums.v1 import PendingActivityState

    return description is not None and any(
        one.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
        and (name is None or one.activity_type.name == name)
        for one in description.pending_activities
    )


def _episodes(stage: Stage, places: Iterable[Place]) -> list[EpisodeKey]:
    return list(dict.fromkeys(stage.episode(place) for place in places))


def _hit_calls(stage: Stage, at: datetime, process: Any, places: list[Place]) -> Hit:
    items = tuple(key.workflow_id for key in _episodes(stage, places)[:_NAMED])
    return Hit(at, process, items, tuple(places), stage.tokens(places))


async def _kill_server(process: Any, backends: Iterable[int]) -> datetime:
    """The postmaster first: it would answer the death of a backend with an orderly restart."""
    at = await kill(process)
    for pid in backends:
        _signal(pid, signal.SIGKILL)
    return at


def _signal(pid: int, signum: int) -> None:
    """To a process that its server named a moment ago."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
