"""What is shown of a run while it lasts."""

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from atropos.cli.run_watch import Extent, Rate, Seen, _Lines
from atropos.contracts.activities import EvaluationOutcome
from atropos.contracts.runfile import RunConfig, parse_run
from atropos.contracts.sampling import Sampling
from atropos.contracts.states import EpisodeState, EvaluationState, RunState
from atropos.db.batches import StepRow
from atropos.db.evaluations import EvaluationRow
from atropos.db.summary import EpisodeTotals, RunSummary
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def config(steps: int | None) -> RunConfig:
    trainer = {} if steps is None else {"trainer": {"kind": "builtin", "steps": steps}}
    return parse_run(
        {
            "name": "try",
            "model": {"path": "tiny"},
            "engines": [{"url": "http://127.0.0.1:8000"}],
            "environments": [{"id": "calculator", "group_size": 4}],
            "budget": {"groups": 25},
        }
        | trainer
    )


def seen(after_s: int, done: int, step: int | None, waiting_for: str | None = None) -> Seen:
    totals = EpisodeTotals({EpisodeState.DONE: done, EpisodeState.RUNNING: 3}, {}, {}, 0.25, done)
    moment = BEGAN + timedelta(seconds=after_s)
    summary = RunSummary(
        "run/x", "x", RunState.RUNNING, None, waiting_for, 8, (), {"train": totals}, 1, 0, 0, BEGAN, moment
    )
    metrics = {"reward_mean": 0.5, "loss": -0.04, "grad_norm": 1.0}
    return Seen(summary, None if step is None else StepRow(step, step + 1, step, 1, 16, 1, metrics))


@pytest.mark.parametrize(
    ("steps", "moments", "last"),
    [
        (None, [seen(0, 0, None), seen(10, 50, None)], "50 of 100 episodes, 3 in flight, 5.0 episodes/s, reward 0.250"),
        (30, [seen(4, 8, None, "why")], "step 0 of 30, 3 in flight, 0.0 episodes/s, reward 0.250, waits: why"),
        (
            30,
            [seen(0, 0, None), seen(10, 50, 0), seen(20, 150, 1)],
            "step 2 of 30, reward 0.500, loss -0.040, staleness 1, 7.5 episodes/s",
        ),
    ],
)
def test_a_plain_line_says_how_far_it_is_and_what_it_earns(steps: int | None, moments: list[Seen], last: str) -> None:
    page = io.StringIO()
    lines = _Lines(Console(file=page), Extent.of(config(steps)))
    for moment in moments:
        lines.show(moment)
    lines.show(moments[-1])
    shown = page.getvalue().splitlines()
    assert shown[-1] == last
    assert len(shown) <= len(moments) + 1


@pytest.mark.parametrize(
    ("version", "said"),
    [(20, "evaluation step20-sums-eval of version 20 0.750"), (None, "evaluation step20-sums-eval 0.750")],
)
def test_an_evaluation_is_told_by_its_version_and_never_averaged_with_others(version: int | None, said: str) -> None:
    name = "step20-sums-eval"
    outcome = EvaluationOutcome(name=name, state=EvaluationState.COMPLETED, episodes=4, mean_reward=0.75, pass_at={})
    row = EvaluationRow(
        "run/x", name, "sums", "eval", 2, 2, 1.0, Sampling(), version, EvaluationState.COMPLETED, outcome
    )
    page, moment = io.StringIO(), seen(10, 50, None)
    averaged = EpisodeTotals({EpisodeState.DONE: 9}, {}, {}, 0.5, 9)
    summary = replace(moment.summary, episodes={**moment.summary.episodes, "eval": averaged})
    _Lines(Console(file=page, width=200), Extent.of(config(30))).show(replace(moment, summary=summary, evaluation=row))
    assert page.getvalue().rstrip().endswith(said)
    assert "0.500" not in page.getvalue()


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500)), min_size=2, max_size=40))
def test_a_rate_is_that_of_the_last_while(changes: list[tuple[int, int]]) -> None:
    rate, moment, count = Rate(over_s=30.0), 0, 0
    moments = []
    for passed, added in changes:
        moment, count = moment + passed, count + added
        moments.append((moment, count))
        found = rate.at(moment, count)
    older = [one for one in moments[:-1] if one[0] <= moment - 30.0] or moments[:1]
    since, before = older[-1]
    assert found == pytest.approx((count - before) / (moment - since))
