"""Batches: each sealed group is in one committed step, whoever leases, dies, wakes up or gives up in between."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from atropos.contracts.ids import GroupKey
from atropos.contracts.records import BadRecord
from atropos.contracts.states import GroupState
from atropos.db.batches import (
    Claim,
    Head,
    Leased,
    Waiting,
    abandon_batch,
    claim_batch,
    lease_batch,
    leased_batch,
    live_checkpoints,
    read_head,
    train_steps,
)
from atropos.db.errors import Refused, Unknown
from atropos.db.groups import load_group
from atropos.db.store import Store, open_store
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from .samples import admitted, claimed, closed, committed, new_run, rows, training_run

T = TypeVar("T")


async def state_of(store: Store, key: GroupKey) -> GroupState:
    return (await load_group(store, key)).group.state


async def members_of(store: Store, run_id: str, batch_no: int = 0) -> list[int]:
    found = await rows(
        store, "SELECT group_no FROM batch_groups WHERE run_id = %s AND batch_no = %s ORDER BY 1", run_id, batch_no
    )
    return [number for (number,) in found]


async def everything(store: Store, run_id: str) -> list[list[tuple[Any, ...]]]:
    tables = ("batches", "batch_groups", "train_steps", "policy_versions", "groups")
    return [await rows(store, f"SELECT t::text FROM {name} t WHERE run_id = %s ORDER BY 1", run_id) for name in tables]


async def test_a_batch_holds_the_oldest_sealed_groups_and_keeps_them(store: Store) -> None:
    run_id = await training_run(store)
    found = await lease_batch(store, run_id)
    assert found == Waiting(ready=0, wanted=2, committed=0, drawn=0)
    [late] = await admitted(store, run_id, size=2)
    early = [await closed(store, run_id) for _ in range(3)]
    assert await lease_batch(store, run_id) == Leased(batch_no=0, step=0, groups=2)
    assert await members_of(store, run_id) == [early[0].group_no, early[1].group_no]
    states = [await state_of(store, key) for key in (late.key, *early)]
    assert states == [GroupState.ADMITTED, GroupState.LEASED, GroupState.LEASED, GroupState.SEALED]
    await closed(store, run_id)
    assert await lease_batch(store, run_id) == Leased(batch_no=0, step=0, groups=2)
    assert await members_of(store, run_id) == [early[0].group_no, early[1].group_no]


async def test_two_leases_at_once_are_one_batch(store: Store, database_url: str) -> None:
    other = await open_store(database_url)
    try:
        for _ in range(5):
            run_id = await training_run(store)
            for _ in range(4):
                await closed(store, run_id)
            first, second, third = await asyncio.gather(*(lease_batch(one, run_id) for one in (store, other, store)))
            assert first == second == third == Leased(batch_no=0, step=0, groups=2)
            assert await rows(store, "SELECT count(*) FROM batches WHERE run_id = %s", run_id) == [(1,)]
            assert len(await members_of(store, run_id)) == 2
    finally:
        await other.close()


async def test_a_group_too_stale_for_its_step_is_dropped_whole_and_counted(store: Store) -> None:
    run_id = await training_run(store, groups=1, staleness={"max": 1})
    for number in range(2):
        await closed(store, run_id, version=number)
        await lease_batch(store, run_id)
        assert await committed(store, run_id, await claimed(store, run_id, number)) is not None
    old, fresh = await closed(store, run_id, version=0), await closed(store, run_id, version=1)
    assert await lease_batch(store, run_id) == Leased(batch_no=2, step=2, groups=1)
    assert await members_of(store, run_id, 2) == [fresh.group_no]
    dropped = await load_group(store, old)
    assert dropped.group.state is GroupState.STALE
    assert dropped.reason == "its oldest token was sampled 2 versions before the step it would have been in"
    claim = await claimed(store, run_id, 2)
    assert claim.stale == 1
    step = await committed(store, run_id, claim)
    assert step is not None
    assert step.staleness == 1


async def test_groups_without_signal_count_as_drawn_and_never_train(store: Store) -> None:
    run_id = await training_run(store)
    flat = await closed(store, run_id, (1.0, 1.0))
    unscored = await closed(store, run_id, (1.0, None))
    assert [await state_of(store, key) for key in (flat, unscored)] == [GroupState.FILTERED] * 2
    await closed(store, run_id)
    assert await lease_batch(store, run_id) == Waiting(ready=1, wanted=2, committed=0, drawn=3)
    await closed(store, run_id, (0.0, 0.5))
    assert isinstance(await lease_batch(store, run_id), Leased)
    claim = await claimed(store, run_id)
    assert (claim.filtered, claim.stale, claim.rewards) == (2, 0, 7)
    assert claim.reward_mean == pytest.approx((1 + 1 + 1 + 0 + 1 + 0 + 0.5) / 7)


@pytest.mark.parametrize(("when_short", "leased"), [("wait", False), ("train", True)])
async def test_a_short_batch_trains_only_where_that_is_wanted(store: Store, when_short: str, leased: bool) -> None:
    run_id = await training_run(store, batch={"when_short": when_short, "resample_cap": 1.5})
    await closed(store, run_id)
    await closed(store, run_id, (1.0, 1.0))
    assert await lease_batch(store, run_id) == Waiting(ready=1, wanted=2, committed=0, drawn=2)
    await closed(store, run_id, (0.0, 0.0))
    found = await lease_batch(store, run_id)
    assert found == (Leased(0, 0, 1) if leased else Waiting(ready=1, wanted=2, committed=0, drawn=3))


async def test_nothing_is_short_of_groups_that_are_not_there(store: Store) -> None:
    run_id = await training_run(store, batch={"when_short": "train", "resample_cap": 1.0})
    for _ in range(4):
        await closed(store, run_id, (1.0, 1.0))
    assert await lease_batch(store, run_id) == Waiting(ready=0, wanted=2, committed=0, drawn=4)


async def test_no_batch_is_leased_beyond_the_last_step(store: Store) -> None:
    run_id = await training_run(store, groups=1, steps=1)
    for _ in range(2):
        await closed(store, run_id)
    await lease_batch(store, run_id)
    await committed(store, run_id, await claimed(store, run_id))
    assert await lease_batch(store, run_id) == Waiting(ready=1, wanted=1, committed=1, drawn=0)


async def test_whoever_claims_a_batch_shuts_the_one_before_out(store: Store) -> None:
    run_id = await training_run(store)
    keys = [await closed(store, run_id) for _ in range(2)]
    await lease_batch(store, run_id)
    loser, winner = await claimed(store, run_id), await claimed(store, run_id)
    assert (loser.fence, winner.fence) == (1, 2)
    before = await everything(store, run_id)
    assert await committed(store, run_id, loser) is None
    assert await everything(store, run_id) == before
    step = await committed(store, run_id, winner, metrics={"loss": 0.25}, probe={"sequences": []})
    assert step is not None
    assert (step.step, step.version, step.fence, step.groups, step.metrics) == (0, 1, 2, 2, {"loss": 0.25})
    assert [await state_of(store, key) for key in keys] == [GroupState.TRAINED] * 2
    assert await read_head(store, run_id) == Head(1, "/checkpoints/1", "d1")
    after = await everything(store, run_id)
    assert [await committed(store, run_id, claim) for claim in (loser, winner)] == [None, None]
    assert await everything(store, run_id) == after
    again = await claimed(store, run_id)
    assert (again.committed, again.fence) == (True, 2)
    assert await train_steps(store, run_id) == [step]
    assert await train_steps(store, run_id, since=1) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
async def test_a_metric_that_is_no_number_commits_nothing(store: Store, loss: float) -> None:
    run_id = await leased(store)
    claim, before = await claimed(store, run_id), await everything(store, run_id)
    with pytest.raises(BadRecord, match="a metric"):
        await committed(store, run_id, claim, metrics={"loss": loss, "lr": 1.0})
    with pytest.raises(BadRecord, match="without its hash"):
        await committed(store, run_id, claim, digest="")
    assert (await everything(store, run_id))[1:] == before[1:]


async def leased(store: Store) -> str:
    """A run with a leased batch of two groups."""
    run_id = await training_run(store)
    for _ in range(2):
        await closed(store, run_id)
    await lease_batch(store, run_id)
    return run_id


async def test_a_commit_that_fails_half_way_leaves_nothing(store: Store) -> None:
    run_id = await leased(store)
    claim = await claimed(store, run_id)
    before = await everything(store, run_id)
    # The batch is marked before the version is written, and a NUL is no text to Postgres.
    with pytest.raises(Refused, match="NUL"):
        await committed(store, run_id, claim, path="/checkpoints/\x00")
    assert await everything(store, run_id) == before
    assert await committed(store, run_id, claim) is not None


async def test_a_step_follows_the_newest_version_or_nothing(store: Store) -> None:
    run_id = await leased(store)
    claim = await claimed(store, run_id)
    other = "INSERT INTO policy_versions (run_id, version, label, path) VALUES (%(run)s, 1, 'other', '/x')"
    await changed(store, other, {"run": run_id})
    before = await everything(store, run_id)
    with pytest.raises(Refused, match="cannot follow version 1"):
        await committed(store, run_id, claim)
    assert await everything(store, run_id) == before


async def changed(store: Store, statement: str, values: dict[str, Any]) -> None:
    async with store.direct() as connection:
        await connection.execute(statement.encode(), values)


async def test_abandoning_frees_every_group_of_the_batch(store: Store) -> None:
    run_id = await training_run(store, batch={"when_short": "train", "resample_cap": 1.0})
    keys = [await closed(store, run_id), await closed(store, run_id, (1.0, 1.0))]
    assert await lease_batch(store, run_id) == Leased(0, 0, 1)
    claim = await claimed(store, run_id)
    assert await abandon_batch(store, run_id, 0)
    assert not await abandon_batch(store, run_id, 0)
    assert await state_of(store, keys[0]) is GroupState.SEALED
    assert await committed(store, run_id, claim) is None
    assert await claim_batch(store, run_id, 0, "me") is None
    assert await leased_batch(store, run_id) is None
    assert await lease_batch(store, run_id) == await leased_batch(store, run_id) == Leased(1, 0, 1)
    again = await claimed(store, run_id, 1)
    assert again.fence > claim.fence  # both name files by step and fence
    assert (again.rewards, again.filtered, again.reward_mean) == (4, 1, 0.75)
    assert await committed(store, run_id, again) is not None
    assert not await abandon_batch(store, run_id, 1)


async def test_checkpoints_that_stay_are_the_newest(store: Store) -> None:
    run_id = await training_run(store, groups=1, steps=5)
    for step in range(4):
        await closed(store, run_id, version=step)
        await lease_batch(store, run_id)
        await committed(store, run_id, await claimed(store, run_id, step))
    assert await live_checkpoints(store, run_id, 2) == {"/checkpoints/3", "/checkpoints/4"}


async def test_what_is_not_there_is_unknown(store: Store) -> None:
    with pytest.raises(Unknown, match="no run called"):
        await lease_batch(store, "run/none")
    run_id = await new_run(store)
    with pytest.raises(Unknown, match="no weights to train"):
        await read_head(store, run_id)
    with pytest.raises(Unknown, match="no batch 3"):
        await claim_batch(store, run_id, 3, "me")


class Trainings(RuleBasedStateMachine):
    """Several trainers and a rollout at one run, in any order."""

    loop: asyncio.AbstractEventLoop
    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.run_id = self.do(training_run(self.store, staleness={"max": 1}))
        self.claims: list[Claim] = []
        self.version = 0

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @rule(age=st.integers(0, 3))
    def seal(self, age: int) -> None:
        self.close("sealed", max(0, self.version - age))

    def close(self, state: str, version: int) -> None:
        values = {"run": self.run_id, "state": state, "version": version}
        self.do(changed(self.store, _SEAL, values))

    @rule()
    def filter(self) -> None:
        self.close("filtered", self.version)

    @rule()
    def lease(self) -> None:
        found = self.do(lease_batch(self.store, self.run_id))
        if isinstance(found, Leased):
            assert (found.step, found.groups) == (self.version, 2)
            self.claims.append(self.do(claimed(self.store, self.run_id, found.batch_no)))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.claims)).batch_no
        claim = self.do(claim_batch(self.store, self.run_id, number, "me"))
        if claim is not None:
            self.claims.append(claim)
            return
        query = "SELECT state FROM batches WHERE run_id = %s AND batch_no = %s"
        assert self.do(rows(self.store, query, self.run_id, number)) == [("abandoned",)]

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        newest = max(one.fence for one in self.claims if one.batch_no == claim.batch_no)
        done = self.do(committed(self.store, self.run_id, claim))
        if done is not None:
            assert (claim.step, claim.fence) == (self.version, newest)
            assert done.staleness <= 1
            self.version = done.version

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        self.do(abandon_batch(self.store, self.run_id, data.draw(st.sampled_from(self.claims)).batch_no))

    @invariant()
    def everything_is_in_one_place(self) -> None:
        [(groups, versions, steps, leased)] = self.do(rows(self.store, _STANDING, *[self.run_id] * 4))
        held = {"leased": ["leased"], "trained": ["committed"]}
        for state, batches, committed_in in groups or ():
            assert batches == held.get(state), state
            assert committed_in == (state == "trained")
        assert versions == list(range(self.version + 1))
        assert (steps or []) == [[number, number + 1, 2] for number in range(self.version)]
        assert leased <= 1

    @invariant()
    def no_two_claims_name_the_same_files(self) -> None:
        named = {(claim.step, claim.fence): claim.batch_no for claim in self.claims if not claim.committed}
        assert len(named) == len({(one.step, one.batch_no, one.fence) for one in self.claims if not one.committed})


_SEAL = """
WITH t AS (
  INSERT INTO tasks (run_id, environment, task_key, split, data, info)
  VALUES (%(run)s, 'sums', 'one', 'train', '{}', '{}') ON CONFLICT DO NOTHING
), r AS (
  UPDATE runs SET next_group_no = next_group_no + 1 WHERE run_id = %(run)s RETURNING next_group_no - 1 AS number
), g AS (
  INSERT INTO groups (run_id, group_no, kind, environment, task_key, draw, size, state, valid,
    oldest_version, closed_at)
  SELECT %(run)s, number, 'train', 'sums', 'one', number, 2, %(state)s, 2, %(version)s, now() FROM r RETURNING group_no
)
INSERT INTO episodes (run_id, group_no, member, attempt, environment_version, prompt, start_state, state, stop, reward,
  turns, sampled_tokens, policy_version, ended_at)
