"""A loaded environment: tasks, state, steps, scores, and whose fault a failure is."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from atropos import (
    Context,
    EnvConfig,
    Environment,
    Episode,
    Judge,
    JudgeUnavailable,
    Message,
    Replay,
    State,
    Step,
    Task,
    assistant,
    group_reward,
    metric,
    reward,
    stop,
    system,
    tool,
    user,
)
from atropos.contracts.episode import Turn, total_reward
from atropos.contracts.ids import EpisodeKey
from atropos.environments.faults import BadEnvironmentArgs, EnvironmentFault
from atropos.environments.loaded import LoadedEnvironment
from atropos.environments.registry import load
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

SAMPLES = str(Path(__file__).parent / "samples.py")


class Data(BaseModel):
    n: int
    value: Any = None


class Kept(State):
    value: Any = 0
    log: list[str] = []


class Scored(Environment[EnvConfig, Kept]):
    """Returns from each function what the task holds."""

    def task(self, split: str, index: int) -> Task[Data]:
        return Task(data=Data(n=index), info={"split": split})

    async def setup(self, state: Kept, ctx: Context) -> None:
        state.log.append(f"setup {ctx.call}")

    def prompt(self, task: Task[Data], state: Kept) -> Any:
        return task.data.value if task.data.value is not None else [system("s"), user(",".join(state.log))]

    def cleanup(self, state: Kept) -> None:
        (self.cleaned if hasattr(self, "cleaned") else self.__dict__.setdefault("cleaned", [])).append(state.log)

    def step(self, task: Task[Data], state: Kept, message: Message, ctx: Context) -> Any:
        state.log.append(message.text)
        return task.data.value if task.data.value is not None else Step(user(ctx.call), reward=1.0)

    @stop
    def never(self) -> bool:
        return False

    @stop
    def said_stop(self, task: Task[Data], episode: Episode, state: Kept) -> Any:
        return task.data.value if task.data.value is not None else episode.answer == "stop"

    @reward(weight=2.0, run="inline")
    def value(self, task: Task[Data], state: Kept, episode: Episode) -> Any:
        state.value = "changed"
        return task.data.value

    @metric
    async def judged(self, judge: Judge) -> float:
        return float(await judge.ask([user("how good?")]))

    @metric
    def drawn(self, ctx: Context) -> float:
        return ctx.rng.random()

    @group_reward(min_valid=2, run="inline")
    def compared(self, task: Task[Data], episodes: list[Episode]) -> Any:
        return task.data.value

    @group_reward(min_valid=1)
    async def preferred(self, episodes: list[Episode], judge: Judge, ctx: Context) -> list[float]:
        return [float(await judge.ask([user(ctx.key)])) for _ in episodes]


class FixedJudge:
    async def ask(self, messages: list[Message], *, model: str = "default", max_tokens: int = 1024) -> str:
        return "0.5"


class AwayJudge:
    async def ask(self, messages: list[Message], *, model: str = "default", max_tokens: int = 1024) -> str:
        raise JudgeUnavailable("gone")


STATE = {"value": 0, "log": []}
CTX = Context(run_id="r", task_key="k", member=1, turn=0)


def loaded(cls: type[Environment[Any, Any]] = Scored) -> LoadedEnvironment:
    return LoadedEnvironment("test", {}, cls())


def episode(text: str = "hi", member: int = 0) -> Episode:
    key = EpisodeKey(run_id="r", group_no=0, member=member)
    return Episode(key=key, prompt=(user("q"),), turns=(Turn(index=0, message=assistant(text)),))


def holding(value: Any) -> Task[Any]:
    return Task(data=Data(n=0, value=value))


# --- tasks and start --------------------------------------------------------------------------------------------


async def test_setup_comes_before_the_prompt_and_its_state_is_kept() -> None:
    prompt, state = await loaded().start(holding(None), CTX)
    assert [message.text for message in prompt] == ["s", "setup setup"]
    assert state == {"value": 0, "log": ["setup setup"]}


@pytest.mark.parametrize("value", ["text", [user("text")], (user("text"),)])
async def test_a_prompt_is_a_text_or_messages(value: Any) -> None:
    prompt, _ = await loaded().start(Task(data=Data.model_construct(n=0, value=value)), CTX)
    assert prompt == (user("text"),)


@pytest.mark.parametrize(("value", "said"), [([], "no message"), (3, "not int"), ([1], "not list")])
async def test_other_prompts_are_refused(value: Any, said: str) -> None:
    with pytest.raises(EnvironmentFault, match=f"scored.prompt.*{said}"):
        await loaded().start(holding(value), CTX)


async def test_stored_data_comes_back_as_the_annotated_type() -> None:
    env = loaded()
    task = await env.make_task("train", 5)
    again = await env.task_from_data(json.loads(json.dumps(task.plain_data())), task.info)
    assert again == task
    assert isinstance(again.data, Data)


async def test_without_an_annotation_the_type_is_that_of_the_first_task() -> None:
    class Bare(Environment):
        async def task(self, split, index):  # type: ignore[no-untyped-def]
            return Task(data=Data(n=index))

        def prompt(self, task):  # type: ignore[no-untyped-def]
            return "q"

    env = loaded(Bare)
    assert (await env.task_from_data({"n": 4})).data == Data(n=4)


async def test_stored_data_that_no_longer_fits_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match=r"stored task data no longer fits.*n: "):
        await loaded().task_from_data({"n": "many"})


@pytest.mark.parametrize("value", [3, None, {"data": 1}])
async def test_a_task_is_a_task(value: Any) -> None:
    class Odd(Environment):
        def task(self, split: str, index: int) -> Any:
            return value

        def prompt(self) -> str:
            return "q"

    with pytest.raises(EnvironmentFault, match=r"odd.task returned.*it must return Task\(data=…\)"):
        await loaded(Odd).make_task("train", 0)


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}])
async def test_task_data_must_be_finite(value: Any) -> None:
    class Odd(Scored):
        def task(self, split: str, index: int) -> Task[Data]:
            return Task(data=Data(n=index, value=value))

    with pytest.raises(EnvironmentFault, match="holds a number that is not finite"):
        await loaded(Odd).make_task("train", 0)


async def test_startup_runs_once_and_again_only_where_it_failed() -> None:
    class Started(Scored):
        runs = 0

        def startup(self) -> None:
            type(self).runs += 1
            if self.runs == 1:
                raise OSError("no disk")

        def shutdown(self) -> None:
            type(self).runs = -1

    env = loaded(Started)
    with pytest.raises(EnvironmentFault, match=r"started.startup raised OSError: no disk \(.*test_loaded.py:\d+\)"):
        await env.make_task("train", 0)
    await asyncio.gather(*(env.make_task("train", index) for index in range(5)))
    assert Started.runs == 2
    await env.close()
    assert Started.runs == -1


async def test_a_replay_state_has_the_tasks_seed_for_every_member() -> None:
    class Sim(Environment[EnvConfig, Replay]):
        def task(self, split: str, index: int) -> Task[Any]:
            return Task(data={"i": index})

        def prompt(self) -> str:
            return "q"

    env = loaded(Sim)
    task = await env.make_task("train", 1)
    seeds = {(await env.start(task, Context("r", task.key, member, 0)))[1]["seed"] for member in range(3)}
    assert len(seeds) == 1
    other = await env.make_task("train", 2)
    assert (await env.start(other, CTX))[1]["seed"] not in seeds


@given(st.integers(), st.lists(st.integers(0, 9)))
def test_a_simulator_is_rebuilt_by_replay(seed: int, actions: list[int]) -> None:
    def act(walk: random.Random, action: int) -> None:
        walk.randrange(action + 1)

    live, state = random.Random(seed), Replay(seed=seed)
    for action in actions:
        act(live, action)
        state.record(action)
    stored = Replay.model_validate(json.loads(state.model_dump_json()))
    assert stored.rebuild(random.Random, act).random() == live.random()


# --- state ------------------------------------------------------------------------------------------------------


async def test_a_step_answers_and_its_state_comes_back_as_new() -> None:
    outcome = await loaded().run_step(holding(None), STATE, assistant("hello"), CTX)
    assert outcome.step == Step([user("step")], reward=1.0)
    assert outcome.state == {"value": 0, "log": ["hello"]}
    assert STATE == {"value": 0, "log": []}


class Keeps(Scored):
    """Keeps what the task holds."""

    def step(self, task: Task[Data], state: Kept) -> Step:  # type: ignore[override]
        state.value = task.data.value
        return Step()


@pytest.mark.parametrize("value", [{1}, (1, 2), "\ud800", {"a": None}])
async def test_kept_state_is_plain_data(value: Any) -> None:
    task = Task(data=Data.model_construct(n=0, value=value))
    outcome = await loaded(Keeps).run_step(task, STATE, assistant(""), CTX)
    assert json.loads(json.dumps(outcome.state, allow_nan=False)) == outcome.state


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], object()])
async def test_state_that_is_no_plain_data_is_refused(value: Any) -> None:
    task = Task(data=Data.model_construct(n=0, value=value))
    with pytest.raises(EnvironmentFault, match=r"keeps\.step: the state is not"):
        await loaded(Keeps).run_step(task, STATE, assistant(""), CTX)


async def test_stored_state_that_no_longer_fits_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match=r"stored state does not fit Kept.*raise the environment's `version`"):
        await loaded().run_step(holding(None), {"old": 1}, assistant(""), CTX)


@pytest.mark.parametrize("value", [{"reward": 1}, "text"])
async def test_step_returns_a_step(value: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"scored.step returned .*it must return Step\(…\)"):
        await loaded().run_step(holding(value), STATE, assistant(""), CTX)


def test_a_step_is_checked_when_it_is_made() -> None:
    assert Step("a").messages == (user("a"),)
    assert Step(assistant("a")).messages == (assistant("a"),)
    for wrong in ({"reward": float("nan")}, {"messages": 3}, {"rewrad": 1}):
        with pytest.raises(ValueError, match="1 validation error"):
            Step(**wrong)


async def test_cleanup_sees_the_last_state() -> None:
    env = loaded()
    await env.cleanup(holding(None), {"value": 0, "log": ["last"]}, CTX)
    assert vars(env.environment)["cleaned"] == [["last"]]


# --- stop conditions and scores ---------------------------------------------------------------------------------


async def test_the_first_condition_that_holds_is_named() -> None:
    env = loaded()
    assert await env.stop_condition(holding(None), STATE, episode("go")) is None
    assert await env.stop_condition(holding(None), STATE, episode("stop")) == "said_stop"
    with pytest.raises(EnvironmentFault, match="a stop condition returns True or False"):
        await env.stop_condition(holding(1), STATE, episode())


@pytest.mark.parametrize(("value", "score"), [(1, 1.0), (True, 1.0), (-0.5, -0.5), (None, None)])
async def test_a_score_is_a_finite_number_or_none(value: Any, score: float | None) -> None:
    got = await loaded().score("value", holding(value), STATE, episode(), None, CTX)
    assert (got.name, got.value, got.weight, got.metric) == ("value", score, 2.0, False)


@pytest.mark.parametrize("value", ["1", float("inf"), float("nan"), [1.0], 1j])
async def test_other_scores_are_refused(value: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"scored.value returned .*None for unscored"):
        await loaded().score("value", Task(data=Data.model_construct(n=0, value=value)), STATE, episode(), None, CTX)


async def test_inline_scores_come_in_order_and_a_scorer_cannot_change_the_state() -> None:
    scores = await loaded().score_inline(holding(1.0), STATE, episode(), None, CTX)
    assert [score.name for score in scores] == ["value", "drawn"]
    assert STATE == {"value": 0, "log": []}


@pytest.mark.parametrize("judge", [None, AwayJudge()])
async def test_without_its_judge_a_part_is_unscored_and_never_zero(judge: Judge | None) -> None:
    env = loaded()
    score = await env.score("judged", holding(None), STATE, episode(), judge, CTX)
    assert score.value is None
    assert (await env.score("judged", holding(None), STATE, episode(), FixedJudge(), CTX)).value == 0.5
    assert total_reward((score.model_copy(update={"metric": False}),)) is None


def test_a_run_without_judges_is_refused_where_one_is_asked_for() -> None:
    with pytest.raises(BadEnvironmentArgs, match=r"asks for a judge \(judged, preferred\); name one under `judges`"):
        loaded().check_judges({})
    loaded().check_judges({"default": object()})


async def test_randomness_is_the_same_at_every_try_and_differs_between_members() -> None:
    env = loaded()
    first, again = [await env.score("drawn", holding(None), STATE, episode(), None, CTX) for _ in range(2)]
    other = await env.score("drawn", holding(None), STATE, episode(), None, Context("r", "k", 2, 0))
    assert first == again
    assert first != other


async def test_a_group_is_scored_one_each_in_order() -> None:
    scores = await loaded().score_group(holding([1, None]), [episode(member=0), episode(member=3)], FixedJudge())
    assert scores == {"compared": [1.0, None], "preferred": [0.5, 0.5]}


async def test_too_few_members_or_no_judge_leave_a_group_unscored() -> None:
    assert await loaded().score_group(holding([1]), [episode()], AwayJudge()) == {
        "compared": [None],
        "preferred": [None],
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0], "1 scores for 2 episodes"),
        (1.0, "must return a list"),
        ([1.0, float("nan")], r"compared\[1\] returned nan"),
    ],
)
async def test_group_rewards_that_do_not_fit_are_refused(value: Any, said: str) -> None:
    task = Task(data=Data.model_construct(n=0, value=value))
    with pytest.raises(EnvironmentFault, match=said):
        await loaded().score_group(task, [episode(), episode(member=1)], FixedJudge())


async def test_an_unknown_scorer_is_named_with_the_nearest() -> None:
    with pytest.raises(EnvironmentFault, match="no reward or metric 'valeu'; did you mean 'value'"):
        await loaded().score("valeu", holding(None), STATE, episode(), None, CTX)


# --- faults -----------------------------------------------------------------------------------------------------


async def test_a_fault_names_the_authors_line() -> None:
    env = load(SAMPLES + ":Broken")
    line = next(
        number for number, text in enumerate(Path(SAMPLES).read_text().splitlines(), 1) if "a fault names" in text
    )
    with pytest.raises(
        EnvironmentFault, match=rf"^broken.prompt raised KeyError: 'MISSING FROM HERE' \(.*samples.py:{line}\)$"
    ):
        await env.start(await env.make_task("train", 0), CTX)


async def test_a_fault_is_one_line_whatever_was_raised() -> None:
    class Loud(Scored):
        def prompt(self) -> str:  # type: ignore[override]
            return str(Data.model_validate({"n": "x"}))

    with pytest.raises(EnvironmentFault, match=r"loud\.prompt raised ValidationError") as caught:
        await loaded(Loud).start(holding(None), CTX)
    assert "\n" not in str(caught.value)


async def test_an_async_tool_that_takes_too_long_is_answered_with_an_error() -> None:
    class Slow(Scored):
        @tool(run="inline", timeout=0.01)
        async def wait(self) -> None:
            """Wait."""
            await asyncio.sleep(60)

    from atropos.contracts.messages import ToolCall

    outcome = await loaded(Slow).run_call(0, ToolCall(id="1", name="wait"), holding(None), STATE, CTX)
    assert outcome.content == "Error: wait took longer than 0.01 s"
