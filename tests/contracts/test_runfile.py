"""Run files: wholly valid, or refused with sentences that name the field and the nearest known name."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from atropos.contracts.runfile import RunConfig, RunFileError, _models_in, parse_run, why_no_run_id
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

GOOD: dict[str, Any] = {
    "name": "demo",
    "model": {"path": "policy"},
    "engines": [{"kind": "dev", "url": "http://127.0.0.1:8000"}],
    "environments": [{"id": "calculator"}],
    "budget": {"groups": 4},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """GOOD with the field at dotted `path` set."""
    document = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    node: Any = document
    for part in parents:
        node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
    node[last] = value
    return document


def test_a_small_file_is_enough() -> None:
    config = parse_run(GOOD)
    assert config.environments[0].label == "calculator"
    assert config.concurrency == 8
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([], "a run file is a mapping of fields, not list"),
        ({}, "name: required, but missing"),
        (changed("buget", {}), "buget: unknown field; did you mean 'budget'?"),
        (changed("model.rendrer", "x"), "model.rendrer: unknown field; did you mean 'renderer'?"),
        (changed("environments.0.limits.turn", 3), "environments.0.limits.turn: unknown field; did you mean 'turns'?"),
        (changed("environments.0.weight", "heavy"), "environments.0.weight: input should be a valid number"),
        (changed("name", "a b"), "name: a name is up to 63 letters"),
        (changed("engines.0.url", "localhost:1"), "engines.0.url: an address looks like http://host:port/v1"),
        (changed("budget", {}), "budget: set groups, sampled_tokens or hours"),
        (changed("environments", [{"id": "a:X"}, {"id": "b:X"}]), "two are called 'X'"),
        (changed("eval", {"sets": [{"id": "taxi"}]}), "eval.sets: no environment 'taxi' in this run"),
        (changed("eval", {"sets": [{"id": "calculator"}] * 2}), "listed twice"),
    ],
)
def test_a_bad_file_is_refused_with_its_sentence(document: object, sentence: str) -> None:
    with pytest.raises(RunFileError) as refused:
        parse_run(document)
    assert any(sentence in problem for problem in refused.value.problems), refused.value.problems


def integers(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of a run file that is a whole number, with its place."""
    for name, field in model.model_fields.items():
        here = f"{path}.{name}".lstrip(".")
        if field.annotation in (int, int | None):
            yield here, field
        known = field.annotation in (int, int | None)
        assert known or not re.search(r"\bint\b", str(field.annotation)), f"{here} is not looked at"
        for inner in _models_in(field.annotation):
            yield from integers(inner, here)


INTEGERS = dict(integers(RunConfig))


def test_every_number_of_a_run_file_fits_the_column_it_may_end_in() -> None:
    assert {"budget.groups", "trainer.steps", "eval.sets.tasks", "environments.limits.turns"} <= set(INTEGERS)
    for place, field in INTEGERS.items():
        bounds = {
            name: getattr(one, name)
            for one in field.metadata
            for name in ("ge", "gt", "le", "lt")
            if hasattr(one, name)
        }
        assert {"ge", "gt"} & set(bounds), f"{place} has no lower bound"
        assert {"le", "lt"} & set(bounds), f"{place} has no upper bound"
        assert bounds.get("le", 0) <= 2**31 - 1, place
        assert bounds.get("lt", 0) <= 2**63, place


@pytest.mark.parametrize(
    "path", ["budget.groups", "trainer.steps", "environments.0.limits.turns", "sampling.top_k", "seed"]
)
@pytest.mark.parametrize("number", [10**10, 10**30, -(10**30)])
def test_a_number_that_no_column_holds_is_refused_by_name(path: str, number: int) -> None:
    if path == "seed" and number == 10**10:
        assert parse_run(changed(path, number)).seed == number
        return
    with pytest.raises(RunFileError) as refused:
        parse_run(changed(path, number))
    [problem] = refused.value.problems
    assert problem.startswith(f"{path}: input should be ")


@pytest.mark.parametrize(
    "run_id", ["run/a", "run/a-b.c_D9", "run/" + "x" * 100, "0b6e2a0c-5f0e-4f27-9d2e-6a3d8d8f8a11"]
)
def test_what_a_run_may_be_called(run_id: str) -> None:
    assert why_no_run_id(run_id) is None


@pytest.mark.parametrize(
    "run_id",
    [
        "",
        "run/",
        "run/a/b",
        "run//a",
        "run/a b",
        "run/a\n",
        "run/a\x1b[2J",
        "a\0b",
        "run/-a",
        "run/" + "x" * 101,
        "x" * 1000,
    ],
)
def test_what_no_run_may_be_called_is_refused_in_one_sentence(run_id: str) -> None:
    problem = why_no_run_id(run_id)
    assert problem is not None
    assert "cannot be used: after run/ it has up to 100 letters" in problem
    assert problem.isprintable()
    assert len(problem) < 250


def test_a_bad_item_is_reported_once() -> None:
    with pytest.raises(RunFileError) as refused:
        parse_run(changed("engines.0.url", "x"))
    assert len(refused.value.problems) == 1


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=8))
def test_rubbish_is_refused_and_never_crashes(rubbish: object) -> None:
    with pytest.raises(RunFileError):
        parse_run(rubbish)
    with pytest.raises(RunFileError):
        parse_run({**GOOD, "engines": rubbish})


@pytest.mark.parametrize(
    ("reference", "label"),
    [("calculator", "calculator"), ("pkg.taxi:Taxi", "Taxi"), ("envs/my env.py", "my-env"), ("a/b.py:Cls", "Cls")],
)
def test_an_environment_is_called_by_the_last_part_of_its_reference(reference: str, label: str) -> None:
    assert parse_run(changed("environments", [{"id": reference}])).environments[0].label == label
