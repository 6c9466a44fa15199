"""What a class may say: each mistake is refused when it is made, in one sentence."""

from collections.abc import Callable, Iterator
from types import new_class
from typing import Any

import pytest
from atropos import EnvConfig, Environment, Message, Replay, State, Task, group_reward, metric, reward, stop, tool
from atropos import step as placed_step
from atropos.contracts.reasons import RunAt
from atropos.environments.faults import BadEnvironment
from atropos.environments.marks import DEFAULT_SECONDS
from atropos.environments.spec import describe_environment


class Minimal(Environment):
    def task(self, split: str, index: int) -> Task[int]:
        return Task(data=index)

    def prompt(self, task: Task[int]) -> str:
        return str(task.data)


def define(**methods: Any) -> type[Minimal]:
    return type("Defined", (Minimal,), methods)


def refused(sentence: str, make: Callable[[], object]) -> None:
    with pytest.raises(BadEnvironment, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


# --- decorators -------------------------------------------------------------------------------------------------


def test_bare_and_called_decorators_mean_the_same() -> None:
    class Both(Minimal):
        @reward
        def bare(self) -> float:
            return 0.0

        @reward()
        def called(self) -> float:
            return 0.0

    spec = describe_environment(Both)
    assert [scorer.plan.run for scorer in spec.scorers] == [RunAt.PROCESS, RunAt.PROCESS]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"run": "thread"}, "run must be one of inline, process, activity, not 'thread'"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"timeout": float("nan")}, "timeout must be a positive number"),
        ({"queue": "gpu"}, 'queue needs run="activity"'),
        ({"run": "process", "queue": "gpu"}, 'queue needs run="activity"'),
        ({"run": "inline", "timeout": 10}, "inline work has at most 2 s"),
    ],
)
@pytest.mark.parametrize("decorator", [tool, reward, metric, group_reward, placed_step])
def test_contradictory_options_are_refused(decorator: Any, options: dict[str, Any], sentence: str) -> None:
    def step(self: object) -> None: ...

    refused(sentence, lambda: decorator(**options)(step))


def test_weights_and_member_counts_must_make_sense() -> None:
    def method(self: object) -> None: ...

    refused("the weight is inf; it must be finite", lambda: reward(weight=float("inf"))(method))
    refused("min_valid must be at least 1", lambda: group_reward(min_valid=0)(method))


def test_one_method_is_one_thing() -> None:
    def method(self: object) -> float:
        return 0.0

    refused("both @reward and @metric", lambda: metric(reward(method)))
    refused("marks methods", lambda: reward(staticmethod(method)))


def test_defaults_say_where_things_run() -> None:
    class Placed(Minimal):
        @tool
        def sync_tool(self) -> None:
            """T."""

        @tool
        async def async_tool(self) -> None:
            """T."""

        @reward
        def sync_reward(self) -> float:
            return 0

        @reward
        async def async_reward(self) -> float:
            return 0

        @reward
        async def judged(self, judge: Any) -> float:
            return 0

        @metric
        def measured(self) -> float:
            return 0

        @reward(run="activity", queue="gpu", timeout=90)
        def chosen(self) -> float:
            return 0

        @group_reward
        def compared(self, episodes: Any) -> list[float]:
            return []

        @stop
        def enough(self) -> bool:
            return False

        def step(self, message: Any) -> None: ...

    spec = describe_environment(Placed)
    runs = {scorer.name: scorer.plan.run for scorer in spec.scorers} | {t.spec.name: t.plan.run for t in spec.tools}
    assert runs == {
        "sync_tool": RunAt.PROCESS,
        "async_tool": RunAt.INLINE,
        "sync_reward": RunAt.PROCESS,
        "async_reward": RunAt.INLINE,
        "judged": RunAt.ACTIVITY,
        "measured": RunAt.INLINE,
        "chosen": RunAt.ACTIVITY,
    }
    chosen = next(scorer.plan for scorer in spec.scorers if scorer.name == "chosen")
    assert (chosen.queue, chosen.timeout_s) == ("gpu", 90)
    assert spec.step is not None
    assert (spec.step.run, spec.step.timeout_s) == (RunAt.INLINE, DEFAULT_SECONDS[RunAt.INLINE])
    assert spec.group_scorer_at is RunAt.PROCESS
    assert spec.stops == ("enough",)
    assert spec.asks_judge == ("judged",)


def test_step_can_be_placed() -> None:
    class Placed(Minimal):
        @placed_step(run="process", timeout=20)
        def step(self, message: Any) -> None: ...

    plan = describe_environment(Placed).step
    assert plan is not None
    assert (plan.run, plan.timeout_s) == (RunAt.PROCESS, 20)


def test_an_async_function_with_a_long_timeout_must_say_where_it_runs() -> None:
    class Slow(Minimal):
        @reward(timeout=30)
        async def slow(self) -> float:
            return 0

    refused("would run inline", lambda: describe_environment(Slow))


