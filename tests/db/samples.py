"""Small complete rows to start from: a run, admitted groups, episodes, turns, calls."""

import uuid
from typing import Any

from atropos.contracts.ids import EpisodeKey, GroupKey, weight_label
from atropos.contracts.limits import Limits
from atropos.contracts.messages import ToolCall, assistant, user
from atropos.contracts.reasons import FinishReason, StopReason
from atropos.contracts.records import CallRecord, EpisodeStart, NewGroup, PartialTurn, Sampled, TurnRecord, VersionSpan
from atropos.contracts.runfile import RunConfig, parse_run
from atropos.contracts.states import GroupState
from atropos.contracts.training import Preset
from atropos.db.admission import AdmissionState, admit
from atropos.db.batches import Claim, StepRow, claim_batch, commit_step
from atropos.db.endings import finish_episode
from atropos.db.engines import engine_id, put_engines
from atropos.db.episodes import save_turn, start_episode
from atropos.db.groups import GroupRow, close_group
from atropos.db.partial import prompt_digest
from atropos.db.publishing import add_first_version
from atropos.db.runs import NewEnvironment, create_run
from atropos.db.store import Store
from atropos.trainer.advantages import has_signal

LABEL = "sums"
ENGINE = engine_id("http://127.0.0.1:8000/v1")


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


async def admitted(store: Store, run_id: str, count: int = 1, **changes: Any) -> list[GroupRow]:
    async def propose(state: AdmissionState) -> list[NewGroup]:
        first, label = state.environments[0].next_draw, state.environments[0].label
        return [new_group(draw, environment=label, **changes) for draw in range(first, first + count)]

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


async def training_run(store: Store, *, groups: int = 2, steps: int = 100, batch: Any = None, **changes: Any) -> str:
    """A run with an engine and version 0, that trains on `groups` groups a step."""
    trainer = {"kind": "builtin", "steps": steps}
    run_id = await new_run(store, trainer=trainer, batch={"groups": groups, **(batch or {})}, **changes)
    await put_engines(store, run_id, run_config().engines)
    await add_first_version(store, run_id, weight_label(run_id, 0), "/models/tiny", None, {})
    return run_id


def versioned(
    run_id: str, version: int, index: int = 0, tokens: int = 3, *, life: str = "first", **changes: Any
) -> TurnRecord:
    """A turn that the run's engine sampled with a version."""
    spans = (VersionSpan(weight_label(run_id, version), version, 0, tokens, ENGINE, life),)
    return turn(index, tokens, **({"spans": spans, "engine_id": ENGINE, "incarnation": life} | changes))


async def played(store: Store, key: EpisodeKey, reward: float | None, version: int = 0) -> None:
    """An episode of one turn, from its start to its end."""
    await start_episode(store, beginning(key))
    await save_turn(store, key, versioned(key.run_id, version))
    await finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=reward)


async def closed(
    store: Store, run_id: str, rewards: tuple[float | None, ...] = (0.0, 1.0), version: int = 0
) -> GroupKey:
    """A group whose members have these rewards, closed as its workflow does it: filtered where it has no signal."""
    [group] = await admitted(store, run_id, size=len(rewards))
    members = [group.key.episode(member) for member in range(len(rewards))]
    for member, reward in zip(members, rewards, strict=True):
        await played(store, member, reward, version)
    await sealing(store, group.key, members)
    return group.key


async def sealing(store: Store, key: GroupKey, members: list[EpisodeKey], *, min_valid: int = 2) -> GroupState:
    def signal(rewards: Any) -> bool:
        return has_signal(Preset.GRPO, rewards)

    done = await close_group(store, key, members, GroupState.SEALED, None, None, min_valid=min_valid, has_signal=signal)
    return done.state


async def claimed(store: Store, run_id: str, batch_no: int = 0) -> Claim:
    claim = await claim_batch(store, run_id, batch_no, "me")
    assert claim is not None
    return claim


async def committed(store: Store, run_id: str, claim: Claim, **changes: Any) -> StepRow | None:
    step: dict[str, Any] = {"path": f"/checkpoints/{claim.step + 1}", "digest": "d1", "metrics": {"loss": 0.5}}
    return await commit_step(store, run_id, claim, **(step | changes))


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
