"""A run's rows are held against real workflows: what ended behind their back is named, and a live run is sound."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from atropos.cli.audit import audit
from atropos.cli.temporal import prepare
from atropos.contracts.ids import (
    EpisodeKey,
    GroupKey,
    evaluation_workflow_id,
    rollout_workflow_id,
    trainer_workflow_id,
)
from atropos.contracts.sampling import Sampling
from atropos.db.audit import Audit
from atropos.db.episodes import start_episode
from atropos.db.evaluations import start_evaluation
from atropos.db.lives import lives_of
from atropos.db.store import Store, open_store
from atropos.tests.db.ledger import ledger
from atropos.tests.db.samples import LABEL, admitted, beginning
from atropos.workflows.group import search_attributes
from temporalio.client import Client

from ..support.world import World

OPEN = 9
"""The group of the ledger that is still played, with one member."""
QUICK_S = 0.0
"""Of a contradiction that nobody will resolve."""


@pytest.fixture(scope="module")
async def store(world: World) -> AsyncIterator[Store]:
    """The world's store, after its Temporal was made fit."""
    await prepare(world.client)
    opened = await open_store(world.database)
    yield opened
    await opened.close()


async def begun(client: Client, run_id: str, workflow_id: str) -> None:
    """A workflow that nobody will work on."""
    await client.start_workflow(
        "Nothing", id=workflow_id, task_queue="nobody", search_attributes=search_attributes(run_id)
    )


async def mirrored(world: World, store: Store) -> str:
    """A ledger with an open group and evaluation, and for each of its rows a workflow that is as open as the row."""
    run_id = await ledger(store)
    [group] = await admitted(store, run_id)
    await start_episode(store, beginning(group.key.episode(0)))
    await start_evaluation(
        store, run_id, "held out", environment=LABEL, split="eval", tasks=1, samples=1, sampling=Sampling()
    )
    lives = await lives_of(store, run_id)
    rows = {run_id: True, rollout_workflow_id(run_id): True, trainer_workflow_id(run_id): True}
    rows |= {evaluation_workflow_id(run_id, name): is_open for name, is_open in lives.evaluations.items()}
    rows |= {GroupKey(run_id=run_id, group_no=number).workflow_id: is_open for number, is_open in lives.groups.items()}
    rows |= {episode(run_id, *place): is_open for place, is_open in lives.episodes.items()}
    await asyncio.gather(*(begun(world.client, run_id, workflow_id) for workflow_id in rows))
    await asyncio.gather(*(terminated(world, workflow_id) for workflow_id, is_open in rows.items() if not is_open))
    return run_id


def episode(run_id: str, group: int, member: int = 0, attempt: int = 0) -> str:
    return EpisodeKey(run_id=run_id, group_no=group, member=member, attempt=attempt).workflow_id


async def terminated(world: World, workflow_id: str) -> None:
    await world.client.get_workflow_handle(workflow_id).terminate()


def found(one: Audit) -> list[tuple[str, str]]:
    return [(violation.check, violation.row) for violation in one.violations]


async def test_rows_and_workflows_that_agree_are_no_contradiction(world: World, store: Store) -> None:
    run_id = await mirrored(world, store)
    seen = await audit(store, world.client, run_id)
    assert (found(seen), seen.unknown) == ([], 0)
    assert seen.checked["workflows"] == 3 + 1 + 10 + 19


@pytest.mark.parametrize(
    ("suffix", "row"),
    [
        ("", "run"),
        ("/rollout", "rollout"),
        ("/trainer", "trainer"),
        ("/evaluation/held out", "evaluation held out"),
        (f"/group/{OPEN}", f"group {OPEN}"),
        (f"/group/{OPEN}/episode/0", f"episode {OPEN}/0/0"),
    ],
)
async def test_a_workflow_that_ended_behind_the_store_s_back_is_named(
    world: World, store: Store, suffix: str, row: str
) -> None:
    run_id = await mirrored(world, store)
    await terminated(world, run_id + suffix)
    assert found(await audit(store, world.client, run_id, QUICK_S)) == [("workflow_over", row)]
