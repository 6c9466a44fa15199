"""Small complete rows to start from: a run, admitted groups, episodes, turns, calls."""

import uuid
from typing import Any

from atropos.contracts.ids import EpisodeKey
from atropos.contracts.limits import Limits
from atropos.contracts.messages import ToolCall, assistant, user
from atropos.contracts.reasons import FinishReason
from atropos.contracts.records import CallRecord, EpisodeStart, NewGroup, PartialTurn, Sampled, TurnRecord, VersionSpan
from atropos.contracts.runfile import RunConfig, parse_run
from atropos.db.admission import AdmissionState, admit
from atropos.db.episodes import start_episode
from atropos.db.groups import GroupRow
from atropos.db.partial import prompt_digest
from atropos.db.runs import NewEnvironment, create_run
from atropos.db.store import Store

LABEL = "sums"


def run_config(**changes: Any) -> RunConfig:
    document = {
        "name": "try",
        "model": {"path": "tiny"},
        "engines": [{"url": "http://127.0.0.1:8000/v1"}],
        "environments": [{"id": LABEL, "group_size": 4}],
        "budget": {"groups": 100},
    }
    return parse_run(document | changes)


def mixture(*labels: str) -> list[NewEnvironment]:
    return [NewEnvironment(label, label, "v1", {"digits": 3}, 4, 1.0, Limits(turns=6)) for label in labels or (LABEL,)]


async def new_run(store: Store, *labels: str, **changes: Any) -> str:
    run_id = f"run/{uuid.uuid4().hex[:8]}"
    await create_run(store, run_id, run_config(**changes), mixture(*labels))
    return run_id


def new_group(
    draw: int, *, environment: str = LABEL, key: str | None = None, size: int = 4, **changes: Any
) -> NewGroup:
    fields: dict[str, Any] = {
        "environment": environment,
        "split": "train",
        "task_key": key or f"task-{draw}",
        "task_data": {"question": draw},
        "task_info": {},
        "draw": draw,
        "size": size,
    }
    return NewGroup(**(fields | changes))


async def admitted(store: Store, run_id: str, count: int = 1) -> list[GroupRow]:
    async def propose(state: AdmissionState) -> list[NewGroup]:
        first = state.environments[0].next_draw
        return [new_group(draw, environment=state.environments[0].label) for draw in range(first, first + count)]

    return await admit(store, run_id, propose)


async def started(store: Store, run_id: str | None = None, *, member: int = 0) -> EpisodeKey:
    """A running episode of a new group, of a new run unless one is named."""
    [group] = await admitted(store, run_id or await new_run(store))
    key = group.key.episode(member)
    await start_episode(store, beginning(key))
    return key


def beginning(key: EpisodeKey, **changes: Any) -> EpisodeStart:
    fields: dict[str, Any] = {"prompt": (user("1 + 1?"),), "state": {"calls": 0}, "environment_version": "v1"}
    return EpisodeStart(key=key, **(fields | changes))


def turn(index: int = 0, tokens: int = 3, **changes: Any) -> TurnRecord:
    fields: dict[str, Any] = {
        "turn": index,
        "segment": 0,
        "opens_segment": index == 0,
        "message": assistant("let me see", (tool_call(index),)),
        "prompt_delta": [7, 8],
        "sampled": list(range(tokens)),
        "logprobs": [-0.5] * tokens,
        "mask": [1] * tokens,
        "finish": FinishReason.STOP,
        "spans": (VersionSpan("base", 0, 0, tokens),) if tokens else (),
        "temperature": 1.0,
        "engine_id": "engine",
        "incarnation": "first",
        "request_id": f"request-{index}",
    }
    return TurnRecord(**(fields | changes))


def partial(tokens: int = 3, *, prompt: tuple[int, ...] = (7, 8), first: int = 0) -> PartialTurn:
    ids = list(range(first, first + tokens))
    spans = (VersionSpan("base", 0, 0, tokens, "engine", "first"),)
    return PartialTurn(prompt_digest(prompt), Sampled(ids, [-0.5] * tokens, spans, "engine", "first"))


def tool_call(index: int = 0) -> ToolCall:
    return ToolCall(id=f"call-{index}", name="add", arguments={"a": 1, "b": index})


def call(turn_index: int = 0, index: int = 0, **changes: Any) -> CallRecord:
    fields: dict[str, Any] = {"call": tool_call(turn_index), "content": "2", "seconds": 0.25}
    return CallRecord(turn=turn_index, index=index, **(fields | changes))


async def rows(store: Store, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """Raw SQL, as a person in psql would ask; `%s` for values."""
    async with store.direct() as connection:
        return await (await connection.execute(query.encode(), values)).fetchall()


async def late(store: Store, key: EpisodeKey) -> list[tuple[Any, ...]]:
    """(kind, record) of everything that came too late for an episode, in order."""
    return await rows(
        store,
        "SELECT kind, record FROM late_results"
        " WHERE run_id = %s AND group_no = %s AND member = %s AND attempt = %s ORDER BY seq",
        key.run_id,
        key.group_no,
        key.member,
        key.attempt,
    )