SELECT %(run)s, group_no, member, 0, 'v1', '[]', '{}', 'done', 'answered', member, 1, 3, %(version)s, now()
FROM g, generate_series(0, 1) AS member
"""
"""A closed group of two episodes in one statement: this test makes hundreds."""

_STANDING = """
SELECT
  (SELECT json_agg(json_build_array(state, batches, steps)) FROM (
    SELECT g.state, json_agg(b.state) FILTER (WHERE m.live) AS batches,
      count(*) FILTER (WHERE b.state = 'committed') AS steps
    FROM groups g LEFT JOIN batch_groups m USING (run_id, group_no) LEFT JOIN batches b USING (run_id, batch_no)
    WHERE g.run_id = %s GROUP BY g.group_no, g.state) AS each),
  (SELECT json_agg(version ORDER BY version) FROM policy_versions WHERE run_id = %s),
  (SELECT json_agg(json_build_array(step, version, groups) ORDER BY step) FROM train_steps WHERE run_id = %s),
  (SELECT count(*) FROM batches WHERE run_id = %s AND state = 'leased')
"""


def test_no_group_trains_twice_whatever_trainers_do(database_url: str) -> None:
    loop = asyncio.new_event_loop()
    store = loop.run_until_complete(open_store(database_url))
    machine = type("Machine", (Trainings,), {"loop": loop, "store": store})
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
    finally:
        loop.run_until_complete(store.close())
        loop.close()
