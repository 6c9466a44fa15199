"""Whole numbers on the command line: each is bounded, so none reaches a column that cannot hold it."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from atropos.cli.main import _COMMANDS, app, load
from atropos.contracts.base import MOST
from typer.testing import CliRunner


def parameters(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every parameter of every command below this one, with the words that lead to it."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from parameters(inner, (*path, name))
    for parameter in command.params:
        yield path, parameter


ALL = [one for name in _COMMANDS for one in parameters(load(name), (name,))]


def is_whole(parameter: Any) -> bool:
    annotation = parameter.type_descriptor.annotation
    return annotation is int or int in get_args(annotation)


WHOLE = {f"{' '.join(path)} {parameter.opts[0]}": (path, parameter) for path, parameter in ALL if is_whole(parameter)}


def test_whole_numbers_are_found() -> None:
    assert {"run list --limit", "env check -n", "up --seed", "sft-gen --top", "run concurrency groups"} <= set(WHOLE)


@pytest.mark.parametrize("name", list(WHOLE))
def test_every_whole_number_has_two_bounds_and_is_refused_beyond_them(name: str) -> None:
    path, parameter = WHOLE[name]
    assert parameter.min is not None, "no lower bound"
    assert parameter.max is not None, "no upper bound"
    assert -MOST <= parameter.min <= parameter.max <= MOST
    option = parameter.opts[0]
    for number in ("1" + "0" * 20, str(parameter.max + 1), str(parameter.min - 1)):
        given = [f"{option}={number}"] if option.startswith("--") else [option, number]
        arguments = [*path, *given] if option.startswith("-") else [*path, "some-run", "--", number]
        result = CliRunner().invoke(app, [*arguments])
        assert result.exit_code == 2, (arguments, result.output)
        assert f"'{option}'" in result.stderr or f"'{option}' / " in result.stderr or f"/ '{option}'" in result.stderr
