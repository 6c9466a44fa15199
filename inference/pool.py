"""The engines of a run as one process uses them: who gets the next request.

Invariant: an engine never has more requests in flight than its limit, those who wait are served in the order they
came, and a lease is given back exactly once however its holder ends. The bookkeeping (`Ledger`) does no I/O and knows
no clock but the one it is given, so the rules can be tested as a table.

An episode stays with its engine while that is ready and has a free slot, since its prefix is cached there. An engine
that failed rests for as long as it asked, else 0.5 s doubling to 3 s, and is then tried again; a success ends its
record of failures and a rest of our own choice, but not one that the engine asked for: what it answered just then was
begun before.

How many requests an engine gets follows its own queue, asked for every two seconds: where requests wait in it again and
again, it is given a quarter fewer, and once none does and all its places are taken, an eighth of its limit more. What
waits here is served in order and can go elsewhere; what waits in an engine cannot.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ..contracts.records import EngineRecord
from ..contracts.states import EngineState
from .engines import Engine, EngineAddress
from .errors import EngineFailure, EngineFailureKind, unavailable

EngineT = TypeVar("EngineT", bound=Engine)

_FIRST_REST_S: Final = 0.5
_LONGEST_REST_S: Final = 3.0
"""The same bound as retries have: an engine that came back is found within it."""
_LOOK_EVERY_S: Final = 2.0
_RIPPLE: Final = 8
"""A queue of an eighth of what is in flight is the ripple of arrivals."""
_AGAIN: Final = 2
"""Looks in a row that find a queue."""
_REMEMBERED_EPISODES: Final = 8192
_RESTING_KINDS: Final = frozenset(
    {EngineFailureKind.UNAVAILABLE, EngineFailureKind.OVERLOADED, EngineFailureKind.WRONG_VERSION}
)
"""Failures that say something about the engine rather than about one request or one answer."""


@dataclass(slots=True)
class _Slot:
    """What the ledger knows about one engine."""

    limit: int
    ready: bool
    reason: str
    allowed: int = 0
    """Requests it may have at once: at most `limit`, fewer while requests wait in its own queue."""
    queues: int = 0
    in_flight: int = 0
    failures: int = 0
    rests_until: float = 0.0
    asked_until: float = 0.0
    """As `rests_until`, where the engine asked for it."""

    def rest_left(self, now: float) -> float:
        return max(self.rests_until, self.asked_until) - now


class Ledger:
    """Counts and choices; `now` is seconds of any monotonic clock."""

    def __init__(self, remembered: int = _REMEMBERED_EPISODES) -> None:
        self._slots: dict[str, _Slot] = {}
        self._home: OrderedDict[str, str] = OrderedDict()
        self._remembered = remembered

    def set_engine(self, engine_id: str, *, limit: int, ready: bool, reason: str = "") -> None:
        """Add an engine or change its limit and readiness; what is in flight stays counted."""
        slot = self._slots.get(engine_id)
        if slot is None:
            self._slots[engine_id] = _Slot(limit, ready, reason, allowed=limit)
            return
        slot.allowed = limit if slot.allowed == slot.limit else min(slot.allowed, limit)
        slot.limit, slot.ready, slot.reason = limit, ready, reason

    def adapt(self, engine_id: str, waiting: int) -> None:
        """So many requests wait in the engine's own queue."""
        slot = self._slots[engine_id]
        slot.queues = slot.queues + 1 if waiting > slot.in_flight // _RIPPLE else 0
        if slot.queues >= _AGAIN:
            slot.allowed = max(1, slot.allowed * 3 // 4)
        elif not waiting and slot.in_flight >= slot.allowed:
            slot.allowed = min(slot.limit, slot.allowed + max(1, slot.limit // 8))

    def allowed(self, engine_id: str) -> int:
        return self._slots[engine_id].allowed

    def take(self, episode: str, now: float) -> str | None:
        """A free engine for the episode, counted as one more in flight; None where none is free."""
        free = {
            name: slot
            for name, slot in self._slots.items()
            if self._usable(slot, now) and slot.in_flight < slot.allowed
        }
        if not free:
            return None
        home = self._home.get(episode)
        chosen = home if home in free else min(free, key=lambda name: (free[name].in_flight / free[name].allowed, name))
        self._slots[chosen].in_flight += 1
        self._home[episode] = chosen
        self._home.move_to_end(episode)
        while len(self._home) > self._remembered:
            self._home.popitem(last=False)
        return chosen

    def give_back(self, engine_id: str) -> None:
        slot = self._slots[engine_id]
        if slot.in_flight < 1:
            raise ValueError(f"engine {engine_id} has nothing in flight to give back")
        slot.in_flight -= 1

    def failed(self, engine_id: str, message: str, now: float, rest_s: float | None = None) -> None:
        slot = self._slots[engine_id]
        slot.failures += 1
        if rest_s is None:
            rest = min(_FIRST_REST_S * 2 ** min(slot.failures - 1, 10), _LONGEST_REST_S)
            slot.rests_until = max(slot.rests_until, now + rest)
        else:
            slot.asked_until = max(slot.asked_until, now + rest_s)
        slot.reason = message

    def succeeded(self, engine_id: str) -> None:
        slot = self._slots[engine_id]
        slot.failures, slot.rests_until = 0, 0.0

    def any_usable(self, now: float) -> bool:
        return any(self._usable(slot, now) for slot in self._slots.values())

    def rest_left(self, now: float) -> float | None:
        """Seconds until the first resting engine may be tried again; None where waiting alone helps nothing."""
        return min((max(0.0, slot.rest_left(now)) for slot in self._slots.values() if slot.ready), default=None)

    def next_rest_ends_in(self, now: float) -> float | None:
        """Seconds until a ready engine that rests now has rested; None where none rests."""
        resting = [slot.rest_left(now) for slot in self._slots.values() if slot.ready and slot.rest_left(now) > 0]
        return min(resting, default=None)

    def why_none(self, now: float) -> str:
        """Each engine with the reason why it takes no work."""
        if not self._slots:
            return "the run has no engines"
        parts = []
        for name, slot in sorted(self._slots.items()):
            state = "ready" if self._usable(slot, now) else "resting" if slot.ready else "not ready"
            parts.append(f"{name} is {state}" + (f" ({slot.reason})" if slot.reason else ""))
        return "; ".join(parts)

    def in_flight(self, engine_id: str) -> int:
        return self._slots[engine_id].in_flight

    @staticmethod
    def _usable(slot: _Slot, now: float) -> bool:
        return slot.ready and slot.rest_left(now) <= 0


@dataclass(eq=False, slots=True)
class _Waiter:
    episode: str
    granted: "asyncio.Future[str]"


class EnginePool(Generic[EngineT]):
    """The engines of one run in one process, used from one event loop.

    `secret` turns the name of an environment variable into its value; `connect` makes the client for an address.
    """

    def __init__(
        self,
        records: Iterable[EngineRecord],
        secret: Callable[[str], str | None],
        *,
        connect: Callable[[EngineAddress], EngineT],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = secret
        self._connect = connect
        self._clock = clock
        self._ledger = Ledger()
        self._engines: dict[str, EngineT] = {}
        self._addresses: dict[str, EngineAddress] = {}
        self._waiting: deque[_Waiter] = deque()
        self._stale: list[EngineT] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._looked: dict[str, float] = {}
        self._looking: set[asyncio.Task[None]] = set()
        self.update(records)

    def update(self, records: Iterable[EngineRecord]) -> None:
        """Take over what the store says about the engines: new ones, states, limits. Absent ones take no work."""
        seen = set()
        for record in records:
            seen.add(record.engine_id)
            address = EngineAddress.of(record, self._secret(record.api_key_env) if record.api_key_env else None)
            if self._addresses.get(record.engine_id) != address:
                if record.engine_id in self._engines:
                    self._stale.append(self._engines[record.engine_id])
                self._engines[record.engine_id] = self._connect(address)
                self._addresses[record.engine_id] = address
            ready = record.state == EngineState.READY
            reason = "" if ready else record.reason or record.state
            self._ledger.set_engine(record.engine_id, limit=record.concurrency, ready=ready, reason=reason)
        for engine_id, address in self._addresses.items():
            if engine_id not in seen:
                self._ledger.set_engine(engine_id, limit=address.concurrency, ready=False, reason="removed")
        self._serve()

    @asynccontextmanager
    async def lease(self, episode_key: str) -> AsyncIterator[EngineT]:
        """An engine with a free slot, held until the block ends. Waits, in order, while all are busy.

        An EngineFailure that leaves the block is reported by itself. Raises EngineFailure (unavailable, with each
        engine's reason) where none is ready.
        """
        engine_id = await self._acquire(episode_key)
        try:
            yield self._engines[engine_id]
        except EngineFailure as failure:
            self.report(engine_id, failure)
            raise
        else:
            self._ledger.succeeded(engine_id)
        finally:
            self._ledger.give_back(engine_id)
            self._serve()
            self._look_again(engine_id)

    def _look_again(self, engine_id: str) -> None:
        """Ask an engine for its queue beside the work, every two seconds."""
        now = self._clock()
        if now - self._looked.get(engine_id, now - _LOOK_EVERY_S) >= _LOOK_EVERY_S:
            self._looked[engine_id] = now
            task = asyncio.create_task(self._look(engine_id))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    async def _look(self, engine_id: str) -> None:
        try:
            waiting = await self._engines[engine_id].waiting()
        except EngineFailure:
            return  # whoever samples from it will say so
        if waiting is not None:
            self._ledger.adapt(engine_id, waiting)
            self._serve()

    def report(self, engine_id: str, failure: EngineFailure) -> None:
        """Let the engine rest where the failure says something about the engine itself."""
        if failure.kind in _RESTING_KINDS and failure.retryable:
            self._ledger.failed(engine_id, failure.message, self._clock(), failure.retry_after_s)
            self._serve()

    async def close(self) -> None:
        """Close every client. Those who wait get an EngineFailure."""
        if self._alarm is not None:
            self._alarm.cancel()
        for task in self._looking:
            task.cancel()
        for engine in [*self._engines.values(), *self._stale]:
            await engine.close()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.granted.done():
                waiter.granted.set_exception(unavailable("the engine pool is closed"))

    async def _acquire(self, episode: str) -> str:
        now = self._clock()
        if not self._ledger.any_usable(now):
            raise self._none_ready(now)
        engine_id = None if self._waiting else self._ledger.take(episode, now)
        if engine_id is not None:
            return engine_id
        waiter = _Waiter(episode, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve_when_rested(now)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self._ledger.give_back(waiter.granted.result())
                self._serve()
            raise

    def _serve(self) -> None:
        """Hand free slots to those who wait, first come first; send all away where no engine is left."""
        now = self._clock()
        while self._waiting:
            if self._waiting[0].granted.done():
                self._waiting.popleft()
                continue
            engine_id = self._ledger.take(self._waiting[0].episode, now)
            if engine_id is not None:
                self._waiting.popleft().granted.set_result(engine_id)
            elif self._ledger.any_usable(now):
                self._serve_when_rested(now)
                return
            else:
                self._waiting.popleft().granted.set_exception(self._none_ready(now))

    def _serve_when_rested(self, now: float) -> None:
        """A slot that frees serves the queue by itself; the end of a rest needs a timer."""
        rest = self._ledger.next_rest_ends_in(now)
        if rest is not None and self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(rest, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._serve()

    def _none_ready(self, now: float) -> EngineFailure:
        return unavailable(f"no engine is ready: {self._ledger.why_none(now)}", self._ledger.rest_left(now))
