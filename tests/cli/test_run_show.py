"""A run at a glance: evaluations by the version they are of, and their groups apart from those the limit holds back."""

import io
from collections.abc import AsyncIterator

import pytest
from atropos.cli.run_show import render_run, run_facts
from atropos.contracts.reasons import StopReason
from atropos.contracts.sampling import Sampling
from atropos.contracts.states import GroupState
from atropos.db.admission import insert_evaluation_groups
from atropos.db.batches import training_progress
from atropos.db.endings import finish_episode
from atropos.db.episodes import start_episode
from atropos.db.evaluations import evaluation_groups, finish_evaluation, list_evaluations, start_evaluation
from atropos.db.groups import close_group
from atropos.db.runs import get_run
from atropos.db.store import Store, open_store
from atropos.db.summary import run_summary
from rich.console import Console

from ..db.samples import LABEL, admitted, beginning, closed, new_group, training_run


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    opened = await open_store(database_url)
    yield opened
    await opened.close()


async def evaluated(store: Store, run_id: str, version: int, reward: float | None) -> None:
    """An evaluation of one task; it goes on where there is no reward."""
    name = f"step{version}-{LABEL}-eval"
    what = {"environment": LABEL, "split": "eval", "tasks": 1, "samples": 1}
    await start_evaluation(store, run_id, name, sampling=Sampling(), policy_version=version, **what)  # type: ignore[arg-type]
    await insert_evaluation_groups(store, run_id, name, [new_group(version, split="eval", size=1, evaluation=name)])
    if reward is None:
        return
    [group] = await evaluation_groups(store, run_id, name)
    episode = group.key.episode(0)
    await start_episode(store, beginning(episode))
    await finish_episode(store, episode, stop=StopReason.ANSWERED, failure=None, reason=None, reward=reward)
    await close_group(store, group.key, [], GroupState.SEALED, None, None)
    await finish_evaluation(store, run_id, name)


async def test_evaluations_are_told_by_version_and_their_groups_apart(store: Store) -> None:
    run_id = await training_run(store)
    await closed(store, run_id, (0.0, 1.0))
    await admitted(store, run_id, 2)
    for version, reward in ((10, 0.25), (20, 0.75), (30, None)):
        await evaluated(store, run_id, version, reward)
    row = await get_run(store, run_id)
    assert row is not None
    summary, evaluations = await run_summary(store, run_id), await list_evaluations(store, run_id)
    training = await training_progress(store, run_id)

    page = io.StringIO()
    render_run(row, summary, evaluations, training, None, Console(file=page, width=200))
    shown = page.getvalue()
    assert f"2 groups, at most {row.concurrency} by the episodes they still play; 1 of evaluations" in shown
    assert f"step10-{LABEL}-eval of version 10 (1 tasks, samples of each: 1): completed, mean reward 0.250" in shown
    assert f"step20-{LABEL}-eval of version 20 (1 tasks, samples of each: 1): completed, mean reward 0.750" in shown
    assert f"step30-{LABEL}-eval of version 30 (1 tasks, samples of each: 1): running\n" in shown
    [eval_line] = [line for line in shown.splitlines() if line.split()[:1] == ["eval"]]
    assert eval_line.endswith("2 done episodes; 2 scored; stopped: 2 answered")

    facts = run_facts(row, summary, evaluations, training)
    assert (facts["open_groups"], facts["evaluating_groups"]) == (2, 1)
    assert [(one["policy_version"], one["mean_reward"]) for one in facts["evaluations"]] == [
        (10, 0.25),
        (20, 0.75),
        (30, None),
    ]
    assert facts["episodes"]["train"]["mean_reward"] == 0.5
    assert "mean_reward" not in facts["episodes"]["eval"]
