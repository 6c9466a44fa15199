"""Inference servers of a run, and the versions of the weights they serve.

Invariant: an engine's id is a function of its URL, its state moves only along the arrows of `contracts.states`, and a
label names one version for ever.
"""

import hashlib
import re
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from ..contracts.engines import EngineConfig, HostedOptions
from ..contracts.records import EngineRecord
from ..contracts.states import LIVE_RUNS, TRANSITIONS, EngineState, IllegalTransition, sources
from .encoding import clean, clean_or_none
from .errors import Unknown
from .models import Engine, PolicyVersion, Run
from .store import Store


def engine_id(url: str) -> str:
    """Host and port for people, and eight digits of a hash that tell paths apart: `gpu0-8000-1a2b3c4d`."""
    parts = urlsplit(url.rstrip("/"))
    place = re.sub(r"[^A-Za-z0-9.]+", "-", parts.netloc.rpartition("@")[2])
    return f"{place}-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:8]}"


async def put_engines(store: Store, run_id: str, engines: tuple[EngineConfig, ...]) -> None:
    """Register engines as `ready`; of known ones everything but their state is brought up to date."""
    async with store.begin() as connection:
        await insert_engines(connection, run_id, engines)


async def insert_engines(
    connection: AsyncConnection,
    run_id: str,
    engines: tuple[EngineConfig, ...],
    state: EngineState = EngineState.READY,
    reason: str | None = None,
) -> None:
    """The same, in the caller's transaction. New ones begin in `state`, and so do those that a person had taken out."""
    for engine in sorted(engines, key=lambda one: one.url):
        described: dict[str, Any] = {
            "kind": engine.kind,
            "url": engine.url,
            "concurrency": engine.concurrency,
            "api_key_env": engine.api_key_env,
            "hosted": None if engine.hosted is None else engine.hosted.model_dump(mode="json"),
        }
        await connection.execute(
            upsert(Engine)
            .values(run_id=run_id, engine_id=engine_id(engine.url), state=state, reason=reason, **described)
            .on_conflict_do_update(index_elements=["run_id", "engine_id"], set_=described)
        )
        if state in TRANSITIONS[EngineState][EngineState.DRAINED]:
            out = (EngineState.DRAINED, EngineState.REMOVED)
            await connection.execute(
                update(Engine)
                .where(Engine.run_id == run_id, Engine.engine_id == engine_id(engine.url), Engine.state.in_(out))
                .values(state=state, reason=reason, changed_at=func.now())
            )


async def engines_of(store: Store, run_id: str) -> list[EngineRecord]:
    """The engines of a run, removed ones included, in order of their ids."""
    async with store.begin() as connection:
        rows = await connection.execute(
            select(Engine.__table__).where(Engine.run_id == run_id).order_by(Engine.engine_id)
        )
        return [
            EngineRecord(
                engine_id=row.engine_id,
                kind=row.kind,
                url=row.url,
                concurrency=row.concurrency,
                api_key_env=row.api_key_env,
                state=row.state,
                reason=row.reason,
                weight_label=row.weight_label,
                incarnation=row.incarnation,
                hosted=None if row.hosted is None else HostedOptions.model_validate(row.hosted),
            )
            for row in rows
        ]


async def engines_in_use(store: Store) -> list[tuple[str, str]]:
    """URLs of the engines that live runs name, each with the newest such run's id."""
    live = (
        select(Engine.url, Engine.run_id)
        .join(Run, Run.run_id == Engine.run_id)
        .where(Run.state.in_(LIVE_RUNS), Engine.state != EngineState.REMOVED)
        .order_by(Run.created_at)
    )
    async with store.begin() as connection:
        newest = {row.url.rstrip("/"): row.run_id for row in await connection.execute(live)}
    return sorted(newest.items())


async def set_engine_state(
    store: Store,
    run_id: str,
    engine_id: str,
    state: EngineState,
    reason: str | None,
    weight_label: str | None = None,
    incarnation: str | None = None,
    *,
    seen: EngineState | None = None,
) -> EngineState:
    """Move an engine to `state` and note what it reported (None: as before). Writes nothing where nothing changes.

    `seen`: only where it is still in this state, in which whoever decides has seen it; otherwise what it is in now is
    returned and nothing written.
    Raises Unknown, or IllegalTransition where no arrow leads from its state to `state`.
    """
    new: dict[str, Any] = {"state": state, "reason": clean_or_none(reason)}
    new |= {} if weight_label is None else {"weight_label": clean(weight_label)}
    new |= {} if incarnation is None else {"incarnation": clean(incarnation)}
    mine = (Engine.run_id == run_id, Engine.engine_id == engine_id)
    async with store.begin() as connection:
        await connection.execute(
            update(Engine)
            .where(
                *mine,
                or_(Engine.state == state, Engine.state.in_(sources(state))) if seen is None else Engine.state == seen,
                or_(*(getattr(Engine, name).is_distinct_from(value) for name, value in new.items())),
            )
            .values(**new, changed_at=func.now())
        )
        stored = await connection.scalar(select(Engine.state).where(*mine))
    if stored is None:
        raise Unknown(f"The run {run_id} has no engine {engine_id}.")
    if stored != state and seen is not None:
        return EngineState(stored)
    if stored != state:
        raise IllegalTransition(f"The engine {engine_id} is {stored} and cannot become {state}.")
    return state


async def put_version(store: Store, run_id: str, version: int, label: str, path: str | None = None) -> int | None:
    """Write down that a version of the weights exists, unless its number or label is taken.

    Returns the version that `label` names now: `version`, an older one, or None where the number has another label.
    """
    async with store.begin() as connection:
        await connection.execute(
            upsert(PolicyVersion)
            .values(run_id=run_id, version=version, label=label, path=path)
            .on_conflict_do_nothing()
        )
        return await connection.scalar(
            select(PolicyVersion.version).where(PolicyVersion.run_id == run_id, PolicyVersion.label == label)
        )


async def versions(store: Store, run_id: str) -> dict[str, int]:
    """What engines call the weights → version, in order of the versions."""
    async with store.begin() as connection:
        rows = await connection.execute(
            select(PolicyVersion.label, PolicyVersion.version)
            .where(PolicyVersion.run_id == run_id)
            .order_by(PolicyVersion.version)
        )
        return dict(rows.all())


async def version_paths(store: Store, run_id: str) -> dict[int, str | None]:
    """Version → where its weights were written; they may have been removed since. None: nobody wrote them."""
    async with store.begin() as connection:
        rows = await connection.execute(
            select(PolicyVersion.version, PolicyVersion.path).where(PolicyVersion.run_id == run_id)
        )
        return dict(rows.all())