# --- parameters by name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decorator", "parameter", "sentence"),
    [
        (reward, "taks", "asks for `taks`.*did you mean 'task'"),
        (reward, "episodes", "asks for `episodes`.*did you mean 'episode'"),
        (metric, "message", "asks for `message`"),
        (group_reward, "state", "asks for `state`"),
        (group_reward, "episode", "did you mean 'episodes'"),
        (stop, "judge", "asks for `judge`"),
        (stop, "ctx", "asks for `ctx`"),
        (tool, "episode", "which a tool cannot have"),
        (tool, "message", "which a tool cannot have"),
    ],
)
def test_a_name_that_is_not_offered_is_refused(decorator: Any, parameter: str, sentence: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def method(self, {parameter}): 'A doc.'", scope)
    refused(sentence, lambda: define(method=decorator(scope["method"])))


@pytest.mark.parametrize(
    ("name", "signature", "sentence"),
    [
        ("task", "self, split", "exactly `split` and `index`"),
        ("task", "self, split, idx", "did you mean 'index'"),
        ("prompt", "self, episode", "asks for `episode`"),
        ("size", "self", None),
        ("setup", "self, message", "asks for `message`"),
        ("cleanup", "self, task, state, ctx", None),
        ("startup", "self, state", "takes nothing but self"),
        ("step", "self, episode", "asks for `episode`"),
        ("step", "self, *args", "`args` cannot be passed by name"),
        ("step", "self, **more", "`more` cannot be passed by name"),
        ("step", "self, state, /", "`state` cannot be passed by name"),
        ("step", "", "has no `self`"),
    ],
)
def test_hooks_take_what_the_contract_names(name: str, signature: str, sentence: str | None) -> None:
    scope: dict[str, Any] = {}
    exec(f"def {name}({signature}): ...", scope)
    if sentence is None:
        define(**{name: scope[name]})
    else:
        refused(sentence, lambda: define(**{name: scope[name]}))


def test_a_judge_is_awaited_and_out_of_reach_of_the_pool() -> None:
    def sync(self: object, judge: Any) -> float:
        return 0

    async def awaited(self: object, judge: Any) -> float:
        return 0

    refused("make it `async def`", lambda: define(method=reward(sync)))
    refused('use run="activity"', lambda: define(method=reward(run="process")(awaited)))

    async def elsewhere(self: object, judge: Any) -> float:
        return 0

    define(method=reward(run="activity")(elsewhere))


def test_functions_return_and_do_not_yield() -> None:
    @reward
    def yields(self: object) -> Iterator[float]:
        yield 1.0

    refused("it must return its result", lambda: define(yields=yields))


# --- classes ----------------------------------------------------------------------------------------------------


def test_task_and_prompt_are_needed() -> None:
    class Empty(Environment):
        def task(self, split: str, index: int) -> Task[int]:
            return Task(data=0)

    refused("Empty has no method `prompt`", lambda: describe_environment(Empty))


def test_config_and_state_are_read_from_the_type_parameters() -> None:
    class Config(EnvConfig):
        n: int = 1

    class Mine(State):
        n: int = 0

    class Full(Environment[Config, Mine]): ...

    class Only(Environment[Config]): ...

    class Player(Environment[EnvConfig, Replay]): ...

    assert (Full.config_type, Full.state_type) == (Config, Mine)
    assert (Only.config_type, Only.state_type) == (Config, State)
    assert Player.state_type is Replay
    assert new_class("Sub", (Full,)).state_type is Mine  # type: ignore[attr-defined]


def test_a_state_needs_defaults() -> None:
    class Needy(State):
        must: int

    refused("needs a default for `must`", lambda: new_class("Bad", (Environment[EnvConfig, Needy],)))


def test_wrong_type_parameters_and_limits_are_refused() -> None:
    refused("int is neither an EnvConfig nor a State", lambda: new_class("Bad", (Environment[int],)))  # type: ignore[type-var]
    refused(r"limits must be Limits\(…\), not dict", lambda: define(limits={"turns": 3}))


def test_an_override_says_what_it_is_or_removes() -> None:
    class Base(Minimal):
        @reward
        def correct(self) -> float:
            return 0

    def bare(self: object) -> float:
        return 1

    refused("overrides a @reward without being one", lambda: type("Sub", (Base,), {"correct": bare}))
    assert describe_environment(type("Sub", (Base,), {"correct": None})).scorers == ()
    replaced = describe_environment(type("Sub", (Base,), {"correct": reward(weight=2.0)(bare)}))
    assert [scorer.weight for scorer in replaced.scorers] == [2.0]


def test_order_of_definition_is_kept_bases_first() -> None:
    class Base(Minimal):
        @metric
        def z(self) -> int:
            return 0

    class Sub(Base):
        @metric
        def a(self) -> int:
            return 0

    assert [scorer.name for scorer in describe_environment(Sub).scorers] == ["z", "a"]


def test_messages_can_be_typed() -> None:
    class Typed(Minimal):
        def step(self, message: Message) -> None: ...

    assert describe_environment(Typed).has_step
