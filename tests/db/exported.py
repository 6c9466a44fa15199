"""Runs with something of everything that an export chooses by, and exports as plain data."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from atropos.contracts.episode import Score
from atropos.contracts.ids import GroupKey, weight_label
from atropos.contracts.messages import Message, assistant, user
from atropos.contracts.reasons import StopReason
from atropos.contracts.records import NewGroup
from atropos.db.admission import AdmissionState, admit
from atropos.db.endings import finish_episode
from atropos.db.episodes import start_episode
from atropos.db.exports import ExportRow, Source, Wanted, opened_export
from atropos.db.publishing import add_first_version
from atropos.db.runs import get_run
from atropos.db.scores import save_scores
from atropos.db.store import Store
from atropos.db.turns import save_turn

from .samples import beginning, new_group, new_run, rows, sealing, versioned


async def gallery(store: Store) -> tuple[str, str]:
    """Two runs: two environments, versions 0 to 3, rewards from -1 to 1, copies, a failed group and an evaluation."""
    first = await trained(store, "sums", "words")
    await group(store, first, "sums", [0.0, 1.0, 0.5, None], 0)
    await group(store, first, "sums", [-1.0, 0.25, 0.25, 0.75], 1, said="the same")
    await group(store, first, "words", [0.5, -0.5], 2, task="task-0")
    await group(store, first, "words", [1.0, 1.0, 0.0], 3, said="the same")
    await group(store, first, "sums", [0.75, 0.0], 1)
    failed = await group(store, first, "words", [1.0, 0.0], 1)
    judged = await group(store, first, "sums", [1.0, 0.5, 0.0], 2)
    second = await trained(store, "sums", "words")
    await group(store, second, "sums", [0.5, 1.0, 0.125], 1)
    await group(store, second, "words", [1.0, 0.5], 0, said="the same")
    async with store.direct() as connection:
        await connection.execute(
            "UPDATE groups SET state = 'failed', failure = 'engine' WHERE (run_id, group_no) = (%s, %s)",
            (first, failed.group_no),
        )
        await connection.execute(
            "INSERT INTO evaluations (run_id, name, environment, split, tasks, samples, sampling)"
            " VALUES (%s, 'last', 'sums', 'eval', 1, 3, '{}')",
            (first,),
        )
        await connection.execute(
            "UPDATE groups SET kind = 'eval', evaluation = 'last' WHERE (run_id, group_no) = (%s, %s)",
            (first, judged.group_no),
        )
        await connection.execute(
            "UPDATE episodes SET ended_at = '2026-01-01+00'::timestamptz + group_no * interval '1 day'"
            " + member * interval '1 hour' WHERE run_id = ANY(%s)",
            ([first, second],),
        )
    return first, second


async def trained(store: Store, *environments: str) -> str:
    """A run that has a policy to train."""
    run_id = await new_run(store, *environments, trainer={"kind": "builtin", "steps": 9}, batch={"groups": 2})
    row = await get_run(store, run_id)
    assert row is not None
    await add_first_version(store, run_id, weight_label(run_id, 0), "/models/tiny", None, {})
    return run_id


async def group(
    store: Store,
    run_id: str,
    environment: str,
    rewards: Sequence[float | None],
    version: int = 0,
    *,
    said: str | None = None,
    task: str | None = None,
    prompt: tuple[Message, ...] = (user("1 + 1?"),),
    messages: Sequence[Message] = (),
) -> GroupKey:
    """A closed group; its members say different things unless it is said what they say."""

    async def propose(state: AdmissionState) -> list[NewGroup]:
        [load] = [one for one in state.environments if one.label == environment]
        return [new_group(load.next_draw, environment=environment, key=task, size=len(rewards))]

    [made] = await admit(store, run_id, propose)
    keys = [made.key.episode(member) for member in range(len(rewards))]
    for key, reward in zip(keys, rewards, strict=True):
        message = messages[key.member] if messages else assistant(said or f"{run_id} {key.group_no} {key.member}")
        await start_episode(store, beginning(key, prompt=prompt))
        await save_turn(store, key, versioned(run_id, version, message=message))
        await save_scores(store, key, [Score(name="right", value=reward, weight=1.0)], "s1")
        await finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=reward)
    await sealing(store, made.key, keys)
    return made.key


async def exported(store: Store, wanted: Wanted, start: int = 0, as_of: datetime | None = None) -> list[ExportRow]:
    async with opened_export(store, wanted, as_of) as chosen:
        found = [row async for row in chosen.rows(start, 3)]
        assert len(found) == chosen.total - start
        return found


async def keys(store: Store, **wanted: Any) -> list[tuple[Any, ...]]:
    return [row.key for row in await exported(store, Wanted(**wanted))]


async def pairs(store: Store, **wanted: Any) -> list[tuple[Any, ...]]:
    return await keys(store, source=Source.PAIRS, **wanted)


def lineage(row: ExportRow) -> dict[str, Any]:
    return dict(json.loads(row.lineage))


__all__ = ["exported", "gallery", "group", "keys", "lineage", "pairs", "rows", "trained"]
