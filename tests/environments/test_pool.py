"""The process pool: author code runs in a main thread of its own, and what never returns is killed."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from atropos.contracts.context import Context, JudgeUnavailable
from atropos.contracts.episode import Episode, Turn
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.messages import Message, ToolCall, assistant
from atropos.contracts.reasons import RunAt
from atropos.contracts.tasks import Task
from atropos.environments.faults import CallTimedOut, EnvironmentFault
from atropos.environments.loaded import LoadedEnvironment
from atropos.environments.pool import PoolClosed, ProcessPool
from atropos.environments.registry import load

SAMPLES = str(Path(__file__).parent / "samples.py") + ":Pooled"
ASIDE = SAMPLES.replace(":Pooled", ":Aside")


@pytest.fixture(scope="module")
def env() -> LoadedEnvironment:
    return load(SAMPLES)


@pytest.fixture(scope="module")
async def pool() -> AsyncIterator[ProcessPool]:
    async with ProcessPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
async def task(env: LoadedEnvironment) -> Task[Any]:
    return await env.make_task("train", 3)


def context(task: Task[Any]) -> Context:
    return Context(run_id="r", task_key=task.key, member=0, turn=2)


async def call(
    env: LoadedEnvironment, pool: ProcessPool | None, task: Task[Any], name: str, state: Any = None, **arguments: Any
) -> Any:
    wanted = ToolCall(id="1", name=name, arguments=arguments)
    return await env.run_call(0, wanted, task, state or {"seen": []}, context(task), pool=pool)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - another process, nothing here can signal it
        await asyncio.sleep(0.02)


async def until_gone(pid: int) -> None:
    await until(lambda: not alive(pid))


async def test_a_tool_runs_in_another_process_where_startup_ran(
    env: LoadedEnvironment, pool: ProcessPool, task: Task[Any]
) -> None:
    answer = json.loads((await call(env, pool, task, "pid")).content)
    assert answer["pid"] != os.getpid()
    assert answer["started"] == answer["pid"]


async def test_state_task_and_context_travel_and_the_change_comes_back(
    env: LoadedEnvironment, pool: ProcessPool, task: Task[Any]
) -> None:
    there = await call(env, pool, task, "remember", {"seen": ["a"]}, word="b")
    here = await call(env, None, task, "remember", {"seen": ["a"]}, word="b")
    assert there.state == {"seen": ["a", "b"]}
    assert there == here
    assert there.content.startswith("hello train 3/")


async def test_an_exception_there_is_the_tool_result_here(
    env: LoadedEnvironment, pool: ProcessPool, task: Task[Any]
) -> None:
    outcome = await call(env, pool, task, "fail")
    assert outcome.content == "Error: that went wrong"
    assert outcome.state is None


async def test_a_call_that_hangs_is_killed_with_its_children_and_the_pool_goes_on(
    env: LoadedEnvironment, pool: ProcessPool, task: Task[Any], tmp_path: Path
) -> None:
    marker = tmp_path / "pids"
    outcome = await call(env, pool, task, "hang", marker=str(marker))
    assert outcome.error == "hang took longer than 0.5 s and was killed"
    worker, child = (int(pid) for pid in marker.read_text().split())
    assert worker not in pool.pids
    await until_gone(worker)
    await until_gone(child)
    assert (await call(env, pool, task, "pid")).error is None


async def test_a_call_that_holds_the_interpreter_is_killed(
    env: LoadedEnvironment, pool: ProcessPool, task: Task[Any]
) -> None:
    assert "took longer than 0.5 s" in (await call(env, pool, task, "hold")).content


async def test_a_process_that_dies_is_tried_once_more_and_then_is_the_result(
    env: LoadedEnvironment, pool: ProcessPool, task: Task[Any], tmp_path: Path
) -> None:
    marker = tmp_path / "calls"
    outcome = await call(env, pool, task, "die", marker=str(marker))
    assert "SIGKILL" in outcome.content
    assert marker.read_text() == "xx"


async def test_a_scorer_may_use_alarms(env: LoadedEnvironment, pool: ProcessPool, task: Task[Any]) -> None:
    key = EpisodeKey(run_id="r", group_no=0, member=0)
    episode = Episode(key=key, prompt=(), turns=(Turn(index=0, message=assistant("hi")),))
    score = await env.score("alarmed", task, {"seen": []}, episode, None, context(task), pool=pool)
    assert score.value == 1.0


async def test_step_and_group_rewards_run_there_too(env: LoadedEnvironment, pool: ProcessPool, task: Task[Any]) -> None:
    outcome = await env.run_step(task, {"seen": ["a"]}, assistant("b"), context(task), pool=pool)
    assert (outcome.step.reward, outcome.step.done, outcome.step.info) == (0.5, True, {"n": 2})
    assert outcome.step.messages[0].text == "go on"
    assert outcome.state == {"seen": ["a", "b"]}
    episodes = [Episode(key=EpisodeKey(run_id="r", group_no=0, member=m), prompt=()) for m in (4, 1)]
    assert await env.score_group(task, episodes, None, pool=pool) == {"ranks": [4.0, 1.0]}


class Echo:
    """A judge that says what it was asked."""

    async def ask(self, messages: list[Message], *, model: str = "default", max_tokens: int = 1024) -> str:
        return f"{messages[-1].text}{max_tokens}"


async def test_inline_code_can_run_there_with_its_state_and_its_judge(pool: ProcessPool) -> None:
    aside = load(ASIDE)
    task = await aside.make_task("train", 3)
    wanted = ToolCall(id="1", name="ask", arguments={})
    outcome = await aside.run_call(0, wanted, task, {"seen": []}, context(task), judge=Echo(), pool=pool, apart=True)
    answer = json.loads(outcome.content)
    assert answer["said"] == "a7 b7"
    assert answer["pid"] in pool.pids
    assert outcome.state == {"seen": ["a7", "b7"]}


async def test_a_judge_that_is_away_is_away_there_too_and_costs_no_process(pool: ProcessPool) -> None:
    aside = load(ASIDE)
    task = await aside.make_task("train", 3)
    wanted = ToolCall(id="1", name="ask", arguments={})
    before = pool.pids
    with pytest.raises(JudgeUnavailable, match="no judge is configured"):
        await aside.run_call(0, wanted, task, {"seen": []}, context(task), pool=pool, apart=True)
    assert set(pool.pids) >= set(before)


async def test_an_episode_starts_and_stops_there_as_here(pool: ProcessPool) -> None:
    aside = load(ASIDE)
    task = await aside.make_task("train", 3)
    assert await aside.start(task, context(task), pool=pool) == await aside.start(task, context(task))
    key = EpisodeKey(run_id="r", group_no=0, member=0)
    episode = Episode(key=key, prompt=(), turns=(Turn(index=0, message=assistant("hi")),))
    for seen, condition in ((["a"], None), (["a", "b"], "full")):
        assert await aside.stop_condition(task, {"seen": seen}, episode, pool=pool) == condition
        assert await aside.stop_condition(task, {"seen": seen}, episode) == condition


async def test_async_code_runs_there_and_is_timed_there(
    env: LoadedEnvironment, pool: ProcessPool, task: Task[Any]
) -> None:
    assert (await call(env, pool, task, "slowly", seconds=0)).content == "waited"
    assert env.plan_calls(assistant("", (ToolCall(id="1", name="slowly", arguments={"seconds": 0}),)))[0].run is (
        RunAt.PROCESS
    )


async def test_at_most_its_size_of_processes(env: LoadedEnvironment, task: Task[Any]) -> None:
    async with ProcessPool(1) as small:
        answers = await asyncio.gather(*(call(env, small, task, "pid") for _ in range(4)))
        assert len({answer.content for answer in answers}) == 1
        assert len(small.pids) == 1


async def test_a_cancelled_caller_leaves_no_process_behind(
    env: LoadedEnvironment, task: Task[Any], tmp_path: Path
) -> None:
    marker = tmp_path / "pids"
    async with ProcessPool(1) as small:
        payload = {"index": 0, "call": {"id": "1", "name": "hang", "arguments": {"marker": str(marker)}}}
        payload |= {"state": {"seen": []}, "task": {"data": task.plain_data(), "info": {}}}
        payload |= {"ctx": {"run_id": "r", "task_key": "k", "member": 0, "turn": 0}}
        running = asyncio.ensure_future(small.run(env.ref, env.args, "call", payload, 600))
        await until(lambda: marker.exists() and len(marker.read_text().split()) == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert small.pids == ()
        await until_gone(int(marker.read_text().split()[0]))


async def test_loading_problems_arrive_as_sentences(pool: ProcessPool, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("import no_such_module\n")
    with pytest.raises(Exception, match=r"bad\.py cannot be imported: ModuleNotFoundError.*bad\.py:1"):
        await pool.run(str(file), {}, "call", {}, 5)


async def test_a_scorer_that_never_returns_is_the_environments_fault(
    env: LoadedEnvironment, pool: ProcessPool, task: Task[Any]
) -> None:
    episode = Episode(key=EpisodeKey(run_id="r", group_no=0, member=0), prompt=())
    with pytest.raises(CallTimedOut, match=r"endless took longer than 0\.5 s"):
        await env.score("endless", task, {"seen": []}, episode, None, context(task), pool=pool)
    assert issubclass(CallTimedOut, EnvironmentFault)


async def test_closing_ends_every_process_and_refuses_more(env: LoadedEnvironment, task: Task[Any]) -> None:
    small = ProcessPool(1)
    await call(env, small, task, "pid")
    (pid,) = small.pids
    await small.close()
    await until_gone(pid)
    with pytest.raises(PoolClosed, match="closed"):
        await small.run(env.ref, env.args, "call", {}, 1)


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    marker = tmp_path / "pids"
    program = f"""
import asyncio, os, signal
from atropos.environments.pool import PoolClosed, ProcessPool
from atropos.environments.registry import load
async def main():
    env = load({SAMPLES!r})
    pool = ProcessPool(1)
    await pool.run(env.ref, env.args, "load", {{}}, 60)
    open({str(marker)!r}, "w").write(str(pool.pids[0]))
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False)
    asyncio.run(asyncio.wait_for(until_gone(int(marker.read_text())), 30))
