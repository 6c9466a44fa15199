"""Admission arithmetic: no task skipped, none repeated within a pass, weights hold over what counts."""

import pytest
from atropos.contracts.admission import next_environment, permute, room, task_index
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 400), st.integers(0, 2**62))
def test_each_pass_over_the_tasks_visits_every_task_once(size: int, seed: int) -> None:
    assert sorted(task_index(draw, size, seed) for draw in range(size)) == list(range(size))
    assert sorted(task_index(draw, size, seed) for draw in range(size, 2 * size)) == list(range(size))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    first = [task_index(draw, 100, 7) for draw in range(100)]
    second = [task_index(draw, 100, 7) for draw in range(100, 200)]
    other = [task_index(draw, 100, 8) for draw in range(100)]
    assert first != second
    assert first != other
    assert first == [task_index(draw, 100, 7) for draw in range(100)]


def test_an_endless_environment_is_walked_in_order() -> None:
    assert [task_index(draw, None, 3) for draw in range(5)] == [0, 1, 2, 3, 4]


def test_nothing_can_be_drawn_from_no_tasks() -> None:
    with pytest.raises(ValueError, match="without tasks"):
        task_index(0, 0, 1)
    with pytest.raises(ValueError, match="counted from 0"):
        task_index(-1, 5, 1)


@given(st.integers(1, 10**9), st.text(max_size=8), st.data())
def test_a_permutation_stays_inside_its_range(size: int, key: str, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    assert 0 <= permute(index, size, key) < size


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.none() | st.integers(0, 500))
def test_room_never_exceeds_concurrency_or_budget(
    concurrency: int, running: int, sealed: int, budget: int | None
) -> None:
    counted = running + sealed
    admitted = room(concurrency=concurrency, running=running, counted=counted, budget=budget)
    assert admitted >= 0
    if admitted:
        assert running + admitted <= concurrency
        assert budget is None or counted + admitted <= budget


def test_a_failed_group_leaves_the_sum_and_is_replaced() -> None:
    assert room(concurrency=8, running=0, counted=10, budget=10) == 0
    assert room(concurrency=8, running=0, counted=9, budget=10) == 1


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10), min_size=1))
def test_weights_hold_over_groups_that_count(weights: dict[str, float]) -> None:
    counted = dict.fromkeys(weights, 0)
    for _ in range(300):
        counted[next_environment(weights, counted)] += 1
    total = sum(weights.values())
    for label, weight in weights.items():
        assert abs(counted[label] - 300 * weight / total) <= len(weights)
