"""Bare Temporal: the product's shape of activities with empty bodies and no rows, as the other baseline.

A group of eight children; each child one local start, six scheduled model calls on a queue of their own with five
local answers between them, one local finish; the group one local close.
"""

import asyncio
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


@activity.defn
async def bare_model(step: Step) -> Step:
    return Step(step.episode, step.turn, "look(at=1)")


@activity.defn
async def bare_local(step: Step) -> Step:
    return Step(step.episode, step.turn, "Nothing at 1.")


async def _local(step: Step) -> Step:
    return await workflow.execute_local_activity(
        bare_local,
        step,
        start_to_close_timeout=timedelta(seconds=2),
        retry_policy=RetryPolicy(maximum_attempts=3),
    )


@workflow.defn
class BareEpisode:
    @workflow.run
    async def run(self, name: str) -> str:
        await _local(Step(name, -1))
        for turn in range(TURNS):
            await workflow.execute_activity(
                bare_model,
                Step(name, turn),
                task_queue=MODEL_QUEUE,
                start_to_close_timeout=timedelta(hours=2),
                heartbeat_timeout=timedelta(seconds=5),
            )
            if turn < TURNS - 1:
                await _local(Step(name, turn))
        await _local(Step(name, TURNS))
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
        await _local(Step(name, 0))
        return name
