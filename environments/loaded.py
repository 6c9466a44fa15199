"""A loaded environment: everything an episode asks of one, in one place, whoever asks.

Invariant: each operation is a function of (task, state, episode, ctx) given as plain data; state goes in as a dict and
comes back as a new one, so an operation that fails or is repeated leaves nothing half-changed. The same code runs
in a worker, in the process pool and in `atropos env try`.

Where a function runs was fixed by its placement: `process` goes to the pool that the caller passes (without one it
runs here), `activity` runs here with sync code in a thread, `inline` runs here on the loop.
"""

import asyncio
import dataclasses
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..contracts.activities import ScorerPlan
from ..contracts.context import Context, Judge, JudgeUnavailable
from ..contracts.episode import Episode, Score
from ..contracts.flow import CallPlan
from ..contracts.limits import Limits
from ..contracts.messages import Message, ToolCall
from ..contracts.reasons import RunAt
from ..contracts.records import STEP_INDEX, CallRecord
from ..contracts.tasks import Task
from .base import Environment, Replay, State, Step, as_messages
from .faults import (
    BadEnvironmentArgs,
    CallTimedOut,
    EnvironmentFault,
    WorkerDied,
    author_code,
    nearest,
    said,
)
from .parameters import asked
from .results import (
    GroupScores,
    as_number,
    as_numbers,
    as_step,
    as_task,
    as_text,
    dump_state,
    load_state,
)
from .schema import arguments_model, read_arguments
from .spec import EnvironmentSpec, GroupScorer, PlacedTool, Scorer, describe_environment

if TYPE_CHECKING:
    from .pool import ProcessPool

INLINE: Final = RunAt.INLINE


class NoJudge:
    """Stands where a judge was asked for and none is configured: what it would score stays unscored."""

    async def ask(self, messages: list[Message], *, model: str = "default", max_tokens: int = 1024) -> str:
        raise JudgeUnavailable("no judge is configured; name one under `judges` in the run file")


