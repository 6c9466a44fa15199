"""Runs from the command line, against real Temporal, Postgres and workers; only the model's words are scripted."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atropos.activities.runs import workflow_status
from atropos.contracts.runfile import parse_run
from atropos.contracts.states import EvaluationState, RunState
from atropos.db.engines import engine_id
from atropos.db.evaluations import list_evaluations
from atropos.db.events import INLINE_APART, INLINE_DEATH, add_event
from atropos.db.groups import open_groups
from atropos.db.registration import register_run
from atropos.db.runs import set_run_state
from atropos.db.store import open_store
from starlette.responses import Response
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.client import WorkflowExecutionStatus

from ..support.world import World
from .conftest import Atropos


async def until(ask: Callable[[], Any], words: str) -> str:
    """The first answer that contains `words`."""
    async with asyncio.timeout(30):
        while words not in (answer := await ask()):  # noqa: ASYNC110 - only asking again tells
            await asyncio.sleep(0.1)
    return str(answer)


async def test_a_run_is_started_watched_and_read(world: World, atropos: Atropos, run_file: Path) -> None:
    async with world.workers():
        code, out, err = await atropos("run", "start", "-f", str(run_file), "--id", "whole", "--wait")
    assert (code, out) == (0, "run/whole\n"), err
    assert "4 of 4 episodes" in err
    assert "completed" in err

    code, out, err = await atropos("run", "show", "whole", "--json")
    facts = json.loads(out)
    assert (code, facts["run"], facts["state"]) == (0, "run/whole", "completed")
    assert (facts["turns"], facts["episodes"]["train"]["scored"]) == (12, 4)
    assert facts["episodes"]["train"]["mean_reward"] == 0.75
    code, out, _ = await atropos("run", "show", "whole")
    assert "4 done episodes; mean reward 0.750 over 4 scored; stopped: 4 done" in out
    code, out, _ = await atropos("run", "list")
    assert "run/whole" in out
    assert "run/whole" in [run["run"] for run in json.loads((await atropos("run", "list", "--json"))[1])]
    assert await atropos("run", "why", "whole") == (0, "run/whole: It is completed.\n", "")

    code, page, _ = await atropos("episode", "show", "whole", "1", "0", "--tokens")
    assert (code, "\x1b" in page) == (0, False)
    assert "  assistant  ␛[31mturn 2" in page
    assert "\n␛[31mturn 2<|im_end|>" in page
    assert "user  Say something." in page
    assert "Reward: 0.75" in page
    code, out, _ = await atropos("episode", "show", "run/whole/group/1/episode/0", "--json")
    assert [len(json.loads(out)["turns"]), json.loads(out)["reward"]] == [3, 0.75]


async def test_what_does_not_exist_is_said_in_one_sentence(world: World, atropos: Atropos, run_file: Path) -> None:
    async with world.workers():
        assert (await atropos("run", "start", "-f", str(run_file), "--id", "known", "--wait"))[0] == 0
    for arguments, sentence in (
        (("run", "show", "knwon"), "There is no run 'knwon'; did you mean run/known?"),
        (("episode", "show", "known", "7", "0"), "There is no group run/known/group/7 in the store."),
        (("episode", "show", "known", "0", "9"), "group 0 has 2 episodes, started: 0, 1."),
        (("episode", "show", "known", "0", "0", "5"), "group 0 has 2 episodes, started: 0, 1."),
        (("episode", "show", "known"), "'known' is no episode id; it looks like run/NAME/group/12/episode/3"),
        (("run", "start", "-f", str(run_file), "--id", "known"), "There is a run called run/known already"),
        (("run", "pause", "known"), "run/known is completed and cannot be changed any more."),
        (("run", "cancel", "known"), "run/known is completed already."),
        (("run", "abandon-batch", "known"), "run/known has no batch to abandon: none is being trained on."),
        (("run", "weights", "known", "Answers"), "'Answers' is no LABEL=WEIGHT"),
        (("run", "weights", "known", "Answers=0"), "with a weight above 0"),
    ):
        code, out, err = await atropos(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1), (arguments, out, err)
        assert err.startswith("atropos: ")
        assert sentence in err, (arguments, err)


async def test_a_run_is_steered_while_it_waits(world: World, atropos: Atropos, run_file: Path) -> None:
    world.engine.down = True
    try:
        async with world.workers():
            code, out, _ = await atropos("run", "start", "-f", str(run_file), "--id", "steered")
            assert (code, out) == (0, "run/steered\n")
            await until(lambda: why(atropos, "steered"), "It waits: no engine answers")

            assert await atropos("run", "pause", "steered", "--reason", "lunch") == (0, "run/steered is paused.\n", "")
            await until(lambda: why(atropos, "steered"), "It is paused: lunch. `atropos run resume` goes on.")
            assert (await atropos("run", "resume", "steered"))[1] == "run/steered is running.\n"
            assert (await atropos("run", "concurrency", "steered", "3"))[0] == 0
            assert (await atropos("run", "weights", "steered", "Answers=2.5"))[0] == 0
            facts = json.loads((await atropos("run", "show", "steered", "--json"))[1])
            assert (facts["concurrency"], facts["environments"]) == (3, {"Answers": 2.5})
            code, _, err = await atropos("run", "weights", "steered", "Anwsers=2")
            assert code == 1
            assert "Anwsers" in err

            assert (await atropos("run", "cancel", "steered"))[1] == "run/steered is cancelled.\n"
            assert "It is cancelled: cancelled by a person." in await why(atropos, "steered")
    finally:
        world.engine.down = False


async def test_a_run_that_nobody_works_on_says_so_and_can_be_cancelled(
    world: World, atropos: Atropos, run_file: Path
) -> None:
    world.engine.down = True
    try:
        async with world.workers():
            assert (await atropos("run", "start", "-f", str(run_file), "--id", "alone"))[0] == 0
    finally:
        world.engine.down = False
    await world.client.get_workflow_handle("run/alone").terminate("the server was lost")
    said = await why(atropos, "alone")
    assert "Its workflow is terminated; a worker that starts ends the run, as `atropos run cancel` does now." in said
    code, out, err = await atropos("run", "pause", "alone")
    assert (code, out) == (1, "")
    assert "run/alone cannot be reached. Its workflow is terminated" in err
    code, out, err = await atropos("run", "cancel", "alone", "--reason", "enough")
    assert (code, out) == (0, "run/alone is cancelled.\n")
    assert "nothing of it buys another token" in err
    assert "It is cancelled: enough." in await why(atropos, "alone")


async def test_an_engine_that_answers_nonsense_is_named_with_its_words(
    world: World, atropos: Atropos, run_file: Path
) -> None:
    world.engine.failures = [Response("<html>a proxy\x1b[2J speaks", 200)] * 10_000
    try:
        async with world.workers():
            assert (await atropos("run", "start", "-f", str(run_file), "--id", "garbled"))[0] == 0
            said = await until(lambda: why(atropos, "garbled"), "It tries sample_turn again and again, for ")
            assert (
                f": engine {engine_id(world.engine.url)} sent something that is no event where it should stream: "
                "<html>a proxy␛[2J speaks.\n"
            ) in said
            assert "(try " in said
            assert "It is at: rollouts." in said
            assert "does not wait" not in said
            code, shown, _ = await atropos("status", "--json")
            engines = [part for part in json.loads(shown)["parts"] if part["name"] == "engine"]
            assert [(e["address"], e["health"], e["source"]) for e in engines] == [
                (world.engine.url, "ok", "named by run/garbled")
            ]
            world.engine.failures = []
            await until(lambda: why(atropos, "garbled"), "It is completed.")
    finally:
        world.engine.failures = []
    code, shown, _ = await atropos("status", "--json")
    assert code == 0
    assert [p["health"] for p in json.loads(shown)["parts"] if p["name"] == "engine"] == ["not started"]


async def test_ctrl_c_while_waiting_says_that_the_run_goes_on(world: World, atropos: Atropos, run_file: Path) -> None:
    world.engine.hold(0)
    try:
        async with world.workers():
            command = ("run", "start", "-f", str(run_file), "--id", "left", "--wait")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "atropos.cli.main", *command), stdout=PIPE, stderr=PIPE
            )
            assert process.stdout is not None
            assert await process.stdout.readline() == b"run/left\n"
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
            assert process.returncode == 130
            assert "run/left goes on without this terminal.\n  atropos run show run/left " in err.decode()
            assert "atropos run cancel run/left " in err.decode()
            assert "Traceback" not in err.decode()
            assert "It does not wait" in await why(atropos, "left")
            assert (await atropos("run", "cancel", "left"))[0] == 0
    finally:
        world.engine.release()


async def test_a_run_whose_workflow_a_person_ended_is_not_started_again(
    world: World, atropos: Atropos, run_file: Path
) -> None:
    world.engine.hold(0)
    evaluation = {"sets": [{"id": "Answers", "split": "eval", "tasks": 1}], "at_start": True}
    document = {**json.loads(run_file.read_text()), "eval": evaluation}
    endings = {
        "terminated": ("failed", "its workflow is over (terminated) and could not say so itself"),
        "lost": ("completed", None),
    }
    try:
        async with world.workers():
            for name in endings:
                await world.start(document, f"run/{name}")
            await asyncio.wait_for(world.engine.waiting.wait(), 60)
            await until(lambda: why(atropos, "lost"), "evaluation")
            await until(lambda: why(atropos, "terminated"), "evaluation")
    finally:
        world.engine.release()
    await world.client.get_workflow_handle("run/terminated").terminate("a person")
    lost = world.client.get_workflow_handle("run/lost")
    await lost.terminate("the server was lost")
    await world.client.workflow_service.delete_workflow_execution(
        DeleteWorkflowExecutionRequest(
            namespace=world.client.namespace, workflow_execution=WorkflowExecution(workflow_id="run/lost")
        )
    )
    async with asyncio.timeout(60):
        while await workflow_status(world.client, "run/lost") is not None:  # noqa: ASYNC110 - deleted in its own time
            await asyncio.sleep(0.1)
    async with world.workers() as services:
        assert await workflow_status(world.client, "run/terminated") is WorkflowExecutionStatus.TERMINATED
        for name, (state, reason) in endings.items():
            await until(lambda name=name: why(atropos, name), f"It is {state}")  # type: ignore[misc]
            facts = json.loads((await atropos("run", "show", name, "--json"))[1])
            assert (facts["state"], facts["reason"]) == (state, reason)
        left = [one.state for one in await list_evaluations(services.store, "run/terminated")]
        assert left == [EvaluationState.CANCELLED]
        async with asyncio.timeout(60):
            while await open_groups(services.store, "run/terminated"):  # noqa: ASYNC110 - only asking again tells
                await asyncio.sleep(0.1)


async def test_why_says_what_an_author_should_change(world: World, atropos: Atropos, run_file: Path) -> None:
    async with world.workers() as services:
        assert (await atropos("run", "start", "-f", str(run_file), "--id", "advised", "--wait"))[0] == 0
        await add_event(services.store, "run/advised", INLINE_DEATH, "a worker died")
        await add_event(services.store, "run/advised", INLINE_APART, "inline code of Answers.step killed its worker")
    said = await why(atropos, "advised")
    assert said.splitlines() == [
        "run/advised: It is completed.",
        "run/advised: Note: inline code of Answers.step killed its worker.",
    ]


async def test_a_run_that_no_worker_has_taken_up_is_known_and_can_be_cancelled(
    world: World, atropos: Atropos, run_file: Path
) -> None:
    await world.start(json.loads(run_file.read_text()), "run/early")
    assert "run/early: It was started and no worker has taken it up yet." in await why(atropos, "early")
    code, out, err = await atropos("run", "cancel", "early")
    assert (code, out, err) == (0, "run/early is cancelled.\n", "It had not begun yet.\n")


async def test_a_run_that_a_worker_refuses_is_refused_at_once(world: World, atropos: Atropos, run_file: Path) -> None:
    async with world.workers():
        change = "environments.0.args.wrong=1"
        code, out, err = await atropos("run", "start", "-f", str(run_file), "--id", "bad", "--set", change)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("atropos: run/bad failed: environment")
    assert "unknown argument 'wrong'" in err
    assert "run/bad" not in (await atropos("run", "list"))[1]


async def test_check_shows_the_run_and_starts_nothing(world: World, atropos: Atropos, run_file: Path) -> None:
    code, out, err = await atropos("run", "check", "-f", str(run_file))
    assert code == 0, err
    assert "temperature: 1.0" in out
    assert out.count("Answers, task ") == 3
    assert "Say something." in out
    assert "▸ the model speaks" in out
    assert "The run ends after 2 groups" in out
    for change, sentence in (
        ("environments.0.id=calculater", "did you mean 'calculator'?"),
        ("environments.0.args.wrong=1", "unknown argument 'wrong'"),
        (
            f"model.path={run_file.parent}",
            f"model.path: no tokenizer can be read from the folder {run_file.parent}; name one that a model was saved",
        ),
        (f"model.path={run_file}", f"model.path: {run_file} is a file, not a folder; name the folder that a model was"),
        ("model.path=/nowhere/at/all", "model.path: the folder /nowhere/at/all does not exist"),
        ("model.renderer=qwen33", "no chat format is called 'qwen33'; did you mean 'qwen3'?"),
    ):
        code, out, err = await atropos("run", "check", "-f", str(run_file), "--set", change)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert sentence in err


async def test_check_shows_messages_where_engines_take_them_and_names_what_they_cannot_do(
    atropos: Atropos, run_file: Path
) -> None:
    hosted = ("--set", "engines.0.kind=openai", "--set", "model.path=some-model")
    code, out, err = await atropos("run", "check", "-f", str(run_file), *hosted)
    assert code == 0, err
    assert "user: " in out
    assert "trains nothing" in out
    code, out, err = await atropos("run", "check", "-f", str(run_file), *hosted, "--set", "sampling.top_k=3")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "does not know top_k" in err


async def test_an_engine_that_a_run_trains_is_refused_to_others(
    world: World, atropos: Atropos, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_run(world.document("Answers", trainer={"kind": "external"}))
    store = await open_store(world.database)
    try:
        await register_run(store, "run/trains", config, [])
        for command in (("check",), ("start", "--id", "second")):
            code, out, err = await atropos("run", command[0], "-f", str(run_file), *command[1:])
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert f"engines: {world.engine.url} is in use by run/trains, which trains it" in err
        await set_run_state(store, "run/trains", RunState.CANCELLED, "enough")
    finally:
        await store.close()
    assert (await atropos("run", "check", "-f", str(run_file)))[0] == 0
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:9/none")
    code, _, err = await atropos("run", "check", "-f", str(run_file))
    assert code == 0
    assert "Whether its engines are free could not be looked up: Postgres at" in err


async def why(atropos: Atropos, run: str) -> str:
    code, out, err = await atropos("run", "why", run)
    assert (code, err) == (0, ""), err
    return str(out)
