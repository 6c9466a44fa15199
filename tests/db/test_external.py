"""A trainer of one's own: it begins a run once, takes what is to be trained on, and commits only what is its own."""

import pytest
from atropos.contracts.states import RunState
from atropos.db.batches import abandon_batch, read_head
from atropos.db.errors import Refused, Unknown
from atropos.db.external import external_trainer
from atropos.db.runs import set_run_state
from atropos.db.store import Store

from .samples import closed, new_run, training_run


async def outside(store: Store, steps: int = 1, groups: int = 2) -> str:
    """A run with groups for one step, that others train."""
    run_id = await new_run(store, trainer={"kind": "external", "steps": steps}, batch={"groups": groups})
    for _ in range(groups):
        await closed(store, run_id)
    return run_id


async def test_it_begins_once_and_takes_its_steps(store: Store) -> None:
    run_id = await outside(store)
    trainer = await external_trainer(store, run_id)
    assert (await trainer.begin("/models/first")).path == "/models/first"
    assert (await trainer.begin("/models/other")).path == "/models/first"
    batch = await trainer.next_batch()
    assert batch is not None
    assert (batch.version, batch.head.version, batch.name) == (1, 0, "version-000001-fence-1")
    assert [len(group.episodes) for group in batch.groups] == [2, 2]
    step = await trainer.commit(batch, "/weights/1", "d1", {"loss": 0.5})
    assert step is not None
    assert (step.version, step.groups) == (1, 2)
    assert (await read_head(store, run_id)).path == "/weights/1"
    assert await trainer.needed() == {"/models/first", "/weights/1"}
    assert await trainer.next_batch() is None


async def test_what_was_taken_over_or_abandoned_is_not_committed_and_comes_back(store: Store) -> None:
    run_id = await outside(store, steps=5)
    first, second = await external_trainer(store, run_id), await external_trainer(store, run_id)
    await first.begin("/models/first")
    lost, taken = await first.next_batch(), await second.next_batch()
    assert lost is not None
    assert taken is not None
    assert lost.name != taken.name
    assert await first.commit(lost, "/weights/a", "d1", {}) is None
    assert await abandon_batch(store, run_id, taken.claim.batch_no)
    assert await second.commit(taken, "/weights/b", "d2", {}) is None
    again = await first.next_batch()
    assert again is not None
    assert again.groups == taken.groups == lost.groups
    assert len({lost.name, taken.name, again.name}) == 3
    assert await first.commit(again, "/weights/c", "d3", {}) is not None
    await set_run_state(store, run_id, RunState.CANCELLED, "enough")
    assert await first.next_batch() is None


async def test_a_run_that_does_not_leave_its_steps_to_others_is_refused(store: Store) -> None:
    with pytest.raises(Refused, match="its file must say `external`"):
        await external_trainer(store, await training_run(store))
    with pytest.raises(Unknown, match="no run called"):
        await external_trainer(store, "run/none")
    with pytest.raises(Unknown, match="its trainer has not begun"):
        await (await external_trainer(store, await outside(store))).next_batch()
