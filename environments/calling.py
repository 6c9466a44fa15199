"""Calling author code: where, with what, for how long, and what becomes of its exceptions.

Invariant: author code is called in one of four ways and no other: on the loop, in a thread, under its placement's
timeout, or in the process pool. It gets by name what it asks for, and its exceptions come back as `EnvironmentFault`.
"""

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..contracts.activities import ScorerPlan
from ..contracts.context import Context, Judge, JudgeUnavailable
from ..contracts.limits import Limits
from ..contracts.messages import Message
from ..contracts.reasons import RunAt
from ..contracts.tasks import Task
from .base import Environment, State
from .faults import BadEnvironmentArgs, CallTimedOut, WorkerDied, author_code
from .parameters import asked
from .results import load_state
from .spec import EnvironmentSpec, describe_environment

if TYPE_CHECKING:
    from .pool import ProcessPool


class NoJudge:
    """Stands where a judge was asked for and none is configured: what it would score stays unscored."""

    async def ask(self, messages: list[Message], *, model: str = "default", max_tokens: int = 1024) -> str:
        raise JudgeUnavailable("no judge is configured; name one under `judges` in the run file")


class AuthorCode:
    """One environment with one configuration, as something whose functions can be called."""

    def __init__(self, ref: str, args: Mapping[str, Any], environment: Environment[Any, Any]) -> None:
        self.ref = ref
        """Resolves to the same class in another process: an entry point, `module:Class` or `/file.py:Class`."""
        self.args = dict(args)
        self.environment = environment
        self.spec: EnvironmentSpec = describe_environment(type(environment))
        self._started: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def version(self) -> str:
        return self.spec.version

    @property
    def limits(self) -> Limits:
        return self.spec.limits

    async def ready(self) -> None:
        """Run `startup` once in this process (again where it failed). Every operation awaits this; a worker that
        awaits it before it polls spares its first episode the wait."""
        startup = getattr(self.environment, "startup", None)
        if startup is None:
            return
        if self._started is None or (self._started.done() and not _succeeded(self._started)):
            self._started = asyncio.ensure_future(self._in_thread("startup", startup, {}))
        await asyncio.shield(self._started)

    async def close(self) -> None:
        """Run `shutdown`."""
        shutdown = getattr(self.environment, "shutdown", None)
        if shutdown is not None:
            await self._in_thread("shutdown", shutdown, {})
        self._started = None

    def check_judges(self, judges: Mapping[str, object]) -> None:
        """Raise BadEnvironmentArgs where the environment asks for a judge and none is configured."""
        if self.spec.asks_judge and not judges:
            names = ", ".join(self.spec.asks_judge)
            raise BadEnvironmentArgs(f"{self.name} asks for a judge ({names}); name one under `judges`")

    def _state(self, plain: dict[str, Any]) -> State:
        return load_state(self.name, self.environment.state_type, plain)

    async def _call(self, name: str, function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
        """On the loop: quick hooks."""
        with author_code(f"{self.name}.{name}"):
            return await _awaited(function(**asked(function, offered)))

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

    async def _in_pool(
        self, pool: "ProcessPool", method: str, payload: dict[str, Any], timeout: float, judge: Judge | None = None
    ) -> Any:
        """Run an operation in the pool. A worker that dies gets a second chance, since it may have been killed by
        something else on the machine. Raises CallTimedOut, WorkerDied, EnvironmentFault, JudgeUnavailable."""
        judge = judge or NoJudge()
        try:
            return await pool.run(self.ref, self.args, method, payload, timeout, judge)
        except WorkerDied:
            return await pool.run(self.ref, self.args, method, payload, timeout, judge)


def plain(task: Task[Any], ctx: Context) -> dict[str, Any]:
    """What every operation in the pool is given, as JSON data."""
    return {"task": {"data": task.plain_data(), "info": task.info}, "ctx": dataclasses.asdict(ctx)}


def _succeeded(task: "asyncio.Task[None]") -> bool:
    return not task.cancelled() and task.exception() is None


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _threaded(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await _awaited(await asyncio.to_thread(function, **arguments))
