"""The demo's own account of itself: read from rows, and honest about what is missing."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from atropos.cli.chaos.conductor import Kill
from atropos.cli.chaos.plan import CELLS, Component
from atropos.cli.chaos.report import ChaosReport
from atropos.cli.chaos.stage import Hit
from atropos.cli.demo_report import RunReport, StepFigures, mean_reward, read_report
from atropos.cli.demo_run import DemoSize, control_run, demo_run, demo_size
from atropos.cli.demo_show import parts, show_runs
from atropos.cli.demo_verdict import judge, last_line
from atropos.cli.main import app
from atropos.cli.stack.files import StackHome, hold_lock
from atropos.cli.stack.process import ProcessId
from atropos.contracts.runfile import RunConfig, parse_run
from atropos.db.audit import Audit, Violation, audit_run
from atropos.db.runs import get_run
from atropos.db.store import Store, open_store
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from ..db.ledger import ledger
from ..support.world import World

WHOLE = demo_size(None, None)
UNASKED = Audit((), {})


@pytest.mark.parametrize(
    ("steps", "episodes", "size"),
    [
        (None, None, DemoSize(60, 16)),
        (3, None, DemoSize(3, 16)),
        (None, 1024, DemoSize(16, 16)),
        (None, 40, DemoSize(1, 10)),
        (None, 1, DemoSize(1, 1)),
        (4, 64, DemoSize(4, 4)),
        (2, 100_000, DemoSize(2, 16)),
    ],
)
def test_a_demo_is_as_long_as_asked_for(steps: int | None, episodes: int | None, size: DemoSize) -> None:
    assert demo_size(steps, episodes) == size


def test_the_control_differs_in_its_learning_rate_and_its_length_alone() -> None:
    run, control = (make(Path("policy"), "http://127.0.0.1:8000", WHOLE, 3) for make in (demo_run, control_run))
    assert run.trainer.optim.lr > 0 == control.trainer.optim.lr
    assert control.trainer.steps < run.trainer.steps
    aside = {"trainer": run.trainer, "name": run.name, "eval": run.eval}
    assert control.model_copy(update=aside) == run
    assert control.trainer.model_copy(update={"steps": run.trainer.steps, "optim": run.trainer.optim}) == run.trainer
    assert run.seed == 3
    assert list(run.evaluations("end")) == ["end-calculator-eval"]
    assert control.evaluations("end") == {}


def test_a_second_demo_is_refused_before_it_makes_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_HOME", str(tmp_path))
    place = StackHome(tmp_path / "demo")
    place.prepare()
    with hold_lock(place, place.demo_lock) as held:
        assert held
        result = CliRunner().invoke(app, ["demo", "--steps", "1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "runs in" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "policy").exists()


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def store(world: World) -> AsyncIterator[Store]:
    opened = await open_store(world.database, pool_size=2)
    yield opened
    await opened.close()


@pytest.fixture(scope="module")
async def finished(world: World) -> tuple[str, RunConfig]:
    """A run of four episodes and an evaluation of three."""
    sets = [{"id": "Answers", "split": "eval", "tasks": 3, "samples": 1}]
    document = world.document("Answers", eval={"sets": sets})
    async with world.workers():
        return (await world.run(document)).run_id, parse_run(document)


async def test_figures_are_those_of_the_rows(store: Store, finished: tuple[str, RunConfig]) -> None:
    found = await read_report(store, *finished, await audit_run(store, finished[0]))
    assert found.problems == ()
    assert (found.episodes, found.turns, found.steps) == (7, 21, ())
    assert (found.reward, found.eval_reward) == (0.75, 0.75)
    assert found.sample is not None
    assert found.audit.violations == ()
    assert found.audit.checked["spans"] == 21
    line = last_line(found, found, judge(found, found, WHOLE), seed=5, wall_s=30.0)
    assert line["turns_per_s"] == pytest.approx(21 / found.run_s, rel=0.01)


async def test_a_step_is_credited_with_every_scored_episode_closed_before_it(store: Store) -> None:
    run_id = await ledger(store)
    row = await get_run(store, run_id)
    assert row is not None
    found = await read_report(store, run_id, row.config, UNASKED)
    assert [(one.step, one.scored, one.rewards, one.filtered) for one in found.steps] == [
        (0, 4, 2.0, 0),
        (1, 6, 4.0, 1),
    ]
    assert [(one.loss, one.staleness) for one in found.steps] == [(-0.5, 0), (-0.5, 0)]
    assert all(one.seconds > 0 for one in found.steps)
    assert (found.reward_first, found.reward_last) == (0.6, 0.6)
    assert "2 of 9 train steps are committed" in found.problems
    assert "the run is running" in found.problems


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
    world: World, store: Store, finished: tuple[str, RunConfig], damage: str, problem: str
) -> None:
    kept = Tables(world.database, finished[0])
    kept.change(damage)
    try:
        assert any(problem in one for one in (await read_report(store, *finished, UNASKED)).problems)
    finally:
        kept.restore()


async def test_what_an_engine_never_proved_is_counted_apart(
    world: World, store: Store, finished: tuple[str, RunConfig]
) -> None:
    kept = Tables(world.database, finished[0])
    kept.change(
        f"WITH doubted AS (UPDATE turns SET provisional = true WHERE run_id = '{finished[0]}' AND group_no = 1"
        " AND member = 1) UPDATE episodes SET state = 'failed', stop = 'failed', failure = 'engine', reward = NULL"
        " WHERE run_id = %s AND group_no = 1 AND member = 1"
    )
    try:
        found = await read_report(store, *finished, UNASKED)
    finally:
        kept.restore()
    assert (found.problems, found.in_doubt, found.episodes) == ((), 1, 6)


# --- the verdict ----------------------------------------------------------------------------------------------------


def figures(step: int, reward: float, scored: int = 128) -> StepFigures:
    return StepFigures(step, scored, reward * scored, -0.1, 1, 2, 10.0)


def report(*rewards: float, **changes: Any) -> RunReport:
    steps = tuple(figures(step, reward) for step, reward in enumerate(rewards))
    audit = Audit((), {"groups": 4, "turns": 9})
    return replace(RunReport("run/x", 9, 27, steps, mean_reward(steps), 0.95, 3.0, None, audit, ()), **changes)


LEARNT = report(0.2, 0.3, 0.4, *(0.9,) * 22, *(0.95,) * 5)
STILL = report(0.25, 0.25, eval_reward=None)


def test_a_mean_reward_is_one_over_episodes() -> None:
    assert mean_reward([figures(0, 0.0, scored=300), figures(1, 1.0, scored=100)]) == 0.25
    assert mean_reward([]) is None


def test_a_model_that_learns_and_a_control_that_does_not_pass() -> None:
    verdict = judge(LEARNT, STILL, WHOLE)
    assert (verdict.failures, verdict.unjudged) == ((), ())
    line = last_line(LEARNT, STILL, verdict, seed=7, wall_s=99.0)
    assert line == {
        "run": "run/x",
        "episodes": 9,
        "turns": 27,
        "steps": 30,
        "reward_first": 0.3,
        "reward_last": 0.95,
        "eval_reward": 0.95,
        "control_reward": 0.25,
        "audit": {"violations": 0, "checked": {"groups": 8, "turns": 18}},
        "seed": 7,
        "wall_s": 99.0,
        "turns_per_s": 9.0,
        "unjudged": [],
        "problems": [],
    }


@pytest.mark.parametrize(
    ("run", "control", "failure"),
    [
        (report(*(0.41,) * 3, *(0.95,) * 27), STILL, "reward_first is 0.410; at most 0.40 is expected"),
        (report(*(0.2,) * 25, *(0.89,) * 5), STILL, "reward_last is 0.890; at least 0.90 is expected"),
        (replace(LEARNT, eval_reward=0.84), STILL, "eval_reward is 0.840; at least 0.85 is expected"),
        (replace(LEARNT, eval_reward=None), STILL, "eval_reward is missing"),
        (LEARNT, report(0.51), "control_reward is 0.510; at most 0.50 is expected"),
        (replace(LEARNT, problems=("one is lost",)), STILL, "one is lost"),
        (LEARNT, replace(STILL, problems=("one is lost",)), "the control: one is lost"),
        (
            LEARNT,
            replace(STILL, audit=Audit((Violation("steps", "step 3"),), LEARNT.audit.checked)),
            "the audit of run/x: steps: step 3",
        ),
    ],
)
def test_whatever_is_not_as_it_should_be_fails_the_demo(run: RunReport, control: RunReport, failure: str) -> None:
    verdict = judge(run, control, WHOLE)
    assert verdict.failures == (failure,)
    assert last_line(run, control, verdict, seed=0, wall_s=1.0)["problems"] == [failure]


NOBODY_DIED = ("2 episodes rest on weights that no engine has proved, and no engine was killed",)


@pytest.mark.parametrize(
    ("killed", "failures"), [(None, NOBODY_DIED), (Component.TEMPORAL, NOBODY_DIED), (Component.ENGINE, ())]
)
def test_episodes_in_doubt_are_forgiven_only_where_an_engine_was_killed(
    killed: Component | None, failures: tuple[str, ...]
) -> None:
    hit = Hit(datetime.now(UTC), ProcessId(pid=1, started="then"), ("one",))
    kills = tuple(Kill(cell, 4, hit, 1.0, 2.0) for cell in CELLS if cell.component is killed)
    chaos = None if killed is None else ChaosReport(kills, 9, 3, 0, 0, ())
    assert judge(replace(LEARNT, in_doubt=2), STILL, WHOLE, chaos).failures == failures


@pytest.mark.parametrize(
    ("size", "unjudged"),
    [
        (DemoSize(3, 16), ("reward_last", "eval_reward")),
        (DemoSize(2, 16), ("reward_first", "reward_last", "eval_reward", "control_reward")),
        (DemoSize(60, 15), ("reward_first", "reward_last", "eval_reward", "control_reward")),
    ],
)
def test_a_short_demo_says_what_it_cannot_judge(size: DemoSize, unjudged: tuple[str, ...]) -> None:
    bad = report(*(0.6,) * size.steps, eval_reward=0.1)
    verdict = judge(bad, report(0.6), size)
    assert verdict.unjudged == unjudged
    assert len(verdict.failures) == 4 - len(unjudged)
    with Console(width=100) as page, page.capture() as shown:
        show_runs(bad, STILL, verdict, page)
    assert f"not judged: {', '.join(unjudged)}" in shown.get()


def test_the_table_has_few_rows_and_the_control() -> None:
    with Console(width=100) as page, page.capture() as shown:
        show_runs(LEARNT, STILL, judge(LEARNT, STILL, WHOLE), page)
    rows = [line.split() for line in shown.get().splitlines()]
    assert ["0-2", "0.300", "-0.1000", "1", "6", "12.8"] in rows
    assert ["27-29", "0.950", "-0.1000", "1", "6", "12.8"] in rows
    assert ["control", "0.250", "-0.1000", "1", "4", "12.8"] in rows


@given(st.integers(0, 70), st.integers(1, 12))
def test_parts_are_all_steps_in_order(count: int, rows: int) -> None:
    steps = [figures(step, 0.5) for step in range(count)]
    found = list(parts(steps, rows))
    assert [one for part in found for one in part] == steps
    assert len(found) <= rows


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
