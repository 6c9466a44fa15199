"""The run file: everything a run is, as one validated document.

Invariant: a run file is either wholly valid or refused with sentences that name the field and, for an unknown one,
the nearest known name. Nothing is written and nothing started before that. Secrets are named by environment variable
(`api_key_env`), never written here.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, Field, StringConstraints, ValidationError, model_validator

from .base import MOST, Strict
from .engines import CAPABILITIES, URL, EngineConfig, HttpUrl, why_untrainable_engine
from .limits import Limits
from .numbers import LARGEST
from .sampling import Sampling
from .text import shortened
from .training import BatchConfig, PublishConfig, StalenessConfig, TrainerConfig, TrainerKind, WandbConfig

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_RUN_ID = re.compile(r"(?:run/)?[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Without `run/`: what Temporal calls a workflow for which nobody names an id."""
_PATTERNS = {
    _NAME: "a name is up to 63 letters, digits, '.', '_' and '-', and starts with a letter or digit",
    URL: "an address looks like http://host:port/v1",
}
Name = Annotated[str, StringConstraints(pattern=_NAME)]


class ModelConfig(Strict):
    """The policy: where its tokenizer and weights are, and how messages become tokens."""

    path: str = Field(min_length=1)
    """Folder or hub name."""
    revision: str = "main"
    """Branch, tag or commit of a hub model; without meaning for a folder."""
    renderer: str = "auto"
    """`auto`, or the name of a chat format of the `renderers` library (qwen3, llama_3, …)."""
    context: int | None = Field(default=None, ge=8, le=MOST)
    """Longest prompt plus completion; default: the model's own limit. An engine's, if smaller, applies besides."""
    init_from: str | None = None
    """Folder of a checkpoint to begin with instead of `path`'s weights; `atropos run fork` fills it in."""


class EnvironmentConfig(Strict):
    """An environment of the mixture."""

    id: str = Field(min_length=1)
    """Entry point name, `module:Class`, or `path/to/file.py[:Class]`."""
    name: Name | None = None
    """What rows and pages call it; default: derived from `id`."""
    weight: float = Field(default=1.0, gt=0, le=LARGEST)
    """Share of the groups that count."""
    group_size: int = Field(default=8, ge=1, le=1024)
    """Episodes of one task; at least 2 to train on, since advantages compare them."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The environment's own configuration."""
    limits: Limits = Limits()

    @property
    def label(self) -> str:
        if self.name is not None:
            return self.name
        last = self.id.rsplit(":", 1)[-1].rsplit("/", 1)[-1].removesuffix(".py")
        return re.sub(r"[^A-Za-z0-9._-]", "-", last)


class JudgeConfig(Strict):
    """A language model that scores."""

    url: HttpUrl
    """Of a server that speaks OpenAI's API."""
    model: str
    """What that server calls the model."""
    api_key_env: str | None = None
    """Variable of the workers' environment that holds its key."""


class GroupConfig(Strict):
    """When a group counts."""

    min_valid: int = Field(default=2, ge=1, le=MOST)
    """Valid members a group needs; never more than its size."""
    top_up: int = Field(default=2, ge=0, le=8)
    """How many times invalid members are tried again before the task is quarantined."""


class RolloutConfig(Strict):
    """How much is in flight."""

    concurrency: int | None = Field(default=None, ge=1, le=2000)
    """Groups in flight, counted by the episodes they still play; default: what the engines' concurrency can feed."""


class BudgetConfig(Strict):
    """When a run ends before its steps are done. At least one limit is required without trainer."""

    groups: int | None = Field(default=None, ge=1, le=MOST)
    """Groups that count: sealed or filtered. Failed ones are replaced."""
    sampled_tokens: float | None = Field(default=None, gt=0, lt=2**63)
    """Sampled in all, evaluations included; what is in flight when they are spent still finishes."""
    hours: float | None = Field(default=None, gt=0, le=MOST)
    """Since the run was registered, pauses included; what is in flight then still finishes."""

    @property
    def unlimited(self) -> bool:
        return self.groups is None and self.sampled_tokens is None and self.hours is None


