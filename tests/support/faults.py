"""Fault points of the test bench around activities and model calls: an interceptor and an engine's client.

Invariant: product code has no fault points; these stand around it, at places where a process may die in earnest.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from atropos.inference.engines import Completion, Engine, EngineAddress, Progress, SampleRequest
from atropos.inference.vllm import VllmEngine
from temporalio import activity
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from .boundaries import Boundaries

_TURN = re.compile(r"/turn/(\d+)/")


class DieAround(Interceptor):
    """Die before and after the body of the named activities, once for each turn and call."""

    def __init__(self, boundaries: Boundaries, names: Iterable[str]) -> None:
        self._boundaries = boundaries
        self._names = frozenset(names)

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _DieAround(next, self._boundaries, self._names)


class _DieAround(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, boundaries: Boundaries, names: frozenset[str]) -> None:
        super().__init__(next)
        self._boundaries = boundaries
        self._names = names

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        name = activity.info().activity_type
        if name not in self._names:
            return await super().execute_activity(input)
        place = _place(name, input.args[0])
        self._boundaries.reach(f"{place}.before")
        result = await super().execute_activity(input)
        self._boundaries.reach(f"{place}.after")
        return result


def _place(name: str, argument: Any) -> str:
    """The activity with its turn and call, where it has them: `run_tool.1.0`."""
    numbers = [getattr(argument, field, None) for field in ("turn", "index")]
    return ".".join([name, *(str(number) for number in numbers if number is not None)])


class DieWhenPaid(VllmEngine):
    """An engine's client that dies when tokens were sampled and paid for, and before they can be stored."""

    def __init__(self, address: EngineAddress, vocabulary: int | None, boundaries: Boundaries) -> None:
        super().__init__(address, vocabulary=vocabulary)
        self._boundaries = boundaries

    async def sample(self, request: SampleRequest, progress: Progress | None = None) -> Completion:
        completion = await super().sample(request, progress)
        found = _TURN.search(request.request_id)
        self._boundaries.reach(f"sample_turn.{found[1] if found else '?'}.paid")
        return completion


@dataclass(frozen=True)
class ConnectAndDie:
    """Makes such clients; stands in for `connect_engine`."""

    boundaries: Boundaries

    def __call__(self, address: EngineAddress, *, vocabulary: int | None = None) -> Engine:
        return DieWhenPaid(address, vocabulary, self.boundaries)
