"""Run files: wholly valid, or refused with sentences that name the field and the nearest known name."""

import copy
from typing import Any

import pytest
from atropos.contracts.runfile import RunConfig, RunFileError, parse_run
from hypothesis import given
from hypothesis import strategies as st

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