class EvalSet(Strict):
    """Tasks of an evaluation."""

    id: str
    """An environment of the run, by its label or id."""
    split: Literal["eval", "test"] = "eval"
    """Which tasks of it. Neither split is ever trained on."""
    tasks: int = Field(default=64, ge=1, le=MOST)
    """Its first so many tasks."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Episodes of each task, for pass@k."""


class EvalConfig(Strict):
    """Evaluations of the run."""

    every: int | None = Field(default=None, ge=1, le=MOST)
    """Train steps between two evaluations; each is pinned to the version that it began with."""
    at_start: bool = False
    """Evaluate before the first rollout."""
    at_end: bool = True
    """Evaluate after the last one."""
    sampling: Sampling | None = None
    """Default: the run's sampling."""
    sets: tuple[EvalSet, ...] = ()


class RunConfig(Strict):
    """A run."""

    name: Name
    """The run's id is made from it."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides in which order tasks are drawn, and what the trainer draws."""
    model: ModelConfig
    engines: tuple[EngineConfig, ...] = Field(min_length=1)
    environments: tuple[EnvironmentConfig, ...] = Field(min_length=1)
    judges: dict[str, JudgeConfig] = Field(default_factory=dict)
    group: GroupConfig = GroupConfig()
    rollout: RolloutConfig = RolloutConfig()
    batch: BatchConfig = BatchConfig()
    staleness: StalenessConfig = StalenessConfig()
    sampling: Sampling = Sampling()
    trainer: TrainerConfig = TrainerConfig()
    publish: PublishConfig = PublishConfig()
    eval: EvalConfig = EvalConfig()
    budget: BudgetConfig = BudgetConfig()
    wandb: WandbConfig | None = None
    """Absent: metrics stay in the store and on stdout."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        labels = [environment.label for environment in self.environments]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"environments: two are called {label!r}; give each its own name:")
        chosen = [(self.environment(one.id).label, one.split) for one in self.eval.sets]
        for label, split in chosen:
            if chosen.count((label, split)) > 1:
                raise ValueError(f"eval.sets: {label!r} is listed twice for the split {split!r}")
        if not self.trains and self.budget.unlimited:
            raise ValueError("budget: set groups, sampled_tokens or hours, so that a run without trainer ends")
        if self.trainer.kind is not TrainerKind.BUILTIN and self.eval.every is not None:
            raise ValueError("eval.every: only the built-in trainer's steps are followed; use at_start and at_end")
        if len({CAPABILITIES[engine.kind].tokens for engine in self.engines}) > 1:
            raise ValueError("engines: some take tokens and some take messages; an episode needs engines of one sort")
        if not self.trains:
            return self
        for engine in self.engines:
            problem = why_untrainable_engine(engine.kind)
            if problem is not None:
                raise ValueError(problem)
        for environment in self.environments:
            if environment.group_size < 2:
                raise ValueError(f"environments: {environment.label!r} needs a group_size of at least 2 to train on")
        return self

    @property
    def trains(self) -> bool:
        """Whether groups become weights, here or elsewhere."""
        return self.trainer.kind is not TrainerKind.NONE

    @property
    def tokens(self) -> bool:
        """Whether its engines take and return tokens; otherwise messages."""
        return self.engines[0].capabilities.tokens

    def environment(self, id_or_label: str) -> EnvironmentConfig:
        """The environment called so. Raises ValueError naming the nearest one."""
        for environment in self.environments:
            if id_or_label in (environment.label, environment.id):
                return environment
        known = [environment.label for environment in self.environments]
        raise ValueError(f"eval.sets: no environment {id_or_label!r} in this run; known: {', '.join(known)}")

    def evaluations(self, when: Literal["start", "end"] | int) -> dict[str, EvalSet]:
        """Evaluations to run then, by name. A number is the version that a train step has just made."""
        if isinstance(when, int):
            last = self.trainer.kind is TrainerKind.BUILTIN and when >= self.trainer.steps
            due = self.eval.every is not None and when % self.eval.every == 0
            # The last version is evaluated at the end, where that is wanted.
            wanted = due and not (last and self.eval.at_end)
        else:
            wanted = self.eval.at_start if when == "start" else self.eval.at_end
        prefix = f"step{when}" if isinstance(when, int) else when
        sets = self.eval.sets if wanted else ()
        return {f"{prefix}-{self.environment(chosen.id).label}-{chosen.split}": chosen for chosen in sets}

    def evaluation_set(self, name: str) -> EvalSet | None:
        """The set that an evaluation of this name runs over; None where the run has none called so."""
        version = evaluated_version(name)
        moments: tuple[Literal["start", "end"] | int, ...] = ("start", "end") if version is None else (version,)
        return next((self.evaluations(when)[name] for when in moments if name in self.evaluations(when)), None)

    def sampling_for(self, evaluation: str | None) -> Sampling:
        """The sampling of training episodes, or of an evaluation's."""
        return self.sampling if evaluation is None else self.eval.sampling or self.sampling

    @property
    def concurrency(self) -> int:
        """Groups in flight that the engines' concurrency can feed, at least 1."""
        if self.rollout.concurrency is not None:
            return self.rollout.concurrency
        slots = sum(engine.concurrency for engine in self.engines)
        return max(1, slots // max(environment.group_size for environment in self.environments))


def evaluated_version(name: str) -> int | None:
    """The version that an evaluation of this name is of; None where it begins or ends the run."""
    found = re.match(r"step(\d+)-", name)
    return None if found is None else int(found[1])


def why_no_run_id(run_id: str) -> str | None:
    """Why nothing can be called so, as a sentence without its end; None for an id that every row and page can show.

    The ids of a run's parts are made by slashes behind it, so it has none of its own after `run/`.
    """
    if _RUN_ID.fullmatch(run_id):
        return None
    return (
        f"the id {shortened(run_id, 60)!r} cannot be used: after run/ it has up to 100 letters, digits, '.', '_' and "
        "'-', and starts with a letter or digit"
    )


class RunFileError(ValueError):
    """A run file that is refused; `problems` are sentences for people."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def parse_run(document: object) -> RunConfig:
    """Validate a decoded run file. Raises RunFileError with one sentence a problem."""
    if not isinstance(document, Mapping):
        raise RunFileError([f"a run file is a mapping of fields, not {type(document).__name__}"])
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise RunFileError([_sentence(problem) for problem in _root_causes(error.errors())]) from None


def _root_causes(problems: list[Any]) -> list[Any]:
    """Without the follow-up complaint that a list is too short because its only item was bad."""
    paths = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if not any(len(path) > len(problem["loc"]) and path[: len(problem["loc"])] == problem["loc"] for path in paths)
    ]


def _sentence(problem: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    where = ".".join(path) or "run file"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _fields_at(RunConfig, path[:-1]), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{where}: unknown field{hint}"
    if problem["type"] == "missing":
        return f"{where}: required, but missing"
    if problem["type"] == "string_pattern_mismatch":
        return f"{where}: {_PATTERNS[problem['ctx']['pattern']]} (got {_shown(problem['input'])})"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error" and not path:
        return message
    return f"{where}: {message[:1].lower()}{message[1:]} (got {_shown(problem['input'])})"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        if part.isdigit():
            continue
        if part not in model.model_fields:
            return []
        nested = next(_models_in(model.model_fields[part].annotation), None)
        if nested is None:
            return []
        model = nested
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if get_origin(annotation) is None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in get_args(annotation):
        yield from _models_in(argument)
