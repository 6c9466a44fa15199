"""The demo's own account of itself: read from rows, and honest about what is missing."""

from pathlib import Path

import psycopg
import pytest
from atropos.cli.demo import demo_run
from atropos.cli.demo_report import Report, read_report
from atropos.contracts.runfile import RunConfig, parse_run
from atropos.db.store import open_store

from ..support.world import World


@pytest.mark.parametrize(("episodes", "groups", "size"), [(512, 64, 8), (1, 1, 1), (9, 2, 8), (8, 1, 8), (5, 1, 5)])
def test_the_demo_runs_whole_groups_and_then_an_evaluation(episodes: int, groups: int, size: int) -> None:
    config = demo_run(Path("policy"), "http://127.0.0.1:8000", episodes, seed=3)
    assert (config.budget.groups, config.environments[0].group_size, config.seed) == (groups, size, 3)
    assert list(config.evaluations("end")) == ["end-calculator-eval"]


@pytest.fixture(scope="module")
async def finished(world: World) -> tuple[str, RunConfig]:
    """A run of four episodes and an evaluation of three."""
    sets = [{"id": "Answers", "split": "eval", "tasks": 3, "samples": 1}]
    document = world.document("Answers", eval={"sets": sets})
    async with world.workers():
        return (await world.run(document)).run_id, parse_run(document)


async def report(world: World, finished: tuple[str, RunConfig]) -> Report:
    store = await open_store(world.database, pool_size=1)
    try:
        return await read_report(store, *finished)
    finally:
        await store.close()


async def test_figures_are_those_of_the_rows(world: World, finished: tuple[str, RunConfig]) -> None:
    found = await report(world, finished)
    assert found.problems == ()
    assert (found.episodes, found.turns) == (7, 21)
    assert (found.reward_first, found.eval_reward) == (0.75, 0.75)
    assert found.sample is not None
    line = found.line(wall_s=30.0)
    assert {"run", "episodes", "turns", "reward_first", "eval_reward", "wall_s", "turns_per_s"} <= set(line)
    assert line["turns_per_s"] == pytest.approx(21 / found.run_s, rel=0.01)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("DELETE FROM turns WHERE run_id = %s AND group_no = 0 AND member = 0", "3 of 4 training episodes have tokens"),
        ("UPDATE episodes SET reward = NULL WHERE run_id = %s AND group_no = 1", "2 of 4 training episodes scored"),
        (
            "UPDATE episodes SET state = 'running', stop = NULL, ended_at = NULL, reward = NULL"
            " WHERE run_id = %s AND group_no = 1 AND member = 1",
            "3 of 4 training episodes finished",
        ),
        (
            "UPDATE episodes SET state = 'failed', failure = 'engine', reward = NULL WHERE run_id = %s",
            "0 of 4 training",
        ),
        ("UPDATE groups SET size = 1, valid = 1 WHERE run_id = %s AND group_no = 0", "3 of 4 training episodes exist"),
        ("DELETE FROM turns WHERE run_id = %s AND group_no > 1", "0 of 3 evaluation episodes have tokens"),
    ],
)
async def test_what_is_missing_is_a_problem(
    world: World, finished: tuple[str, RunConfig], damage: str, problem: str
) -> None:
    kept = Tables(world.database, finished[0])
    kept.change(damage)
    try:
        assert any(problem in one for one in (await report(world, finished)).problems)
    finally:
        kept.restore()


class Tables:
    """The rows of a run, to be damaged and put back."""

    NAMES = ("groups", "episodes", "segments", "turns", "tool_calls")

    def __init__(self, database: str, run_id: str) -> None:
        self._database = database
        self._run_id = run_id

    def change(self, statement: str) -> None:
        with psycopg.connect(self._database) as connection:
            for name in self.NAMES:
                connection.execute(f"CREATE TABLE kept_{name} AS TABLE {name}")
            connection.execute("SET session_replication_role = replica")
            connection.execute(statement, [self._run_id])

    def restore(self) -> None:
        with psycopg.connect(self._database) as connection:
            connection.execute("SET session_replication_role = replica")
            for name in self.NAMES:
                connection.execute(f"DELETE FROM {name}")
                connection.execute(f"INSERT INTO {name} SELECT * FROM kept_{name}")
                connection.execute(f"DROP TABLE kept_{name}")
