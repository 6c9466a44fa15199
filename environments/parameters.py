"""A function declares what it needs by the names of its parameters.

Invariant: every name is checked when the class is defined, so a typo is refused with the list of names that exist
instead of failing the first episode. Nothing is passed by position, so the order of parameters is the author's.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..contracts.reasons import RunAt
from .faults import BadEnvironment, nearest
from .marks import Kind, Mark

INJECTED: Final = ("task", "episode", "episodes", "state", "message", "judge", "ctx")
"""Names the contract gives a meaning; a tool's argument cannot be called so."""

ALLOWED: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.TOOL: ("task", "state", "judge", "ctx"),
    Kind.REWARD: ("task", "episode", "state", "judge", "ctx"),
    Kind.METRIC: ("task", "episode", "state", "judge", "ctx"),
    Kind.GROUP_REWARD: ("task", "episodes", "judge", "ctx"),
    Kind.STOP: ("task", "state", "episode"),
    Kind.STEP: ("task", "state", "message", "judge", "ctx"),
}

HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "task": ("split", "index"),
    "size": ("split",),
    "prompt": ("task", "state", "ctx"),
    "setup": ("task", "state", "ctx"),
    "cleanup": ("task", "state", "ctx"),
    "startup": (),
    "shutdown": (),
    "demonstrate": ("task", "rng"),
}
"""Methods found by name, and what each may ask for. `step` is checked as `Kind.STEP`."""


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters by name, without `self`."""
    named = list(inspect.signature(function).parameters.values())
    if not inspect.ismethod(function):
        named = named[1:]
    return {parameter.name: parameter for parameter in named}


def asked(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `offered` that `function` asks for."""
    return {name: offered[name] for name in parameters_of(function) if name in offered}


def check_hook(owner: str, name: str, function: Callable[..., Any]) -> None:
    """Refuse a hook whose parameters the contract does not know."""
    _check_shape(owner, name, function)
    _check_names(owner, name, function, HOOKS[name])
    if name == "task" and set(parameters_of(function)) != {"split", "index"}:
        raise BadEnvironment(f"{owner}.task must take exactly `split` and `index`")


def check_marked(owner: str, name: str, function: Callable[..., Any], mark: Mark) -> None:
    """Refuse a marked function that asks for what it cannot have. Arguments of tools are checked with their schema."""
    _check_shape(owner, name, function)
    parameters = parameters_of(function)
    if mark.kind is Kind.TOOL:
        for wrong in set(INJECTED) - set(ALLOWED[Kind.TOOL]):
            if wrong in parameters:
                raise BadEnvironment(
                    f"@tool {owner}.{name} asks for `{wrong}`, which a tool cannot have "
                    f"(it may ask for {_listed(ALLOWED[Kind.TOOL])}); call an argument something else"
                )
    else:
        _check_names(owner, f"{name} (@{mark.kind})", function, ALLOWED[mark.kind])
    if mark.kind is Kind.STEP and name != "step":
        raise BadEnvironment(f"@step is for the method called `step`, not {owner}.{name}")
    if "judge" in parameters:
        _check_judge(f"{owner}.{name}", function, mark)


def _check_judge(what: str, function: Callable[..., Any], mark: Mark) -> None:
    if not inspect.iscoroutinefunction(function):
        raise BadEnvironment(f"{what} asks for a judge, who is awaited: make it `async def`")
    if mark.run is RunAt.PROCESS:
        raise BadEnvironment(f'{what} asks for a judge, who cannot be reached from the pool: use run="activity"')


def _check_shape(owner: str, name: str, function: Callable[..., Any]) -> None:
    if not inspect.isfunction(function):
        raise BadEnvironment(f"{owner}.{name} must be a plain method (`def` or `async def`)")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadEnvironment(f"{owner}.{name} yields; it must return its result")
    everything = list(inspect.signature(function).parameters.values())
    if not everything:
        raise BadEnvironment(f"{owner}.{name} has no `self`")
    for parameter in everything[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise BadEnvironment(
                f"{owner}.{name}: parameter `{parameter.name}` cannot be passed by name; write each parameter out"
            )


def _check_names(owner: str, name: str, function: Callable[..., Any], allowed: tuple[str, ...]) -> None:
    for parameter in parameters_of(function):
        if parameter not in allowed:
            may = f"it may ask for {_listed(allowed)}" if allowed else "it takes nothing but self"
            raise BadEnvironment(f"{owner}.{name} asks for `{parameter}`; {may}{nearest(parameter, allowed)}")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
