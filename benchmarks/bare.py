"""Bare Temporal: the product's shape of activities with bodies that only sleep and no rows, as the other baseline.

A group of eight children; each child one local start, six scheduled model calls on a queue of their own with five
local answers between them, one local finish; the group one local close.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.common import RetryPolicy

MODEL_QUEUE = "bare-model"
QUEUE = "bare"
TURNS = 6


@dataclass(frozen=True)
class Step:
    """Ids and a small fact, as the product's inputs and results are."""

    episode: str
    turn: int
    said: str = ""


class Bodies:
    """Activities that sleep, and nothing else: seconds of a model call and of a tool."""

    def __init__(self, model_s: float, tool_s: float) -> None:
        self._model_s, self._tool_s = model_s, tool_s

    @activity.defn
    async def bare_model(self, step: Step) -> Step:
        await asyncio.sleep(self._model_s)
        return Step(step.episode, step.turn, "look(at=1)")

    @activity.defn
    async def bare_tool(self, step: Step) -> Step:
        await asyncio.sleep(self._tool_s)
        return Step(step.episode, step.turn, "Nothing at 1.")

    @activity.defn
    async def bare_mark(self, step: Step) -> Step:
        """Begins or ends an episode or a group."""
        return Step(step.episode, step.turn)


async def _local(body: Callable[[Bodies, Step], Awaitable[Step]], step: Step) -> Step:
    return await workflow.execute_local_activity_method(
        body,
        step,
        start_to_close_timeout=timedelta(seconds=2),
        retry_policy=RetryPolicy(maximum_attempts=3),
    )


@workflow.defn
class BareEpisode:
    @workflow.run
    async def run(self, name: str) -> str:
        await _local(Bodies.bare_mark, Step(name, -1))
        for turn in range(TURNS):
            await workflow.execute_activity_method(
                Bodies.bare_model,
                Step(name, turn),
                task_queue=MODEL_QUEUE,
                start_to_close_timeout=timedelta(hours=2),
                heartbeat_timeout=timedelta(seconds=5),
            )
            if turn < TURNS - 1:
                await _local(Bodies.bare_tool, Step(name, turn))
        await _local(Bodies.bare_mark, Step(name, TURNS))
        return name


@workflow.defn
class BareGroup:
    @workflow.run
    async def run(self, name: str, size: int) -> str:
        children = [
            workflow.execute_child_workflow(
                BareEpisode.run, f"{name}/{member}", id=f"{name}/{member}", task_timeout=timedelta(seconds=5)
            )
            for member in range(size)
        ]
        await asyncio.gather(*children)
        await _local(Bodies.bare_mark, Step(name, 0))
        return name
