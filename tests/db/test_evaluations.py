"""Evaluations: unbiased, over scored samples, computed once."""

import asyncio
import itertools
import math
from typing import Any

import pytest
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.sampling import Sampling
from atropos.contracts.states import EvaluationState, GroupState
from atropos.db.admission import insert_evaluation_groups
from atropos.db.episodes import finish_episode, start_episode
from atropos.db.errors import Refused, Unknown
from atropos.db.evaluations import (
    evaluation_groups,
    finish_evaluation,
    get_evaluation,
    ks_of,
    list_evaluations,
    pass_at_k,
    start_evaluation,
)
from atropos.db.groups import GroupRow, close_group
from atropos.db.store import Store
from atropos.tests.db.samples import LABEL, beginning, new_group, new_run, rows
from hypothesis import given
from hypothesis import strategies as st


def test_pass_at_k_of_known_cases() -> None:
    assert pass_at_k(16, 4, 4) == pytest.approx(0.728022, abs=1e-6)
    assert pass_at_k(16, 1, 8) == 0.5
    assert (ks_of(1), ks_of(8), ks_of(6)) == ([1], [1, 2, 4, 8], [1, 2, 4, 6])
    for n, c, k in ((3, 4, 1), (3, 1, 4), (3, 1, 0)):
        with pytest.raises(ValueError, match="cannot be estimated"):
            pass_at_k(n, c, k)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_success(case: tuple[int, int, int]) -> None:
    n, c, k = case
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert math.isclose(pass_at_k(n, c, k), sum(any(draw) for draw in draws) / len(draws), abs_tol=1e-12)


async def test_an_evaluation_counts_scored_samples_once(store: Store) -> None:
    run_id = await _run(store, 2, 4)
    first, second = await evaluation_groups(store, run_id, "held-out")
    outcomes: list[tuple[GroupRow, tuple[float | FailureKind | None, ...]]] = [
        (first, (1.0, 1.0, 0.0, 0.25)),
        (second, (0.0, 2.0, None, FailureKind.TOOL)),
    ]
    for group, values in outcomes:
        for member, value in enumerate(values):
            if isinstance(value, FailureKind):
                await _episode(store, group.key.episode(member), None, value)
            else:
                await _episode(store, group.key.episode(member), value, None)
    with pytest.raises(Refused, match="2 open groups"):
        await finish_evaluation(store, run_id, "held-out")
    await _close(store, first, second)
    assert await evaluation_groups(store, run_id, "held-out") == []
    found = await asyncio.gather(*(finish_evaluation(store, run_id, "held-out") for _ in range(3)))
    assert found[0] == found[1] == found[2]
    assert (found[0].state, found[0].episodes) == (EvaluationState.COMPLETED, 6)
    assert found[0].mean_reward == pytest.approx(4.25 / 6)
    expected = {"1": 0.5, "2": (pass_at_k(4, 2, 2) + 1.0) / 2, "4": 1.0}
    assert found[0].pass_at == pytest.approx(expected)
    samples = await rows(store, "SELECT success FROM evaluation_samples WHERE run_id = %s", run_id)
    assert sorted(str(row[0]) for row in samples) == ["False"] * 3 + ["None"] * 2 + ["True"] * 3
    assert (await get_evaluation(store, run_id, "held-out")).outcome == found[0]


async def test_without_a_scored_sample_it_has_failed(store: Store) -> None:
    run_id = await _run(store, 1, 1)
    [group] = await evaluation_groups(store, run_id, "held-out")
    await _episode(store, group.key.episode(0), None, FailureKind.ENGINE)
    await close_group(store, group.key, [], GroupState.FAILED, FailureKind.ENGINE, "gone")
    outcome = await finish_evaluation(store, run_id, "held-out")
    assert (outcome.state, outcome.mean_reward, outcome.pass_at) == (EvaluationState.FAILED, None, {})


async def test_a_cancelled_one_may_leave_groups_open_and_the_newest_attempt_counts(store: Store) -> None:
    run_id = await _run(store, 1, 2)
    [group] = await evaluation_groups(store, run_id, "held-out")
    await _episode(store, group.key.episode(0), None, FailureKind.ENGINE)
    await _episode(store, group.key.episode(0, attempt=1), 1.0, None)
    await start_episode(store, beginning(group.key.episode(1)))
    outcome = await finish_evaluation(store, run_id, "held-out", EvaluationState.CANCELLED)
    assert (outcome.state, outcome.episodes, outcome.pass_at) == (EvaluationState.CANCELLED, 1, {"1": 1.0})


async def test_a_name_stands_for_one_set(store: Store) -> None:
    run_id = await _run(store, 1, 2)
    with pytest.raises(Refused, match="over another set"):
        await _start(store, run_id, 1, 3)
    with pytest.raises(Unknown, match="no evaluation called 'other'"):
        await finish_evaluation(store, run_id, "other")
    assert [row.name for row in await list_evaluations(store, run_id)] == ["held-out"]


async def _run(store: Store, tasks: int, samples: int) -> str:
    run_id = await new_run(store)
    await _start(store, run_id, tasks, samples)
    groups = [new_group(n, split="eval", size=samples, evaluation="held-out") for n in range(tasks)]
    await insert_evaluation_groups(store, run_id, "held-out", groups)
    return run_id


async def _start(store: Store, run_id: str, tasks: int, samples: int) -> None:
    what: dict[str, Any] = {"environment": LABEL, "split": "eval", "sampling": Sampling()}
    await start_evaluation(store, run_id, "held-out", tasks=tasks, samples=samples, **what)


async def _episode(store: Store, key: Any, reward: float | None, failure: FailureKind | None) -> None:
    await start_episode(store, beginning(key))
    stop = StopReason.ANSWERED if failure is None else StopReason.FAILED
    await finish_episode(store, key, stop=stop, failure=failure, reason=None, reward=reward)


async def _close(store: Store, *groups: Any) -> None:
    for group in groups:
        await close_group(store, group.key, [], GroupState.SEALED, None, None)
