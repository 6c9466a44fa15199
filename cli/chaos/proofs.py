"""What shows afterwards that a kill hit work: records that the killed process could not write.

Invariant: no proof rests on what the trap itself had seen; that only says where to look.
"""

from collections.abc import Callable
from typing import Any

from .stage import Hit, Stage


async def was_tried_again(stage: Stage, hit: Hit) -> bool:
    """Temporal gave an activity of one of these episodes to a worker a second time."""
    return await _in_histories(stage, hit, lambda events: any(_attempt(event) > 1 for event in events))


async def was_timed_out(stage: Stage, hit: Hit) -> bool:
    """Temporal waited in vain for a workflow task of one of these episodes."""
    from temporalio.api.enums.v1 import EventType

    timed_out = EventType.EVENT_TYPE_WORKFLOW_TASK_TIMED_OUT
    return await _in_histories(stage, hit, lambda events: any(event.event_type == timed_out for event in events))


async def was_open_across(stage: Stage, hit: Hit) -> bool:
    """An activity of one of these episodes began before the kill and ended after it."""

    def across(events: list[Any]) -> bool:
        began = {event.event_id: _time(event) for event in events if _attempt(event)}
        ends = [
            (event.activity_task_completed_event_attributes.started_event_id, _time(event))
            for event in events
            if event.HasField("activity_task_completed_event_attributes")
        ]
        return any(began[start] < hit.at.timestamp() < end for start, end in ends if start in began)

    return await _in_histories(stage, hit, across)


async def was_sampled_again(stage: Stage, hit: Hit) -> bool:
    """The journal has one of these calls twice."""
    stage.journal.read()
    return any(stage.journal.tries(place) > 1 for place in hit.places)


async def was_fenced(stage: Stage, hit: Hit) -> bool:
    """The batch was committed under a newer fence than the killed trainer's."""
    _, batch, _, fence = hit.items[0].split()
    found = await stage.rows.all(
        "SELECT fence FROM train_steps WHERE run_id = %(run)s AND batch_no = %(batch)s", {"batch": int(batch)}
    )
    return bool(found) and found[0][0] > int(fence)


async def was_decided(stage: Stage, hit: Hit) -> bool:
    """Postgres, which called one of these transactions in progress, knows now whether it happened.

    One that was about to commit may have reached the disk.
    """
    found = await stage.rows.all(
        "SELECT pg_xact_status(one::xid8) FROM unnest(%(ids)s::text[]) AS one", {"ids": list(hit.items)}
    )
    return any(row[0] in ("aborted", "committed") for row in found)


async def _in_histories(stage: Stage, hit: Hit, shows: Callable[[list[Any]], bool]) -> bool:
    for workflow_id in hit.items:
        if shows(await stage.history(workflow_id)):
            return True
    return False


def _attempt(event: Any) -> int:
    """Of an event that an activity began; 0: it is another."""
    begun = event.HasField("activity_task_started_event_attributes")
    return event.activity_task_started_event_attributes.attempt if begun else 0


def _time(event: Any) -> float:
    return float(event.event_time.ToMicroseconds()) / 1e6
