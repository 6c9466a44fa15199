"""Admission arithmetic: no task skipped, none repeated within a pass, weights hold over what counts."""

import pytest
from atropos.contracts.admission import next_environment, permute, room, room_training, task_index
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


SMALL = st.integers(0, 12)


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 12), st.integers(0, 4), SMALL, SMALL, st.integers(0, 200))
def test_room_for_training_never_exceeds_what_may_be_ahead(
    concurrency: int, running: int, batch: int, ahead: int, waiting: int, unpublished: int, wanted: int
) -> None:
    unconsumed = running + waiting
    places = room_training(
        concurrency=concurrency,
        running=running,
        batch=batch,
        ahead=ahead,
        unconsumed=unconsumed,
        unpublished=unpublished,
        wanted=wanted,
    )
    assert places >= 0
    if places:
        assert running + places <= concurrency
        assert unconsumed + unpublished + places <= (ahead + 1) * batch
        assert unconsumed + places <= wanted
    full = running + 1 > concurrency or unconsumed + unpublished + 1 > (ahead + 1) * batch or unconsumed + 1 > wanted
    assert (places == 0) == full


@given(st.data(), st.integers(1, 4), st.integers(0, 3), st.integers(1, 5), st.integers(1, 12), st.integers(0, 6))
def test_a_run_takes_all_its_steps_whatever_becomes_of_its_groups(
    data: st.DataObject, batch: int, ahead: int, steps: int, concurrency: int, losses: int
) -> None:
    """Groups are admitted, end in any order as usable or lost, are trained on and published: with nothing admitted
    beyond the bound, nothing beyond what is needed, and never a standstill."""
    running = sealed = leased = unpublished = 0
    committed = consumed = lost = admitted = 0
    for _ in range(2000):
        places = room_training(
            concurrency=concurrency,
            running=running,
            batch=batch,
            ahead=ahead,
            unconsumed=running + sealed + leased,
            unpublished=unpublished,
            wanted=(steps - committed) * batch,
        )
        moves = ["admit"] * (places > 0) + ["seal"] * (running > 0) + ["publish"] * (unpublished > 0)
        moves += ["lease"] * (sealed >= batch and not leased) + ["commit"] * (leased > 0)
        moves += ["lose"] * (running > 0 and lost < losses) + ["stale"] * (sealed > 0 and lost < losses)
        if not moves:
            break
        move = data.draw(st.sampled_from(moves))
        if move == "admit":
            running, admitted = running + places, admitted + places
        elif move == "seal":
            running, sealed = running - 1, sealed + 1
        elif move == "lose":
            running, lost = running - 1, lost + 1
        elif move == "stale":
            sealed, lost = sealed - 1, lost + 1
        elif move == "lease":
            sealed, leased = sealed - batch, batch
        elif move == "commit":
            leased, unpublished, consumed, committed = 0, unpublished + batch, consumed + batch, committed + 1
        else:
            unpublished = 0
        assert running <= concurrency
        assert running + sealed + leased + unpublished <= (ahead + 1) * batch
        assert admitted <= steps * batch + lost
    assert (committed, consumed, admitted) == (steps, steps * batch, steps * batch + lost)
