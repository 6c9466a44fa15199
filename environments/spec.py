"""The pure description of an environment class: what it has and where each part runs.

Invariant: a workflow never sees an environment, only this (through the start activity), so where a call runs is data
that is fixed when the episode starts. Building it checks everything that class creation could not: tool schemas need
resolved annotations, and those may name classes defined further down in the author's file.
"""

import re
from collections.abc import Callable
from typing import Any

from ..contracts.activities import ScorerPlan
from ..contracts.base import Wire
from ..contracts.limits import Limits
from ..contracts.messages import ToolSpec
from ..contracts.reasons import RunAt
from .base import Environment, marked
from .faults import BadEnvironment
from .marks import Kind, placement
from .parameters import parameters_of
from .schema import arguments_model, describe, json_schema

_REACH = (RunAt.INLINE, RunAt.PROCESS, RunAt.ACTIVITY)
"""From the least to the most demanding place."""


class PlacedTool(Wire):
    """A tool: what the model is told, and where it runs. `serial`: it takes `state`."""

    spec: ToolSpec
    plan: ScorerPlan
    serial: bool


class Scorer(Wire):
    """A reward or metric and where it runs."""

    name: str
    plan: ScorerPlan
    weight: float = 1.0
    metric: bool = False


class GroupScorer(Wire):
    """A group reward and where it runs."""

    name: str
    plan: ScorerPlan
    weight: float = 1.0
    min_valid: int = 2


class EnvironmentSpec(Wire):
    """An environment as everything outside `environments` knows it."""

    name: str
    version: str
    description: str
    limits: Limits
    tools: tuple[PlacedTool, ...] = ()
    scorers: tuple[Scorer, ...] = ()
    group_scorers: tuple[GroupScorer, ...] = ()
    stops: tuple[str, ...] = ()
    """Names of the stop conditions, in the order they are asked."""
    step: ScorerPlan | None = None
    """Where `step` runs; None where the environment does not answer."""
    asks_judge: tuple[str, ...] = ()
    """Names of the functions that ask for a judge."""
    has_setup: bool = False
    has_cleanup: bool = False
    has_demonstrations: bool = False

    @property
    def has_step(self) -> bool:
        return self.step is not None

    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """What the model is told about its tools."""
        return tuple(tool.spec for tool in self.tools)

    @property
    def start_at(self) -> RunAt:
        """Where an episode starts and ends: scheduled where there is a `setup` or `cleanup`, which may be slow."""
        return RunAt.ACTIVITY if self.has_setup or self.has_cleanup else RunAt.INLINE

    @property
    def scheduled_scorers(self) -> tuple[ScorerPlan, ...]:
        """Plans of rewards and metrics that do not run inline."""
        return tuple(scorer.plan for scorer in self.scorers if scorer.plan.run is not RunAt.INLINE)

    @property
    def group_scorer_at(self) -> RunAt | None:
        """Where the group's scoring runs as a whole: the most demanding place of its group rewards."""
        return max((scorer.plan.run for scorer in self.group_scorers), key=_REACH.index, default=None)


def default_name(cls: type[object]) -> str:
    """`ToolMath` → `tool-math`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()


def describe_environment(cls: type[Environment[Any, Any]]) -> EnvironmentSpec:
    """The spec of a class. Raises BadEnvironment with what is missing or cannot be described."""
    owner = cls.__name__
    for needed in ("task", "prompt"):
        if getattr(cls, needed, None) is None:
            raise BadEnvironment(f"{owner} has no method `{needed}`; every environment needs `task` and `prompt`")
    tools: list[PlacedTool] = []
    scorers: list[Scorer] = []
    group_scorers: list[GroupScorer] = []
    stops: list[str] = []
    step: ScorerPlan | None = None
    methods = marked(cls)
    for name, (function, mark) in methods.items():
        plan = placement(f"{owner}.{name}", function, mark, "judge" in parameters_of(function))
        plan = plan.model_copy(update={"name": name})
        if mark.kind is Kind.TOOL:
            tools.append(_tool(owner, name, function, plan))
        elif mark.kind is Kind.STOP:
            stops.append(name)
        elif mark.kind is Kind.STEP:
            step = plan
        elif mark.kind is Kind.GROUP_REWARD:
            group_scorers.append(GroupScorer(name=name, plan=plan, weight=mark.weight, min_valid=mark.min_valid))
        else:
            metric = mark.kind is Kind.METRIC
            scorers.append(Scorer(name=name, plan=plan, weight=mark.weight, metric=metric))
    return EnvironmentSpec(
        name=default_name(cls),
        version=cls.version,
        description=(vars(cls).get("__doc__") or "").strip(),
        limits=cls.limits,
        tools=tuple(tools),
        scorers=tuple(scorers),
        group_scorers=tuple(group_scorers),
        stops=tuple(stops),
        step=step,
        asks_judge=tuple(name for name, (function, _) in methods.items() if "judge" in parameters_of(function)),
        has_setup=getattr(cls, "setup", None) is not None,
        has_cleanup=getattr(cls, "cleanup", None) is not None,
        has_demonstrations=getattr(cls, "demonstrate", None) is not None,
    )


def _tool(owner: str, name: str, function: Callable[..., Any], plan: ScorerPlan) -> PlacedTool:
    described = ToolSpec(
        name=name,
        description=describe(owner, name, function),
        parameters=json_schema(arguments_model(owner, name, function)),
    )
    return PlacedTool(spec=described, plan=plan, serial="state" in parameters_of(function))
