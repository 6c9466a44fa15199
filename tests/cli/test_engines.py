"""Engines of a live run from the command line: listed, asked, taken out and put back; the run follows by itself."""

import json
import uuid
from pathlib import Path

from atropos.contracts.runfile import parse_run
from atropos.contracts.states import EngineState, RunState
from atropos.db.engines import engine_id, engines_of, set_engine_state
from atropos.db.registration import register_run
from atropos.db.runs import set_run_state
from atropos.db.store import open_store

from ..support.scripted import scripted_engine
from ..support.world import World
from .conftest import Atropos, says_in_colour
from .test_runs import until, why


async def test_a_drained_engine_gets_nothing_until_it_is_put_back(
    world: World, atropos: Atropos, run_file: Path
) -> None:
    world.engine.down = True
    try:
        async with world.workers():
            assert (await atropos("run", "start", "-f", str(run_file), "--id", "drained"))[0] == 0
            await until(lambda: why(atropos, "drained"), "It waits: no engine answers")
            code, out, _ = await atropos("engine", "probe", "drained")
            assert (code, "answered 503" in out) == (1, True)
            code, out, err = await atropos("engine", "drain", "drained", world.engine.url)
            assert code == 0, err
            assert "the run has no other that is ready, and waits" in out
            world.engine.down = False
            asked = len(world.engine.requests)
            await until(lambda: why(atropos, "drained"), "no engine may be given work")
            assert "drained" in (await atropos("engine", "list", "drained"))[1]
            code, out, _ = await atropos("engine", "probe", "drained", "--json")
            assert (code, json.loads(out)[0]["weights"]) == (0, "default")
            assert len(world.engine.requests) == asked
            assert (await atropos("engine", "add", "drained", world.engine.url, "--kind", "dev"))[0] == 0
            await until(lambda: why(atropos, "drained"), "It is completed")
    finally:
        world.engine.down = False


async def test_an_engine_that_is_added_does_the_work_of_one_that_is_away(
    world: World, atropos: Atropos, run_file: Path
) -> None:
    world.engine.down = True
    try:
        async with world.workers(), scripted_engine(world.engine.model, says_in_colour) as second:
            assert (await atropos("run", "start", "-f", str(run_file), "--id", "helped"))[0] == 0
            await until(lambda: why(atropos, "helped"), "It waits: no engine answers")
            code, _, err = await atropos("engine", "add", "helped", second.url, "--kind", "dev", "--concurrency", "4")
            assert code == 0, err
            await until(lambda: why(atropos, "helped"), "It is completed")
            found = {one["url"]: one for one in json.loads((await atropos("engine", "list", "helped", "--json"))[1])}
            assert (found[second.url]["concurrency"], found[second.url]["state"]) == (4, "ready")
            assert second.requests
    finally:
        world.engine.down = False


async def test_what_cannot_be_done_to_an_engine_is_one_sentence(world: World, atropos: Atropos) -> None:
    name = f"run/{uuid.uuid4().hex[:8]}"
    store = await open_store(world.database)
    trains = world.document("Answers", trainer={"kind": "external"}, budget={})
    trains["engines"] = [{"kind": "dev", "url": "http://127.0.0.1:9/mine"}]
    try:
        await register_run(store, name, parse_run(trains), [])
        own = "http://127.0.0.1:9/theirs"
        other = world.document("Answers", engines=[{"kind": "dev", "url": own}])
        await register_run(store, f"{name}-other", parse_run(other), [])
        for arguments, sentence in (
            (("add", name, "nowhere"), "an address looks like http://host:port/v1"),
            (("add", name, "http://x/v1", "--kind", "openai"), "returns no token ids and logprobs"),
            (("add", name, "http://x/v1", "--model", "m"), "only engines of kind openai have it"),
            (("add", name, own, "--kind", "dev"), f"{own} is in use by {name}-other"),
            (("add", f"{name}-other", "http://x", "--kind", "openai"), "the run's take tokens, and this one not"),
            (
                ("drain", name, "nobody"),
                "no engine of the run is called 'nobody'; its engines: http://127.0.0.1:9/mine",
            ),
            (("probe", name, ""), "no engine of the run is called ''"),
            (("list", "nothing-of-that-name"), "There is no run"),
        ):
            code, out, err = await atropos("engine", *arguments)
            assert (code, out, err.count("\n")) == (1, "", 1), (arguments, out, err)
            assert sentence in err, (arguments, err)
        await set_run_state(store, name, RunState.CANCELLED, "enough")
        code, _, err = await atropos("engine", "drain", name, "http://127.0.0.1:9/mine")
        assert (code, "its engines do nothing for it any more" in err) == (1, True)
    finally:
        await store.close()


async def test_only_a_person_puts_back_what_a_person_took_out(world: World, atropos: Atropos) -> None:
    name = f"run/{uuid.uuid4().hex[:8]}"
    store = await open_store(world.database)
    url = "http://127.0.0.1:9/taken"
    config = parse_run(world.document("Answers", engines=[{"kind": "dev", "url": url}]))
    try:
        await register_run(store, name, config, [])
        assert (await atropos("engine", "remove", name, url))[0] == 0
        await register_run(store, name, config, [])
        assert (await engines_of(store, name))[0].state == EngineState.REMOVED
        assert (await atropos("engine", "add", name, url, "--kind", "dev"))[0] == 0
        assert (await engines_of(store, name))[0].state == EngineState.DOWN
        await set_engine_state(store, name, engine_id(url), EngineState.READY, None)
    finally:
        await store.close()
