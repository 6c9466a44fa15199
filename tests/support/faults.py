"""Fault points of the test bench around activities and model calls: an interceptor and an engine's client.

Invariant: product code has no fault points; these stand around it, at places where a process may die in earnest.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from atropos.inference.engines import Completion, EngineAddress, Progress, SampleRequest, TokenEngine
from atropos.inference.vllm import VllmEngine
from temporalio import activity
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

_TURN = re.compile(r"/turn/(\d+)/")


class Places(Protocol):
    """Boundaries, or points that a test armed."""

    def reach(self, place: str, /) -> None: ...


class DieAround(Interceptor):
    """Reach a place before and after the body of the named activities (None: of every one); `numbered`: one for each
    turn and call."""

    def __init__(self, places: Places, names: Iterable[str] | None = None, *, numbered: bool = True) -> None:
        self._places = places
        self._names = None if names is None else frozenset(names)
        self._numbered = numbered

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _DieAround(next, self._places, self._names, self._numbered)


class _DieAround(ActivityInboundInterceptor):
    def __init__(
        self, next: ActivityInboundInterceptor, places: Places, names: frozenset[str] | None, numbered: bool
    ) -> None:
        super().__init__(next)
        self._places = places
        self._names = names
        self._numbered = numbered

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        name = activity.info().activity_type
        if self._names is not None and name not in self._names:
            return await super().execute_activity(input)
        place = _place(name, input.args[0]) if self._numbered else name
        self._places.reach(f"{place}.before")
        result = await super().execute_activity(input)
        self._places.reach(f"{place}.after")
        return result


def _place(name: str, argument: Any) -> str:
    """The activity with its turn and call, where it has them: `run_tool.1.0`."""
    numbers = [getattr(argument, field, None) for field in ("turn", "index")]
    return ".".join([name, *(str(number) for number in numbers if number is not None)])


class DieWhenPaid(VllmEngine):
    """An engine's client that dies when tokens were sampled and paid for, and before they can be stored."""

    def __init__(self, address: EngineAddress, vocabulary: int | None, places: Places, numbered: bool) -> None:
        super().__init__(address, vocabulary=vocabulary)
        self._places = places
        self._numbered = numbered

    async def sample(self, request: SampleRequest, progress: Progress | None = None) -> Completion:
        completion = await super().sample(request, progress)
        found = _TURN.search(request.request_id)
        turn = f".{found[1] if found else '?'}" if self._numbered else ""
        self._places.reach(f"sample_turn{turn}.paid")
        return completion


@dataclass(frozen=True)
class ConnectAndDie:
    """Makes such clients; stands in for `connect_engine`."""

    places: Places
    numbered: bool = True

    def __call__(self, address: EngineAddress, *, vocabulary: int | None = None) -> TokenEngine:
        return DieWhenPaid(address, vocabulary, self.places, self.numbered)
