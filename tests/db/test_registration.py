"""An engine that a live run trains is that run's alone, whoever asks first and however its address is spelt."""

import asyncio
import uuid
from typing import Any

import pytest
from atropos.contracts.runfile import RunConfig, RunFileError
from atropos.contracts.states import RunState
from atropos.db.engines import engines_of
from atropos.db.registration import engine_taken, first_user, register_run
from atropos.db.runs import create_run, get_run, set_run_state
from atropos.db.store import Store

from .samples import mixture, rows, run_config

TRAINS = {"trainer": {"kind": "builtin"}}
OUTSIDE = {"trainer": {"kind": "external"}}
SAMPLES: dict[str, Any] = {}


def somewhere() -> str:
    return f"http://{uuid.uuid4().hex[:8]}:8000/v1"


async def register(store: Store, config: RunConfig, run_id: str | None = None) -> str:
    name = run_id or f"run/{uuid.uuid4().hex[:8]}"
    await register_run(store, name, config, mixture())
    return name


@pytest.mark.parametrize("run_id", ["run/a/group/0", "run/\x1b[2J", "a\0b", "x" * 900])
async def test_an_id_that_no_run_can_have_is_refused_and_leaves_no_row(store: Store, run_id: str) -> None:
    before = await rows(store, "SELECT count(*) FROM runs")
    with pytest.raises(RunFileError, match="cannot be used: after run/ it has up to 100 letters"):
        await register(store, run_config(engines=[{"url": somewhere()}]), run_id)
    assert await rows(store, "SELECT count(*) FROM runs") == before


async def test_a_run_that_has_such_an_id_already_goes_on(store: Store) -> None:
    run_id, config = f"run/of/old/{uuid.uuid4().hex[:8]}", run_config(engines=[{"url": somewhere()}])
    await create_run(store, run_id, config, mixture())
    assert (await register_run(store, run_id, config, mixture())).run_id == run_id


@pytest.mark.parametrize(
    ("first", "second", "does"),
    [
        (TRAINS, TRAINS, "which trains it"),
        (OUTSIDE, TRAINS, "which trains it"),
        (TRAINS, SAMPLES, "which trains it"),
        (SAMPLES, OUTSIDE, "which samples with its weights"),
        (SAMPLES, SAMPLES, None),
    ],
)
async def test_an_engine_that_is_trained_belongs_to_one_live_run(
    store: Store, first: dict[str, Any], second: dict[str, Any], does: str | None
) -> None:
    url = somewhere()
    holder = await register(store, run_config(engines=[{"url": url}], **first))
    wanted = run_config(engines=[{"url": somewhere()}, {"url": url}], **second)
    if does is None:
        assert await engine_taken(store, wanted) is None
        await register(store, wanted)
        return
    with pytest.raises(RunFileError) as refused:
        await register(store, wanted, "run/refused")
    assert str(refused.value) == await engine_taken(store, wanted)
    assert str(refused.value).startswith(f"engines: {url} is in use by {holder}, {does}, and")
    assert f"`atropos run cancel {holder}`" in str(refused.value)
    assert await get_run(store, "run/refused") is None
    await set_run_state(store, holder, RunState.PAUSED, "lunch")
    assert await engine_taken(store, wanted) is not None
    await set_run_state(store, holder, RunState.CANCELLED, "enough")
    assert len(await engines_of(store, await register(store, wanted))) == 2


async def test_the_oldest_live_run_on_an_engine_is_its_first_user(store: Store) -> None:
    place = uuid.uuid4().hex[:8]
    runs = [await register(store, run_config(engines=[{"url": f"http://{place}:8000{end}"}])) for end in ("", "/v1/")]
    assert await first_user(store, f"http://{place.upper()}:8000/v1") == runs[0]
    await set_run_state(store, runs[0], RunState.COMPLETED, None)
    assert await first_user(store, f"http://{place}:8000") == runs[1]
    assert await first_user(store, somewhere()) is None


async def test_of_two_that_come_at_once_one_is_refused(store: Store) -> None:
    for _ in range(5):
        config = run_config(engines=[{"url": somewhere()}], **TRAINS)
        both = await asyncio.gather(*(register(store, config) for _ in range(2)), return_exceptions=True)
        assert sorted(isinstance(one, RunFileError) for one in both) == [False, True]


async def test_a_run_is_not_in_its_own_way(store: Store) -> None:
    config = run_config(engines=[{"url": somewhere()}], **TRAINS)
    run_id = await register(store, config)
    assert await register(store, config, run_id) == run_id
    assert await engine_taken(store, config, run_id) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://{}:8000/v1", "http://{}:8000", True),
        ("http://{}:8000/", "http://{}:8000/v1/", True),
        ("http://{}", "http://{}:80/v1", True),
        ("http://{}:8000/a/v1", "http://{}:8000/b/v1", False),
        ("http://{}:8000", "http://{}:8001", False),
    ],
)
async def test_addresses_of_one_engine_are_one(store: Store, one: str, other: str, same: bool) -> None:
    host = uuid.uuid4().hex[:8]
    await register(store, run_config(engines=[{"url": one.format(host)}], **TRAINS))
    taken = await engine_taken(store, run_config(engines=[{"url": other.format(host.upper())}]))
    assert (taken is not None) is same


async def test_a_machine_calls_itself_localhost(store: Store) -> None:
    await register(store, run_config(engines=[{"url": "http://localhost:7301/v1"}], **TRAINS))
    assert await engine_taken(store, run_config(engines=[{"url": "http://127.0.0.1:7301"}])) is not None