class LoadedEnvironment:
    """One environment with one configuration. Safe to share between concurrent episodes."""

    def __init__(self, ref: str, args: Mapping[str, Any], environment: Environment[Any, Any]) -> None:
        self.ref = ref
        """Resolves to the same class in another process: an entry point, `module:Class` or `/file.py:Class`."""
        self.args = dict(args)
        self.environment = environment
        self.spec: EnvironmentSpec = describe_environment(type(environment))
        self._tools = {tool.spec.name: tool for tool in self.spec.tools}
        self._scorers = {scorer.name: scorer for scorer in self.spec.scorers}
        self._started = False
        self._starting = asyncio.Lock()
        self._starting_here = threading.Lock()
        self._data_type: Any = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def version(self) -> str:
        return self.spec.version

    @property
    def limits(self) -> Limits:
        return self.spec.limits

    # --- life of the process ------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Run `startup` once in this process. Whoever loads an environment awaits this before anything else;
        a sync `startup` that nobody awaited runs, blocking, with the first task."""
        startup = getattr(self.environment, "startup", None)
        if startup is None or self._started:
            return
        if inspect.iscoroutinefunction(startup):
            async with self._starting:
                if not self._started:
                    await self._call("startup", startup, {})
                    self._started = True
        else:
            await asyncio.to_thread(self._start_now)

    def _start_now(self) -> None:
        startup = getattr(self.environment, "startup", None)
        if startup is None or self._started:
            return
        with self._starting_here, author_code(f"{self.name}.startup"):
            if inspect.iscoroutinefunction(startup):
                raise EnvironmentFault(f"{self.name} was used before its async startup had run")
            if not self._started:
                startup()
                self._started = True

    async def close(self) -> None:
        """Run `shutdown` of an environment that was started."""
        shutdown = getattr(self.environment, "shutdown", None)
        if shutdown is not None:
            await self._in_thread("shutdown", shutdown, {})
        self._started = False

    def check_judges(self, judges: Mapping[str, object]) -> None:
        """Raise BadEnvironmentArgs where the environment asks for a judge and none is configured."""
        if self.spec.asks_judge and not judges:
            names = ", ".join(self.spec.asks_judge)
            raise BadEnvironmentArgs(f"{self.name} asks for a judge ({names}); name one under `judges`")

    # --- tasks --------------------------------------------------------------------------------------------------

    def size(self, split: str) -> int | None:
        """Number of tasks of a split; None: endless."""
        function = getattr(self.environment, "size", None)
        if function is None:
            return None
        value = self._call_now("size", function, {"split": split})
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise EnvironmentFault(f"{self.name}.size returned {value!r}; it must be a number of tasks, or None")
        return value

    def make_task(self, split: str, index: int) -> Task[Any]:
        """The task at `index` of a split."""
        value = self._call_now("task", self.environment.task, {"split": split, "index": index})
        return as_task(f"{self.name}.task", value)

    def task_from_data(self, data: Any, info: dict[str, Any] | None = None) -> Task[Any]:
        """A stored task (plain JSON data) as the author's type again.

        The type is the one `task` is annotated with (`-> Task[Data]`), else that of the first training task.
        """
        if self._data_type is None:
            self._data_type = self._annotated_data() or _typed(self.make_task("train", 0).data)
        try:
            parsed = TypeAdapter(self._data_type).validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "data"
            raise EnvironmentFault(
                f"{self.name}: stored task data no longer fits ({field}: {first['msg']}); "
                "raise the environment's `version` when its tasks change"
            ) from None
        return Task(data=parsed, info=info or {})

    def _annotated_data(self) -> Any:
        try:
            returned = get_type_hints(self.environment.task).get("return")
        except NameError:
            return None
        if inspect.isclass(returned) and issubclass(returned, Task):
            given = returned.__pydantic_generic_metadata__["args"]
            return given[0] if given else None
        return None

    # --- an episode's start and end -----------------------------------------------------------------------------

    async def start(self, task: Task[Any], ctx: Context) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """The prompt and the first state, after `setup`."""
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

    # --- tools --------------------------------------------------------------------------------------------------

    def plan_calls(self, message: Message) -> tuple[CallPlan, ...]:
        """Where each tool call of a message runs. What cannot run is planned inline, to be answered by an error."""
        return tuple(self._plan(index, call) for index, call in enumerate(message.tool_calls))

    def _plan(self, index: int, call: ToolCall) -> CallPlan:
        tool = self._tools.get(call.name)
        if tool is None or self._refusal(call) is not None:
            return CallPlan(index=index, name=call.name, run=INLINE, serial=False)
        plan = tool.plan
        return CallPlan(
            index=index, name=call.name, run=plan.run, serial=tool.serial, queue=plan.queue, timeout_s=plan.timeout_s
        )

    def _refusal(self, call: ToolCall) -> str | None:
        """Why a call cannot run, in words for the model; None where it can."""
        if call.problem is not None:
            return call.problem
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            return f"there is no tool {call.name!r}{nearest(call.name, self._tools)} (tools: {known})"
        try:
            read_arguments(self._arguments[call.name], call.arguments)
        except ValueError as error:
            return str(error)
        return None

    @cached_property
    def _arguments(self) -> dict[str, type[BaseModel]]:
        cls = type(self.environment)
        return {name: arguments_model(cls.__name__, name, getattr(cls, name)) for name in self._tools}

    async def run_call(
        self,
        index: int,
        call: ToolCall,
        task: Task[Any],
        state: dict[str, Any],
        ctx: Context,
        *,
        judge: Judge | None = None,
        pool: "ProcessPool | None" = None,
    ) -> CallRecord:
        """Answer one tool call. The tool's own failure (exception, timeout, death) is its result, never raised."""
        refusal = self._refusal(call)
        if refusal is not None:
            return _failed(index, call, ctx, refusal)
        tool = self._tools[call.name]
        if pool is not None and tool.plan.run is RunAt.PROCESS:
            payload = {"index": index, "call": call.model_dump(mode="json"), "state": state, **_plain(task, ctx)}
            try:
                answer = await self._in_pool(pool, "call", payload, tool.plan.timeout_s)
            except (CallTimedOut, WorkerDied) as error:
                return _failed(index, call, ctx, str(error))
            return CallRecord(turn=ctx.turn, index=index, call=call, **answer)
        await self.ready()
        return await self._call_tool(tool, index, call, task, state, dataclasses.replace(ctx, call=str(index)), judge)

    async def _call_tool(
        self,
        tool: PlacedTool,
        index: int,
        call: ToolCall,
        task: Task[Any],
        state: dict[str, Any],
        ctx: Context,
        judge: Judge | None,
    ) -> CallRecord:
        mine = self._state(state)
        function = getattr(self.environment, call.name)
        arguments = read_arguments(self._arguments[call.name], call.arguments)
        offered = {"task": task, "state": mine, "ctx": ctx, "judge": judge or NoJudge(), **arguments}
        try:
            content = as_text(await self._placed(tool.plan, function, offered))
        except CallTimedOut as error:
            return _failed(index, call, ctx, str(error))
        except EnvironmentFault:
            raise
        except (Exception, SystemExit) as error:
            problem = str(error) if isinstance(error, ValueError) and str(error) else said(error)
            return _failed(index, call, ctx, problem)
        after = dump_state(f"{self.name}.{call.name}", mine) if tool.serial else None
        changed = None if after == state else after
        return CallRecord(turn=ctx.turn, index=index, call=call, content=content, state=changed)

    # --- step and stop conditions -------------------------------------------------------------------------------

    async def run_step(
        self,
        task: Task[Any],
        state: dict[str, Any],
        message: Message,
        ctx: Context,
        *,
        judge: Judge | None = None,
        pool: "ProcessPool | None" = None,
    ) -> CallRecord:
        """What the environment answers to a message without tool calls."""
        plan = self.spec.step_plan
        if plan is None:
            raise EnvironmentFault(f"{self.name} has no step, so it cannot answer a message")
        if pool is not None and plan.run is RunAt.PROCESS:
            payload = {"message": message.model_dump(mode="json"), "state": state, **_plain(task, ctx)}
            answer = await self._in_pool(pool, "step", payload, plan.timeout_s)
            return _stepped(ctx, Step.model_validate(answer["step"]), answer["state"])
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
        return _stepped(ctx, result, None if after == state else after)

    async def stop_condition(self, task: Task[Any], state: dict[str, Any], episode: Episode) -> str | None:
        """Name of the first stop condition that holds, None where none does."""
        for name in self.spec.stops:
            offered = {"task": task, "state": self._state(state), "episode": episode}
            value = await self._call(name, getattr(self.environment, name), offered)
            if not isinstance(value, bool):
                raise EnvironmentFault(f"{self.name}.{name} returned {value!r}; a stop condition returns True or False")
            if value:
                return name
        return None

    # --- scores -------------------------------------------------------------------------------------------------

    async def score(
        self,
        name: str,
        task: Task[Any],
        state: dict[str, Any],
        episode: Episode,
        judge: Judge | None,
        ctx: Context,
        *,
        pool: "ProcessPool | None" = None,
    ) -> Score:
        """One reward or metric of a finished episode. A judge that is away leaves it unscored (None)."""
        scorer = self._scorer(name)
        if pool is not None and scorer.plan.run is RunAt.PROCESS:
            payload = {"name": name, "state": state, "episode": episode.model_dump(mode="json"), **_plain(task, ctx)}
            value = await self._in_pool(pool, "score", payload, scorer.plan.timeout_s)
            return Score.model_validate(value)
        await self.ready()
        where = f"{self.name}.{name}"
        offered = {
            "task": task,
            "state": self._state(state),
            "episode": episode,
            "judge": judge or NoJudge(),
            "ctx": dataclasses.replace(ctx, call=name),
        }
        try:
            with author_code(where):
                value = await self._placed(scorer.plan, getattr(self.environment, name), offered)
        except JudgeUnavailable:
            value = None
        return Score(name=name, value=as_number(where, value), weight=scorer.weight, metric=scorer.metric)

    async def score_inline(
        self, task: Task[Any], state: dict[str, Any], episode: Episode, judge: Judge | None, ctx: Context
    ) -> list[Score]:
        """Every reward and metric that runs inline, in order of definition."""
        inline = [scorer for scorer in self.spec.scorers if scorer.plan.run is INLINE]
        return [await self.score(scorer.name, task, state, episode, judge, ctx) for scorer in inline]

    async def score_group(
        self,
        task: Task[Any],
        episodes: Sequence[Episode],
        judge: Judge | None,
        *,
        pool: "ProcessPool | None" = None,
    ) -> dict[str, list[float | None]]:
        """Every group reward over the valid members of a group: name → one value each, in their order.

        With fewer members than its `min_valid`, or without its judge, a group reward leaves everyone unscored.
        """
        return {
            scorer.name: list((await self.score_members(scorer.name, task, episodes, judge, pool=pool)).values)
            for scorer in self.spec.group_scorers
        }

    async def score_members(
        self,
        name: str,
        task: Task[Any],
        episodes: Sequence[Episode],
        judge: Judge | None,
        *,
        pool: "ProcessPool | None" = None,
    ) -> GroupScores:
        """One group reward over the valid members of a group."""
        scorer = self._group_scorer(name)
        unscored = GroupScores(name=name, values=(None,) * len(episodes))
        if len(episodes) < scorer.min_valid:
            return unscored
        ctx = Context(run_id=episodes[0].key.run_id, task_key=task.key, member=-1, turn=-1, call=name)
        if pool is not None and scorer.plan.run is RunAt.PROCESS:
            payload = {"name": name, "episodes": [e.model_dump(mode="json") for e in episodes], **_plain(task, ctx)}
            return GroupScores.model_validate(await self._in_pool(pool, "group", payload, scorer.plan.timeout_s))
        await self.ready()
        where = f"{self.name}.{name}"
        offered = {"task": task, "episodes": list(episodes), "judge": judge or NoJudge(), "ctx": ctx}
        try:
            with author_code(where):
                value = await self._placed(scorer.plan, getattr(self.environment, name), offered)
        except JudgeUnavailable:
            return unscored
        return GroupScores(name=name, values=as_numbers(where, value, len(episodes)))

    def _scorer(self, name: str) -> Scorer:
        if name not in self._scorers:
            raise EnvironmentFault(f"{self.name} has no reward or metric {name!r}{nearest(name, self._scorers)}")
        return self._scorers[name]

    def _group_scorer(self, name: str) -> GroupScorer:
        for scorer in self.spec.group_scorers:
            if scorer.name == name:
                return scorer
        raise EnvironmentFault(f"{self.name} has no group reward {name!r}")

    # --- calling author code ------------------------------------------------------------------------------------

    def _state(self, plain: dict[str, Any]) -> State:
        return load_state(self.name, self.environment.state_type, plain)

    async def _call(self, name: str, function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
        with author_code(f"{self.name}.{name}"):
            return await _awaited(function(**asked(function, offered)))

    def _call_now(self, name: str, function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
        """For pure functions that sync code asks for; an async one runs to its end on a loop of its own."""
        self._start_now()
        with author_code(f"{self.name}.{name}"):
            value = function(**asked(function, offered))
            if not inspect.iscoroutine(value):
                return value
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(asyncio.run, value).result()

    async def _in_thread(self, name: str, function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
        """For hooks that may be slow: sync code must not hold the loop."""
        with author_code(f"{self.name}.{name}"):
            return await _threaded(function, asked(function, offered))

    async def _placed(self, plan: ScorerPlan, function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
        """Run a marked function where its placement says, short of the pool. Raises CallTimedOut where it can notice:
        sync code on the loop can only be timed by the activity around it, and a thread runs on after its timeout."""
        arguments = asked(function, offered)
        limit = asyncio.timeout(plan.timeout_s)
        try:
            async with limit:
                if plan.run is RunAt.ACTIVITY:
                    return await _threaded(function, arguments)
                return await _awaited(function(**arguments))
        except TimeoutError:
            if not limit.expired():
                raise
            raise CallTimedOut(f"{plan.name} took longer than {plan.timeout_s:g} s") from None

    async def _in_pool(self, pool: "ProcessPool", method: str, payload: dict[str, Any], timeout: float) -> Any:
        """Run an operation in the pool. A worker that dies gets a second chance, since it may have been killed by
        something else on the machine. Raises CallTimedOut, WorkerDied, EnvironmentFault."""
        try:
            return await pool.run(self.ref, self.args, method, payload, timeout)
        except WorkerDied:
            return await pool.run(self.ref, self.args, method, payload, timeout)


def _failed(index: int, call: ToolCall, ctx: Context, problem: str) -> CallRecord:
    text = as_text(problem)
    return CallRecord(turn=ctx.turn, index=index, call=call, content=f"Error: {text}", error=text)


def _stepped(ctx: Context, step: Step, state: dict[str, Any] | None) -> CallRecord:
    return CallRecord(
        turn=ctx.turn,
        index=STEP_INDEX,
        call=None,
        state=state,
        replies=step.messages,
        reward=step.reward,
        done=step.done,
        truncated=step.truncated,
        info=dict(step.info),
    )


def _plain(task: Task[Any], ctx: Context) -> dict[str, Any]:
    return {"task": {"data": task.plain_data(), "info": task.info}, "ctx": dataclasses.asdict(ctx)}


def _typed(data: Any) -> Any:
    return type(data) if isinstance(data, BaseModel) or dataclasses.is_dataclass(data) else Any


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _threaded(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await _awaited(await asyncio.to_thread(function, **arguments))
