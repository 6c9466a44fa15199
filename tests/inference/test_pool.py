"""Who gets the next request: least loaded, sticky, first come first served, and nobody while all are down."""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from atropos.contracts.records import EngineRecord
from atropos.inference.engines import Completion, EngineAddress, Progress, SampleRequest, WeightInfo
from atropos.inference.errors import EngineFailure, EngineFailureKind, malformed, rejected, unavailable
from atropos.inference.pool import EnginePool, Ledger
from hypothesis import given
from hypothesis import strategies as st


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Idle:
    """An engine nobody calls."""

    def __init__(self, address: EngineAddress) -> None:
        self.engine_id, self.address, self.closed = address.engine_id, address, False
        self.queue: int | None = None

    async def sample(self, request: SampleRequest, progress: Progress | None = None) -> Completion:
        raise NotImplementedError

    async def health(self) -> None: ...

    async def weight_info(self) -> WeightInfo:
        raise NotImplementedError

    async def label(self) -> str:
        raise NotImplementedError

    async def context_limit(self) -> int | None:
        return None

    async def waiting(self) -> int | None:
        return self.queue

    async def close(self) -> None:
        self.closed = True


def record(name: str, concurrency: int = 2, state: str = "ready", reason: str | None = None) -> EngineRecord:
    return EngineRecord(name, "dev", f"http://{name}:1", concurrency, "KEY", state, reason, "v0", "life")


def pool_of(*records: EngineRecord, clock: Clock | None = None) -> EnginePool[Idle]:
    return EnginePool(records, {"KEY": "k"}.get, connect=Idle, clock=clock or Clock())


def ledger_of(**limits: int) -> Ledger:
    ledger = Ledger(remembered=3)
    for name, limit in limits.items():
        ledger.set_engine(name, limit=limit, ready=True)
    return ledger


def test_the_least_loaded_engine_is_chosen() -> None:
    ledger = ledger_of(big=4, small=2)
    assert [ledger.take(f"e{i}", 0) for i in range(6)] == ["big", "small", "big", "big", "small", "big"]
    assert ledger.take("e6", 0) is None


def test_an_episode_stays_where_its_prefix_is_cached() -> None:
    ledger = ledger_of(a=4, b=4)
    home = ledger.take("episode", 0)
    assert home is not None
    ledger.give_back(home)
    for i in range(2):
        ledger.take(f"other{i}", 0)
    assert ledger.take("episode", 0) == home


def test_an_episode_moves_when_its_engine_is_full_or_down() -> None:
    ledger = ledger_of(a=1, b=1)
    assert ledger.take("x", 0) == "a"
    assert ledger.take("x", 0) == "b"
    ledger.give_back("b")
    ledger.set_engine("b", limit=1, ready=False, reason="gone")
    ledger.give_back("a")
    assert ledger.take("x", 0) == "a"


def test_only_the_latest_episodes_are_remembered() -> None:
    ledger = ledger_of(a=9, b=9)
    assert ledger.take("first", 0) == "a"
    ledger.give_back("a")
    for i in range(3):
        ledger.take(f"e{i}", 0)
    assert ledger.take("first", 0) == "b"


def test_a_failing_engine_rests_longer_each_time_and_a_success_forgives_it() -> None:
    ledger = ledger_of(a=1)
    rests = []
    for _ in range(5):
        ledger.failed("a", "no answer", 10.0)
        rests.append(ledger.rest_left(10.0))
    assert rests == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert ledger.take("x", 12.9) is None
    assert ledger.take("x", 13.0) == "a"
    ledger.succeeded("a")
    ledger.failed("a", "no answer", 20.0)
    assert ledger.rest_left(20.0) == 0.5


def test_a_success_ends_no_rest_that_the_engine_asked_for() -> None:
    ledger = ledger_of(a=2)
    ledger.failed("a", "too busy", 10.0, 5.0)
    ledger.succeeded("a")
    assert ledger.take("x", 14.9) is None
    assert ledger.rest_left(14.0) == ledger.next_rest_ends_in(14.0) == 1.0
    assert ledger.take("x", 15.0) == "a"


def test_an_engine_gets_fewer_requests_while_they_wait_in_it_and_more_once_none_does() -> None:
    ledger = ledger_of(a=16)
    for _ in range(16):
        assert ledger.take("x", 0) == "a"
    seen = []
    for waiting in (5, 5, 5, 2, 0, 0, 0, 0, 0):
        ledger.adapt("a", waiting)
        seen.append(ledger.allowed("a"))
    assert seen == [16, 12, 9, 9, 11, 13, 15, 16, 16]  # one look is a ripple; a queue of two of sixteen is one, too
    ledger.set_engine("a", limit=8, ready=True)
    assert ledger.allowed("a") == 8


def test_an_engine_that_never_gets_better_keeps_one_request() -> None:
    ledger = ledger_of(a=4)
    assert ledger.take("x", 0) == "a"
    for _ in range(20):
        ledger.adapt("a", 9)
    assert ledger.allowed("a") == 1
    ledger.give_back("a")
    assert ledger.take("y", 0) == "a"
    assert ledger.take("z", 0) is None


async def test_the_queue_of_an_engine_is_asked_for_beside_the_work() -> None:
    clock = Clock()
    engines: dict[str, Idle] = {}

    def connect(address: EngineAddress) -> Idle:
        return engines.setdefault(address.engine_id, Idle(address))

    pool = EnginePool([record("a", 4)], {"KEY": "k"}.get, connect=connect, clock=clock)
    engines["a"].queue = 3
    for _ in range(3):
        async with pool.lease("x"):
            clock.now += 3
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    held = [asyncio.create_task(pool.lease(f"e{i}").__aenter__()) for i in range(4)]
    await asyncio.sleep(0)
    assert sum(task.done() for task in held) == 2
    for task in held:
        task.cancel()
    await pool.close()


