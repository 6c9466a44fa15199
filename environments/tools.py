"""Tool calls of a model: where each runs, and what it leads to.

Invariant: a call always gets an answer the model can read. One that cannot run (malformed, unknown, wrong arguments)
and one that fails (exception, timeout, a dead process) are both answered `Error: …`; only a state that cannot be
stored is the environment's fault, since nothing the model says could put that right.
"""

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..contracts.context import Context, Judge, JudgeUnavailable
from ..contracts.flow import CallPlan
from ..contracts.messages import Message, ToolCall
from ..contracts.reasons import RunAt
from ..contracts.tasks import Task
from .calling import AuthorCode, NoJudge, plain
from .faults import CallTimedOut, EnvironmentProblem, WorkerDied, nearest, said
from .results import CallOutcome, as_text, dump_state
from .schema import arguments_model, read_arguments
from .spec import PlacedTool

if TYPE_CHECKING:
    from .pool import ProcessPool


class ToolCaller(AuthorCode):
    """The tools of an environment."""

    @cached_property
    def _tools(self) -> dict[str, PlacedTool]:
        return {tool.spec.name: tool for tool in self.spec.tools}

    def plan_calls(self, message: Message) -> tuple[CallPlan, ...]:
        """Where each tool call of a message runs. What cannot run is planned inline, to be answered by an error."""
        return tuple(self._plan(index, call) for index, call in enumerate(message.tool_calls))

    def _plan(self, index: int, call: ToolCall) -> CallPlan:
        tool = self._tools.get(call.name)
        if tool is None or self._refusal(call) is not None:
            return CallPlan(index=index, name=call.name, run=RunAt.INLINE, serial=False)
        plan = tool.plan
        return CallPlan(
            index=index, name=call.name, run=plan.run, serial=tool.serial, queue=plan.queue, timeout_s=plan.timeout_s
        )

    def placed_at(self, call: ToolCall) -> RunAt | None:
        """Where the author placed the tool of a call; None where there is no such tool."""
        tool = self._tools.get(call.name)
        return None if tool is None else tool.plan.run

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
        apart: bool = False,
    ) -> CallOutcome:
        """Answer one tool call. The tool's own failure (exception, timeout, death) is its result, never raised.

        `apart`: in the pool, wherever the tool was placed.
        Raises JudgeUnavailable for a tool that asks a judge, and EnvironmentProblem.
        """
        refusal = self._refusal(call)
        if refusal is not None:
            return _failed(refusal)
        tool = self._tools[call.name]
        if pool is not None and (apart or tool.plan.run is RunAt.PROCESS):
            payload = {"index": index, "call": call.model_dump(mode="json"), "state": state, **plain(task, ctx)}
            try:
                answer = await self._in_pool(pool, "call", payload, tool.plan.timeout_s, judge)
                return CallOutcome.model_validate(answer)
            except (CallTimedOut, WorkerDied) as error:
                return _failed(str(error))
        await self.ready()
        return await self._call_tool(tool, call, task, state, dataclasses.replace(ctx, call=str(index)), judge)

    async def _call_tool(
        self,
        tool: PlacedTool,
        call: ToolCall,
        task: Task[Any],
        state: dict[str, Any],
        ctx: Context,
        judge: Judge | None,
    ) -> CallOutcome:
        mine = self._state(state)
        function = getattr(self.environment, call.name)
        arguments = read_arguments(self._arguments[call.name], call.arguments)
        offered = {"task": task, "state": mine, "ctx": ctx, "judge": judge or NoJudge(), **arguments}
        try:
            content = as_text(await self._placed(tool.plan, function, offered))
        except CallTimedOut as error:
            return _failed(str(error))
        except (EnvironmentProblem, JudgeUnavailable):
            raise
        except (Exception, SystemExit) as error:
            return _failed(str(error) if isinstance(error, ValueError) and str(error) else said(error))
        after = dump_state(f"{self.name}.{call.name}", mine) if tool.serial else None
        return CallOutcome(content=content, state=None if after == state else after)


def _failed(problem: str) -> CallOutcome:
    text = as_text(problem)
    return CallOutcome(content=f"Error: {text}", error=text)
