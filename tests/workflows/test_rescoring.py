"""Stored episodes are scored again by a workflow: durably, beside what was scored before, and never twice."""

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest
from atropos.cli.audit import audit
from atropos.cli.errors import CommandError
from atropos.cli.rescore import started
from atropos.cli.run_start import outcome_of
from atropos.contracts.rescoring import Rescored, Rescoring

from ..support.world import ENVIRONMENTS, World

SECOND = f"{ENVIRONMENTS}:Second"


async def played(world: World, name: str, groups: int = 2, **environment: Any) -> str:
    """A run that has ended, of groups of two."""
    return (await world.run(world.document(name, environment=environment, budget={"groups": groups}))).run_id


async def rescored(world: World, run_id: str, **asked: Any) -> Rescored:
    label = asked.pop("environment", None) or label_of(world, run_id)
    handle = await started(world.client, Rescoring(run_id=run_id, environment=label, **asked))
    return await asyncio.wait_for(outcome_of(handle, Rescored), 60)


def rows(world: World, query: str, run_id: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(world.database) as connection:
        return connection.execute(query, (run_id,)).fetchall()


def label_of(world: World, run_id: str) -> str:
    return str(rows(world, "SELECT DISTINCT environment FROM groups WHERE run_id = %s", run_id)[0][0])


VALUES = (
    "SELECT name, member, value FROM scores WHERE run_id = %s AND scorer_version = 'second'"
    " AND group_no = 0 ORDER BY name, member"
)


async def test_other_scorers_are_applied_beside_the_first_ones_and_only_once(world: World) -> None:
    async with world.workers() as services:
        run_id = await played(world, "Effects")
        before = rows(world, "SELECT * FROM scores WHERE run_id = %s ORDER BY seq", run_id)
        done = await rescored(world, run_id, code=SECOND)
        again = await rescored(world, run_id, code=SECOND)
        found = await audit(services.store, world.client, run_id)
    # answered, early, calls, place of four episodes; odd of two.
    assert (done.groups, done.written, done.failed, done.known, done.unscored) == (2, 18, 2, 0, 0)
    assert "nothing to divide by" in (done.reason or "")
    assert (again.written, again.known, again.failed) == (0, 18, 2)
    assert rows(world, VALUES, run_id) == [
        ("answered", 0, 1.5), ("answered", 1, 1.5), ("calls", 0, 2.0), ("calls", 1, 2.0), ("early", 0, 1 / 3),
        ("early", 1, 1 / 3), ("odd", 0, 1.0), ("place", 0, 0.0), ("place", 1, 1.0),
    ]  # fmt: skip
    after = rows(world, "SELECT * FROM scores WHERE run_id = %s AND scorer_version <> 'second' ORDER BY seq", run_id)
    assert after == before
    assert rows(world, "SELECT DISTINCT reward FROM episodes WHERE run_id = %s", run_id) == [(1.0,)]
    kinds = "SELECT kind FROM events WHERE run_id = %s AND kind LIKE 'rescor%%' ORDER BY seq"
    assert [kind for (kind,) in rows(world, kinds, run_id)] == ["rescoring", "rescored"] * 2
    assert found.violations == ()


async def test_one_scorer_may_be_chosen_and_its_version_named(world: World) -> None:
    async with world.workers():
        run_id = await played(world, "Effects", groups=1)
        done = await rescored(world, run_id, code=SECOND, scorers=("early",), version="trial")
    assert (done.written, done.failed) == (2, 0)
    given = rows(world, "SELECT name, scorer_version FROM scores WHERE run_id = %s AND name = 'early'", run_id)
    assert given == [("early", "trial")] * 2


async def test_episodes_whose_judge_was_away_are_scored_later(world: World, tmp_path: Path) -> None:
    async with world.workers() as services:
        run_id = await played(world, "Waiting", args={"folder": str(tmp_path)})
        assert rows(world, "SELECT DISTINCT reward FROM episodes WHERE run_id = %s", run_id) == [(None,)]
        nothing = await rescored(world, run_id, unscored=True)
        (tmp_path / "judge").write_text("0.25")
        done = await rescored(world, run_id, unscored=True)
        nobody = await rescored(world, run_id, unscored=True)
        found = await audit(services.store, world.client, run_id)
    assert (nothing.written, nothing.unscored) == (0, 4)
    assert (done.written, done.unscored, done.groups) == (4, 0, 2)
    assert nobody.groups == 0
    assert rows(world, "SELECT DISTINCT reward FROM episodes WHERE run_id = %s", run_id) == [(1.5,)]
    assert rows(world, "SELECT DISTINCT mean_reward FROM groups WHERE run_id = %s", run_id) == [(1.5,)]
    assert rows(world, "SELECT count(*) FROM sft_examples WHERE run_id = %s", run_id) == [(4,)]
    assert found.violations == ()


async def test_workers_that_go_away_in_the_middle_lose_and_repeat_nothing(world: World, tmp_path: Path) -> None:
    async with world.workers():
        run_id = await played(world, "Effects", groups=12)
        label = label_of(world, run_id)
    handle = await started(world.client, Rescoring(run_id=run_id, environment=label, code=SECOND))
    some = "SELECT FROM scores WHERE run_id = %s AND scorer_version = 'second' LIMIT 1"
    async with asyncio.timeout(60), world.workers():
        while not rows(world, some, run_id):  # noqa: ASYNC110 - what is awaited is a row
            await asyncio.sleep(0.02)
    async with world.workers():
        same = await started(world.client, Rescoring(run_id=run_id, environment=label, code=SECOND))
        assert same.id == handle.id
        done = await asyncio.wait_for(outcome_of(handle, Rescored), 90)
    assert done.groups == 12
    given = "SELECT count(*) FROM scores WHERE run_id = %s AND scorer_version = 'second'"
    assert rows(world, given, run_id) == [(12 * 9,)]
    assert done.written + done.known == 12 * 9


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"scorers": ("anserwed",)}, "has no reward or metric 'anserwed'; did you mean .answered.?"),
        ({"environment": "Other"}, "has no environment 'Other'"),
        ({"code": "nowhere:Nothing"}, "no module 'nowhere'"),
    ],
)
async def test_what_is_not_there_is_refused_with_a_sentence(world: World, asked: dict[str, Any], says: str) -> None:
    async with world.workers():
        run_id = await played(world, "Effects", groups=1)
        with pytest.raises(CommandError, match=says.replace("?", r"\?")):
            await rescored(world, run_id, **asked)
