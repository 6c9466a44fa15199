"""The environment of the episode benchmark: six model calls, five tool calls, no work of its own."""

import asyncio

from atropos import EnvConfig, Environment, Limits, State, Task, reward, tool
from pydantic import BaseModel


class Config(EnvConfig):
    tool_s: float = 0.0
    """Seconds that a tool call takes."""


class Number(BaseModel):
    value: int


class SixTurns(Environment[Config, State]):
    """Call `look` five times, then answer."""

    limits = Limits(turns=8)

    def task(self, split: str, index: int) -> Task[Number]:
        offset = {"train": 0, "eval": 10**9, "test": 2 * 10**9}[split]
        return Task(data=Number(value=offset + index))

    def prompt(self, task: Task[Number]) -> str:
        return f"Look up {task.data.value}."

    @tool(run="inline")
    async def look(self, at: int) -> str:
        """Look at a place."""
        if self.config.tool_s:
            await asyncio.sleep(self.config.tool_s)
        return f"Nothing at {at}."

    @reward(run="inline")
    def answered(self, episode) -> float:  # type: ignore[no-untyped-def]
        return float(episode.answer == "nothing")
