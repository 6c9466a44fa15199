"""Tools: the schema the model is told, and the answer every call gets."""

from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from atropos import Context, Environment, Limits, Message, State, Task, assistant, tool
from atropos.contracts.messages import ToolCall
from atropos.contracts.reasons import RunAt
from atropos.environments.faults import BadEnvironment, EnvironmentFault
from atropos.environments.loaded import LoadedEnvironment
from atropos.environments.results import MAX_RESULT_CHARS
from atropos.environments.schema import read_docstring
from atropos.environments.spec import describe_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field


class Unit(StrEnum):
    CM = "cm"
    INCH = "inch"


class Point(BaseModel):
    """A place."""

    x: int
    title: str = "here"


class Count(State):
    calls: int = 0
    big: str = ""


class Toolbox(Environment[Any, Count]):
    limits = Limits(turns=3)

    def task(self, split: str, index: int) -> Task[int]:
        return Task(data=index)

    def prompt(self, task: Task[int]) -> str:
        return "go"

    @tool(run="inline")
    def convert(
        self,
        length: float,
        unit: Unit = Unit.CM,
        *,
        state: Count,
        digits: Annotated[int, Field(ge=0, le=9)] = 2,
        task: Task[int],
        ctx: Context,
    ) -> str:
        """Convert a length.

        Works both ways.

        Args:
            length: What to convert,
                in units.
            unit (Unit): The unit it is in.
            state: Ours, not the model's.

        Returns:
            Text.
        """
        state.calls += 1
        assert isinstance(unit, Unit)
        return f"{length:.{digits}f} {unit} {task.data} {ctx.call}"

    @tool(run="inline")
    def move(self, to: Point, json: list[int] | None = None, mode: Literal["a", "b"] = "a") -> Point:
        """Move there."""
        return Point(x=to.x + 1)

    @tool(run="inline")
    async def give(self, kind: str, *, state: Count) -> Any:
        """Give something of a kind."""
        state.calls = 99
        match kind:
            case "none":
                return None
            case "dict":
                return {"a": [1, None], "ü": True}
            case "long":
                return "x" * (MAX_RESULT_CHARS + 1)
            case "object":
                return object()
            case "key":
                raise KeyError("k")
            case "exit":
                raise SystemExit(3)
            case "big":
                state.big = "x" * 300_000
                return "ok"
        return kind

    @tool
    def pooled(self, n: int) -> int:
        """Elsewhere."""
        return n


TOOLBOX = LoadedEnvironment("toolbox", {}, Toolbox())


@pytest.fixture(scope="module")
def env() -> LoadedEnvironment:
    return TOOLBOX


async def run(env: LoadedEnvironment, name: str, arguments: dict[str, Any], **more: Any) -> Any:
    call = ToolCall(id="1", name=name, arguments=arguments, **more)
    return await env.run_call(4, call, Task(data=7), {"calls": 0, "big": ""}, Context("r", "k", 0, 1))


def specs() -> dict[str, Any]:
    return {spec.name: spec for spec in describe_environment(Toolbox).tool_specs()}


def test_the_schema_comes_from_annotations_and_docstring() -> None:
    convert = specs()["convert"]
    assert convert.description == "Convert a length.\n\nWorks both ways."
    assert convert.parameters == {
        "type": "object",
        "properties": {
            "length": {"type": "number", "description": "What to convert, in units."},
            "unit": {"$ref": "#/$defs/Unit", "default": "cm", "description": "The unit it is in."},
            "digits": {"type": "integer", "default": 2, "minimum": 0, "maximum": 9},
        },
        "required": ["length"],
        "$defs": {"Unit": {"enum": ["cm", "inch"], "type": "string"}},
    }


def test_names_that_pydantic_uses_itself_are_fine_and_titles_are_only_dropped_as_keywords() -> None:
    move = specs()["move"].parameters
    assert set(move["properties"]) == {"to", "json", "mode"}
    assert set(move["$defs"]["Point"]["properties"]) == {"x", "title"}
    assert "title" not in move["$defs"]["Point"]


