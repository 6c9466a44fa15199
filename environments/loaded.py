"""A loaded environment: everything an episode asks of one, in one place, whoever asks.

Invariant: each operation is a function of (task, state, episode, ctx) given as plain data; state goes in as a dict and
comes back as a new one, so an operation that fails or is repeated leaves nothing half-changed. The same code runs
in a worker, in the process pool and in `atropos env try`.

Where a function runs was fixed by its placement: `process` goes to the pool that the caller passes (without one it
runs here), `activity` runs here with sync code in a thread, `inline` runs here on the loop.
"""

import dataclasses
import inspect
import random
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..contracts.context import Context, Judge
from ..contracts.messages import Message
from ..contracts.reasons import RunAt
from ..contracts.tasks import Task
from .base import Replay, State, as_messages
from .calling import NoJudge, plain
from .faults import EnvironmentFault, author_code
from .marks import DEFAULT_SECONDS
from .parameters import asked
from .results import StartOutcome, StepOutcome, as_step, as_task, dump_state
from .scoring import ScoreGiver
from .tools import ToolCaller

if TYPE_CHECKING:
    from .pool import ProcessPool


class LoadedEnvironment(ToolCaller, ScoreGiver):
    """One environment with one configuration. Safe to share between concurrent episodes."""

    async def size(self, split: str) -> int | None:
        """Number of tasks of a split; None: endless."""
        function = getattr(self.environment, "size", None)
        if function is None:
            return None
        await self.ready()
        value = await self._call("size", function, {"split": split})
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise EnvironmentFault(f"{self.name}.size returned {value!r}; it must be a number of tasks, or None")
        return value

    async def make_task(self, split: str, index: int) -> Task[Any]:
        """The task at `index` of a split."""
        await self.ready()
        value = await self._call("task", self.environment.task, {"split": split, "index": index})
        return as_task(f"{self.name}.task", value)

    async def task_from_data(self, data: Any, info: dict[str, Any] | None = None) -> Task[Any]:
        """A stored task (plain JSON data) as the author's type again.

        The type is the one `task` is annotated with (`-> Task[Data]`), else that of the first training task.
        """
        if self._data_type is None:
            first_task = await self.make_task("train", 0)
            self._data_type = TypeAdapter(_typed(first_task.data))
        try:
            parsed = self._data_type.validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "data"
            raise EnvironmentFault(
                f"{self.name}: stored task data no longer fits ({field}: {first['msg']}); "
                "raise the environment's `version` when its tasks change"
            ) from None
        return Task(data=parsed, info=info or {})

    @cached_property
    def _data_type(self) -> TypeAdapter[Any] | None:
        try:
            returned = get_type_hints(self.environment.task).get("return")
        except NameError:
            return None
        if not (inspect.isclass(returned) and issubclass(returned, Task)):
            return None
        given = returned.__pydantic_generic_metadata__["args"]
        return TypeAdapter(given[0]) if given else None

    async def start(
        self, task: Task[Any], ctx: Context, *, pool: "ProcessPool | None" = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """The prompt and the first state, after `setup`; in the pool where one is given."""
        if pool is not None:
            value = await self._in_pool(pool, "start", plain(task, ctx), DEFAULT_SECONDS[RunAt.ACTIVITY])
            outcome = StartOutcome.model_validate(value)
            return outcome.prompt, outcome.state
        await self.ready()
        state = self._first_state(task)
        offered = {"task": task, "state": state, "ctx": dataclasses.replace(ctx, call="setup")}
        setup = getattr(self.environment, "setup", None)
        if setup is not None:
            returned = await self._in_thread("setup", setup, offered)
            if isinstance(returned, State):
                state = returned
        offered = {"task": task, "state": state, "ctx": dataclasses.replace(ctx, call="prompt")}
        value = await self._call("prompt", self.environment.prompt, offered)
        try:
            prompt = as_messages(value)
        except ValueError as error:
            raise EnvironmentFault(f"{self.name}.prompt: {error}") from None
        if not prompt:
            raise EnvironmentFault(f"{self.name}.prompt returned no message; the model needs at least one")
        return prompt, dump_state(f"{self.name}.setup", state)

    def _first_state(self, task: Task[Any]) -> State:
        state = self.environment.state_type()
        if isinstance(state, Replay):
            seed = getattr(task.data, "seed", None)
            state.seed = seed if isinstance(seed, int) else int(task.key[:12], 16)
        return state

    async def cleanup(self, task: Task[Any], state: dict[str, Any], ctx: Context) -> None:
        """Run the author's `cleanup`, if there is one. Called on every way out of an episode, perhaps twice."""
        function = getattr(self.environment, "cleanup", None)
        if function is None:
            return
        await self.ready()
        offered = {"task": task, "state": self._state(state), "ctx": dataclasses.replace(ctx, call="cleanup")}
        await self._in_thread("cleanup", function, offered)

    def demonstrate(self, task: Task[Any], rng: random.Random) -> tuple[Message, ...]:
        """Messages of a good episode after the prompt. Raises EnvironmentFault where the environment has none."""
        function = getattr(self.environment, "demonstrate", None)
        if function is None:
            raise EnvironmentFault(f"{self.name} has no `demonstrate`")
        with author_code(f"{self.name}.demonstrate"):
            return as_messages(list(function(**asked(function, {"task": task, "rng": rng}))))

    async def run_step(
        self,
        task: Task[Any],
        state: dict[str, Any],
        message: Message,
        ctx: Context,
        *,
        judge: Judge | None = None,
        pool: "ProcessPool | None" = None,
        apart: bool = False,
    ) -> StepOutcome:
        """What the environment answers to a message without tool calls. `apart`: in the pool, wherever it was placed.

        Raises EnvironmentProblem, and JudgeUnavailable for a `step` that asks a judge.
        """
        plan = self.spec.step
        if plan is None:
            raise EnvironmentFault(f"{self.name} has no step, so it cannot answer a message")
        if pool is not None and (apart or plan.run is RunAt.PROCESS):
            payload = {"message": message.model_dump(mode="json"), "state": state, **plain(task, ctx)}
            return StepOutcome.model_validate(await self._in_pool(pool, "step", payload, plan.timeout_s, judge))
        await self.ready()
        mine, where = self._state(state), f"{self.name}.step"
        offered = {
            "task": task,
            "state": mine,
            "message": message,
            "ctx": dataclasses.replace(ctx, call="step"),
            "judge": judge or NoJudge(),
        }
        with author_code(where):
            value = await self._placed(plan, getattr(self.environment, "step"), offered)  # noqa: B009
        result = as_step(where, value)
        after = dump_state(where, mine)
        return StepOutcome(step=result, state=None if after == state else after)


def _typed(data: Any) -> Any:
    return type(data) if isinstance(data, BaseModel) or dataclasses.is_dataclass(data) else Any