@given(st.lists(st.sampled_from(["take", "give", "fail", "down", "up", "tick", "queue"]), max_size=60), st.data())
def test_no_engine_is_ever_over_its_limit(actions: list[str], data: st.DataObject) -> None:
    limits = {"a": 2, "b": 1}
    ledger, held, now = ledger_of(**limits), Counter[str](), 0.0
    for action in actions:
        name = data.draw(st.sampled_from(["a", "b"]))
        if action == "take":
            got = ledger.take(data.draw(st.sampled_from(["x", "y", "z"])), now)
            held.update([got] if got is not None else [])
        elif action == "give" and held[name]:
            ledger.give_back(name)
            held[name] -= 1
        elif action == "fail":
            ledger.failed(name, "x", now)
        elif action == "queue":
            ledger.adapt(name, data.draw(st.integers(0, 4)))
        elif action in ("down", "up"):
            ledger.set_engine(name, limit=limits[name], ready=action == "up")
        else:
            now += 1.0
        for engine, limit in limits.items():
            assert ledger.in_flight(engine) == held[engine] <= limit


async def fail_on(pool: EnginePool[Idle], episode: str, failure: EngineFailure) -> str:
    """Fail inside a lease; the name of the engine that was leased."""
    name = ""
    with suppress(EngineFailure):
        async with pool.lease(episode) as engine:
            name = engine.engine_id
            raise failure
    return name


async def test_waiters_are_served_in_the_order_they_came() -> None:
    pool = pool_of(record("a", concurrency=1))
    served: list[int] = []

    async def work(number: int) -> None:
        async with pool.lease(f"e{number}"):
            served.append(number)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(work(number))
    assert served == list(range(12))
    await pool.close()


async def test_a_waiter_that_gives_up_takes_no_slot() -> None:
    pool = pool_of(record("a", concurrency=1))

    async def hold() -> None:
        async with pool.lease("w"):
            await asyncio.sleep(0)

    async with pool.lease("e"):
        early, late = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
    late.cancel()  # after the slot was handed to it, before it ran
    await asyncio.gather(late, return_exceptions=True)
    async with asyncio.timeout(5), pool.lease("e"):
        pass
    await pool.close()


async def test_no_ready_engine_is_a_failure_that_names_each_with_its_reason() -> None:
    pool = pool_of(record("a", state="down", reason="connection refused"), record("b", state="quarantined"))
    with pytest.raises(EngineFailure) as caught:
        async with pool.lease("e"):
            pass
    assert (caught.value.kind, caught.value.retryable) == (EngineFailureKind.UNAVAILABLE, True)
    assert caught.value.message == (
        "no engine is ready: a is not ready (connection refused); b is not ready (quarantined)"
    )


async def test_a_failure_rests_its_engine_and_the_next_lease_goes_elsewhere() -> None:
    clock = Clock()
    pool = pool_of(record("a"), record("b"), clock=clock)
    assert await fail_on(pool, "e", unavailable("cut", 4.0)) == "a"
    for _ in range(3):
        async with pool.lease("e") as engine:
            assert engine.engine_id == "b"
    assert await fail_on(pool, "e", unavailable("cut too")) == "b"
    with pytest.raises(EngineFailure) as caught:
        async with pool.lease("e"):
            pass
    assert caught.value.retry_after_s == 0.5
    clock.now += 5
    async with pool.lease("new") as engine:
        assert engine.engine_id == "a"


@pytest.mark.parametrize("failure", [rejected("bad request"), malformed("half an answer")])
async def test_a_bad_request_or_answer_rests_no_engine(failure: EngineFailure) -> None:
    pool = pool_of(record("a"))
    await fail_on(pool, "e", failure)
    async with pool.lease("e") as engine:
        assert engine.engine_id == "a"


async def test_waiters_hear_when_the_last_engine_goes() -> None:
    pool = pool_of(record("a", concurrency=1))
    async with pool.lease("e"):
        waiting = asyncio.create_task(pool.lease("w").__aenter__())
        await asyncio.sleep(0)
        pool.update([record("a", concurrency=1, state="down", reason="lost")])
        with pytest.raises(EngineFailure, match="lost"):
            await waiting


async def test_a_waiter_gets_the_engine_that_has_rested() -> None:
    pool = EnginePool([record("a", 1), record("b", 1)], {"KEY": "k"}.get, connect=Idle)
    pool.report("a", unavailable("busy", 0.05))
    async with pool.lease("e") as held:
        assert held.engine_id == "b"
        async with asyncio.timeout(5), pool.lease("w") as engine:
            assert engine.engine_id == "a"
    await pool.close()


async def test_an_engine_that_moved_gets_a_new_client_and_every_client_is_closed() -> None:
    made: list[Idle] = []

    def connect(address: EngineAddress) -> Idle:
        made.append(Idle(address))
        return made[-1]

    pool = EnginePool([record("a")], {"KEY": "k"}.get, connect=connect)
    pool.update([record("a")])
    moved = EngineRecord("a", "dev", "http://elsewhere:1", 2, None, "ready", None, None, None)
    pool.update([moved])
    async with pool.lease("e") as engine:
        assert engine is made[1]
    await pool.close()
    assert [(one.address.api_key, one.closed) for one in made] == [("k", True), (None, True)]