async def test_arguments_arrive_as_their_annotations_say_and_injected_ones_by_name(env: LoadedEnvironment) -> None:
    outcome = await run(env, "convert", {"length": "1.239", "unit": "inch"})
    assert outcome.content == "1.24 inch 7 4"
    assert outcome.state == {"calls": 1, "big": ""}
    assert (await run(env, "move", {"to": {"x": 1}})).content == '{"x": 2, "title": "here"}'


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("convrt", {}, "there is no tool 'convrt'; did you mean 'convert'"),
        ("convert", {}, "length: field required"),
        ("convert", {"length": "long"}, "length: input should be a valid number"),
        ("convert", {"length": 1, "unit": "mile"}, "unit: input should be 'cm' or 'inch'"),
        ("convert", {"length": 1, "digits": 10}, "digits: input should be less than or equal to 9"),
        ("convert", {"length": 1, "task": {"data": 1}}, "task: extra inputs are not permitted"),
        ("convert", {"length": 1, "state": {"calls": 9}}, "state: extra inputs are not permitted"),
        ("move", {"to": {"y": 1}}, "to.x: field required"),
    ],
)
async def test_a_call_that_cannot_run_is_planned_inline_and_answered(
    env: LoadedEnvironment, name: str, arguments: dict[str, Any], problem: str
) -> None:
    message = assistant("", (ToolCall(id="1", name=name, arguments=arguments),))
    (plan,) = env.plan_calls(message)
    assert (plan.run, plan.serial) == (RunAt.INLINE, False)
    outcome = await run(env, name, arguments)
    assert outcome.content.startswith("Error: ")
    assert problem in outcome.content
    assert outcome.error is not None
    assert outcome.state is None


async def test_a_malformed_call_is_answered_with_its_problem(env: LoadedEnvironment) -> None:
    outcome = await run(env, "convert", {}, problem="the arguments are no JSON", raw="{")
    assert outcome.content == "Error: the arguments are no JSON"


def test_calls_are_planned_where_their_tools_run(env: LoadedEnvironment) -> None:
    calls = (
        ToolCall(id="1", name="convert", arguments={"length": 1}),
        ToolCall(id="2", name="pooled", arguments={"n": 1}),
    )
    assert [(plan.index, plan.run, plan.serial) for plan in env.plan_calls(assistant("", calls))] == [
        (0, RunAt.INLINE, True),
        (1, RunAt.PROCESS, False),
    ]


@pytest.mark.parametrize(
    ("kind", "content"),
    [("none", ""), ("dict", '{"a": [1, null], "ü": true}'), ("text", "text")],
)
async def test_results_become_text(env: LoadedEnvironment, kind: str, content: str) -> None:
    assert (await run(env, "give", {"kind": kind})).content == content


async def test_a_long_result_is_cut_and_says_so(env: LoadedEnvironment) -> None:
    content = (await run(env, "give", {"kind": "long"})).content
    assert content.endswith(f"(cut; {MAX_RESULT_CHARS + 1} characters in all)")


@pytest.mark.parametrize(("kind", "said"), [("key", "KeyError: 'k'"), ("exit", "SystemExit: 3"), ("object", "Error")])
async def test_what_a_tool_raises_is_its_result_and_its_change_is_lost(
    env: LoadedEnvironment, kind: str, said: str
) -> None:
    outcome = await run(env, "give", {"kind": kind})
    assert said in outcome.content
    assert outcome.state is None


async def test_a_state_that_is_too_big_is_the_environments_fault(env: LoadedEnvironment) -> None:
    with pytest.raises(EnvironmentFault, match="the state is 293 KiB as JSON; at most 256 KiB are kept"):
        await run(env, "give", {"kind": "big"})


@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.integers() | st.text(), st.lists), max_size=3))
async def test_whatever_the_model_sends_gets_an_answer(arguments: dict[str, Any]) -> None:
    env = TOOLBOX
    for name in ("convert", "move", "give", ""):
        assert isinstance((await run(env, name, arguments)).content, str)


def undocumented(self: object, x: int) -> None: ...
def unannotated(self: object, x) -> None:  # type: ignore[no-untyped-def]
    """A doc."""


def overdescribed(self: object, x: int) -> None:
    """A doc.

    Args:
        y: Which is none.
    """


def unserialisable(self: object, x: object) -> None:
    """A doc."""


class Opaque:
    pass


unserialisable.__annotations__["x"] = Opaque


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (undocumented, "needs a docstring"),
        (unannotated, "argument `x` needs a type annotation"),
        (overdescribed, "its docstring describes `y`, which is no argument"),
        (unserialisable, "have no JSON schema"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused(function: Any, sentence: str) -> None:
    cls = type("Bad", (Toolbox,), {"extra": tool(function)})
    with pytest.raises(BadEnvironment, match=sentence):
        describe_environment(cls)


def test_docstrings_with_and_without_sections() -> None:
    assert read_docstring("One line.") == ("One line.", {})
    text = "Title.\n\nMore.\n\nArgs:\n  a: First\n     goes on: here\n  b (int): Second\nRaises:\n  c: no"
    assert read_docstring(text) == ("Title.\n\nMore.", {"a": "First goes on: here", "b": "Second"})


def test_messages_without_calls_plan_nothing(env: LoadedEnvironment) -> None:
    assert env.plan_calls(Message(role="assistant", content="hi")) == ()  # type: ignore[arg-type]
