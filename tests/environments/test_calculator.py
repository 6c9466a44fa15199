"""The bundled calculator: enough tasks, splits that share none, an evaluator that nothing gets past."""

import contextlib
import random
from typing import Any

import pytest
from atropos.contracts.context import Context
from atropos.contracts.episode import Episode, Turn
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.messages import Role, assistant
from atropos.contracts.tasks import SPLITS
from atropos.environments.calculator import evaluate
from atropos.environments.calculator_demos import demonstrate, split_of
from atropos.environments.loaded import LoadedEnvironment
from atropos.environments.registry import load
from atropos.environments.splits import SplitsOverlap, check_disjoint, require_size
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
async def env() -> LoadedEnvironment:
    env = load("calculator")
    await env.ready()
    return env


async def test_ten_thousand_distinct_tasks_and_no_split_shares_one(env: LoadedEnvironment) -> None:
    report = await check_disjoint(env, 100_000)
    assert report.distinct == report.compared == report.sizes
    assert report.distinct["train"] >= 10_000
    assert min(report.distinct.values()) >= 1_000


async def test_a_problem_keeps_its_split_under_every_configuration(env: LoadedEnvironment) -> None:
    for args in ({"operators": ["+"]}, {"digits": 3, "seed": 5}):
        other = load("calculator", args)
        for split in SPLITS:
            for index in range(100):
                assert split_of((await other.make_task(split, index)).plain_data()) == split


async def test_digits_and_operators_are_as_configured() -> None:
    env = load("calculator", {"digits": 3, "operators": ["+"], "seed": 5})
    for index in range(200):
        left, operator, right = (await env.make_task("train", index)).data.expression.split()
        assert (len(left), operator, len(right)) == (3, "+", 3)


async def test_an_overlap_of_splits_is_found(env: LoadedEnvironment) -> None:
    class Overlapping(type(env.environment)):  # type: ignore[misc]
        def size(self, split: str) -> int:
            return 5

        def task(self, split: str, index: int) -> Any:
            return super().task("train", index + 3)

    with pytest.raises(SplitsOverlap, match=r"task 0 of eval is task 0 of train"):
        await check_disjoint(LoadedEnvironment("x", {}, Overlapping()))


async def test_a_split_that_is_too_small_is_refused(env: LoadedEnvironment) -> None:
    await require_size(env, "eval", 1_000)
    with pytest.raises(Exception, match=r"calculator has \d+ tasks in eval; 5000 are asked for"):
        await require_size(env, "eval", 5_000)


async def test_expression_and_answer_agree(env: LoadedEnvironment) -> None:
    for index in range(300):
        data = (await env.make_task("test", index)).data
        assert evaluate(data.expression) == str(data.answer)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("{}", True),
        ("The answer is {}.", True),
        ("12 + 30 = {}", True),
        ("{} or 1", False),
        ("{}.5", False),
        ("1{}", False),
        ("", False),
        ("none", False),
        ("٤٢", False),
    ],
)
async def test_the_last_number_of_the_answer_counts(env: LoadedEnvironment, said: str, right: bool) -> None:
    task = await env.make_task("train", 0)
    episode = Episode(
        key=EpisodeKey(run_id="r", group_no=0, member=0),
        prompt=(),
        turns=(Turn(index=0, message=assistant(said.format(task.data.answer))),),
    )
    ctx = Context("r", task.key, 0, 0)
    scores = await env.score_inline(task, {"calls": 3}, episode, None, ctx)
    assert [(score.name, score.value, score.metric) for score in scores] == [
        ("correct", float(right), False),
        ("calls", 3.0, True),
    ]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+34", "46"),
        (" 1 + 2*3 ", "7"),
        ("(1+2)*3", "9"),
        ("7/2", "3.5"),
        ("-(3)-4", "-7"),
        ("6/3", "2"),
        ("--1", "1"),
    ],
)
def test_arithmetic(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", " ", "1+", "1//2", "2**9", "9**9**9", "1/0", "1/(2-2)", "()", "(1)(2)", "1,2", "1.5", "1e9", "0x10"),
        *(
            "1_000",
            "True",
            "abs(1)",
            "__import__('os')",
            "1;2",
            "1 if 1 else 2",
            "[1]",
            "1\n+1",
            "\uff11+\uff11",
            "0o7",
            "007",
        ),
        *("(" * 60 + "1" + ")" * 60, "-" * 99 + "(", "1" * 101, "1+" * 49 + "1+"),
    ],
)
def test_what_is_no_arithmetic_is_refused_in_words(expression: str) -> None:
    with pytest.raises(ValueError, match=r"^(an expression is|this is no|division by zero)"):
        evaluate(expression)


@given(st.text(alphabet="0123456789+-*/() ", max_size=120))
def test_the_evaluator_answers_or_refuses_and_never_more(expression: str) -> None:
    try:
        value = evaluate(expression)
    except ValueError:
        return
    assert len(value) <= 120
    assert float(value) == pytest.approx(eval(expression.strip()))


@given(st.text(max_size=30))
def test_no_text_escapes_the_evaluator(expression: str) -> None:
    with contextlib.suppress(ValueError):
        assert set(evaluate(expression)) <= set("0123456789.-e+")


async def test_demonstrations_are_episodes_that_could_have_been(env: LoadedEnvironment) -> None:
    rng = random.Random(1)
    called = copied = 0
    for index in range(1000):
        task = await env.make_task("train", index)
        call, result, answer = demonstrate(task, rng)
        assert (call.role, result.role, answer.role) == (Role.ASSISTANT, Role.TOOL, Role.ASSISTANT)
        expression = call.tool_calls[0].arguments["expression"]
        assert evaluate(expression) == result.text
        assert (result.tool_call_id, result.name) == (call.tool_calls[0].id, "calculator")
        called += expression == task.data.expression.replace(" ", "")
        copied += answer.text == result.text
    assert 550 < called < 650
    assert 650 < copied < 760


async def test_the_environments_own_demonstration_is_right(env: LoadedEnvironment) -> None:
    task = await env.make_task("eval", 1)
    assert env.demonstrate(task, random.Random(0))[-1].text == str(task.data.answer)
