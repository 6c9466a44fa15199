"""The class an environment's author writes, and the models it speaks in.

Invariant: an environment is a pure description plus functions of (task, state, episode): one instance serves every
episode of a process, so whatever belongs to an episode is in its `State`, which is plain data and committed with
each turn. Definitions that break the contract are refused when the class is created.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator
from typing_extensions import TypeVar

from ..contracts.base import Strict
from ..contracts.limits import Limits
from ..contracts.messages import Message, user
from ..contracts.numbers import Bounded
from .faults import BadEnvironment
from .marks import Kind, Mark, mark_of
from .parameters import HOOKS, check_hook, check_marked

SimT = TypeVar("SimT")


class EnvConfig(Strict):
    """Base of an environment's configuration: frozen, unknown fields refused with the nearest known name."""


class State(BaseModel):
    """Base of an episode's state: plain data of at most 256 KiB as JSON, every field with a default.

    Change it in place; what changed is committed with the turn. Each function gets a copy of its own.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, ser_json_inf_nan="constants")


class Replay(State):
    """State of a simulator that cannot be serialised: it is rebuilt from its seed and the actions so far.

    `seed` is the task's own (`task.data.seed`) where it has one, else derived from the task's key: the same for every
    episode of a group. A simulator must be deterministic given the seed.
    """

    seed: int = 0
    actions: list[JsonValue] = Field(default_factory=list)

    def rebuild(self, make: Callable[[int], SimT], act: Callable[[SimT, Any], object]) -> SimT:
        """The simulator as it stands: `make(seed)`, then `act(simulator, action)` for each action so far."""
        simulator = make(self.seed)
        for action in self.actions:
            act(simulator, action)
        return simulator

    def record(self, action: JsonValue) -> None:
        """Remember an action that the simulator has just taken."""
        self.actions.append(action)


class Step(BaseModel):
    """What the environment answers to a message of the model.

    `messages` may be given as one text (a user message), one message or several. `reward` is this turn's, None where
    it gives none. `done`: the episode is over; `truncated`: it was cut short. `info` is kept, never shown to the model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: tuple[Message, ...] = ()
    reward: Bounded | None = None
    done: bool = False
    truncated: bool = False
    info: dict[str, JsonValue] = Field(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(
            self,
            messages: str | Message | Sequence[Message] = (),
            *,
            reward: float | None = None,
            done: bool = False,
            truncated: bool = False,
            info: dict[str, Any] | None = None,
        ) -> None: ...
    else:

        def __init__(self, messages=(), **fields):
            super().__init__(messages=messages, **fields)

    @field_validator("messages", mode="before")
    @classmethod
    def _as_messages(cls, value: object) -> object:
        return as_messages(value)


def as_messages(value: object) -> tuple[Message, ...]:
    """A text, a message or a sequence of messages as a tuple. Raises ValueError for anything else."""
    if isinstance(value, str):
        return (user(value),)
    if isinstance(value, Message):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(item, Message | dict) for item in value):
        return tuple(Message.model_validate(item) for item in value)
    raise ValueError(f"messages must be a text, a message or a list of messages, not {type(value).__name__}")


ConfigT = TypeVar("ConfigT", bound=EnvConfig, default=EnvConfig)
StateT = TypeVar("StateT", bound=State, default=State)


class Environment(Generic[ConfigT, StateT]):
    """Base of every environment: `class Mine(Environment[MyConfig, MyState])`; both parameters may be left out.

    Methods the author writes, sync or async. Each asks by parameter name for what it needs:

    - `task(split, index) -> Task[Data]`: the task at a position of `train`, `eval` or `test`. Must be a pure function
      of config, split and index. Annotate the result, so that stored data is read back as `Data`.
    - `prompt(task[, state, ctx])`: the opening messages (a text, a message, or several).
    - `size(split) -> int | None`, optional: number of tasks, None for endless (the default).
    - `step(task, state, message, …) -> Step`, optional: the environment answers a message without tool calls.
    - `setup(task, state, ctx)` and `cleanup(task, state, ctx)`, optional: before and after each episode.
    - `startup()` and `shutdown()`, optional: once in each process, for what is slow to load.
    - `demonstrate(task, rng)`, optional: messages of a good episode after the prompt, for a cold start and for trying
      the environment without a model.

    Decorated methods: `@tool`, `@reward`, `@metric`, `@group_reward`, `@stop`; `@step(run=…)` places `step`.
    """

    version: ClassVar[str] = "1"
    """Raised by the author whenever tasks, state or rewards change; an episode never continues under another one."""
    limits: ClassVar[Limits] = Limits()
    config_type: ClassVar[type[EnvConfig]] = EnvConfig
    state_type: ClassVar[type[State]] = State

    if TYPE_CHECKING:
        task: Callable[..., Any]
        prompt: Callable[..., Any]

    def __init__(self, config: ConfigT | None = None) -> None:
        self.config: ConfigT = config if config is not None else self.config_type()  # type: ignore[assignment]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _bind_parameters(cls)
        if not isinstance(cls.limits, Limits):
            raise BadEnvironment(f"{cls.__name__}.limits must be Limits(…), not {type(cls.limits).__name__}")
        for name in HOOKS:
            function = getattr(cls, name, None)
            if function is not None:
                check_hook(cls.__name__, name, function)
        for name, (function, mark) in marked(cls).items():
            check_marked(cls.__name__, name, function, mark)


def _bind_parameters(cls: type[Environment[Any, Any]]) -> None:
    """Read config and state types from `Environment[…]`."""
    for base in vars(cls).get("__orig_bases__", ()):
        origin = get_origin(base)
        if not (isinstance(origin, type) and issubclass(origin, Environment)):
            continue
        for given in get_args(base):
            if isinstance(given, type) and issubclass(given, EnvConfig):
                cls.config_type = given
            elif isinstance(given, type) and issubclass(given, State):
                cls.state_type = given
            elif isinstance(given, type) and given is not Any:
                raise BadEnvironment(f"{cls.__name__}: {given.__name__} is neither an EnvConfig nor a State")
    try:
        cls.state_type()
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise BadEnvironment(
            f"{cls.__name__}: state {cls.state_type.__name__} needs a default for `{field}`; fill it in `setup`"
        ) from None


def marked(cls: type[Environment[Any, Any]]) -> dict[str, tuple[Callable[..., Any], Mark]]:
    """Marked methods by name in order of definition, bases first; `step` is among them even undecorated.

    A subclass removes one by setting it to None. Raises BadEnvironment where one is overridden without its decorator.
    """
    found: dict[str, tuple[Callable[..., Any], Mark]] = {}
    for owner in reversed(cls.__mro__):
        for name, value in vars(owner).items():
            mark = mark_of(value)
            if mark is None and name == "step" and callable(value):
                mark = Mark(Kind.STEP)
            if mark is not None:
                found[name] = (value, mark)
            elif name in found and value is None:
                del found[name]
            elif name in found:
                kind = found[name][1].kind
                raise BadEnvironment(
                    f"{owner.__name__}.{name} overrides a @{kind} without being one; add @{kind}, "
                    f"or set `{name} = None` to remove it"
                )
    return found
