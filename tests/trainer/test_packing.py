"""Rows and micro-batches: nothing is lost, nothing is trained twice, and the budget holds."""

from dataclasses import replace

import pytest
import torch
from atropos.contracts.training import Preset
from atropos.trainer.packing import pad, plan, rows_of
from atropos.trainer.problem import TrainerProblem
from hypothesis import given
from hypothesis import strategies as st

from .batches import group_of, random_groups, segment_of


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(1, 200))
def test_a_plan_takes_each_row_once_and_keeps_to_the_budget(lengths: list[int], budget: int) -> None:
    parts = plan(lengths, budget)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        width = max(lengths[index] for index in part)
        assert len(part) == 1 or width * len(part) <= budget
    widths = [lengths[index] for part in parts for index in part]
    assert widths == sorted(widths, reverse=True)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 200))
def test_a_plan_leaves_no_room_unused(lengths: list[int], budget: int) -> None:
    for part in plan(lengths, budget)[:-1]:
        assert (len(part) + 1) * lengths[part[0]] > budget


def test_rows_follow_their_place_in_the_run_and_carry_their_advantage() -> None:
    first, second, quiet = segment_of([1, 2, 3], [0, 1, 1]), segment_of([4, 5], [0, 1]), segment_of([6, 7], [0, 0])
    groups = [
        group_of(9, [0.0, 1.0], [first, (second, quiet, first)]),
        group_of(2, [1.0, None, 3.0, 2.0], [first, second, second, quiet]),
    ]
    rows = rows_of(groups, Preset.GRPO)
    assert [row.place for row in rows] == [(2, 0, 0), (2, 2, 0), (9, 0, 0), (9, 1, 0), (9, 1, 2)]
    assert [row.advantage for row in rows] == pytest.approx([-1, 1, -0.707106, 0.707106, 0.707106], abs=1e-5)
    assert [row.tokens for row in rows] == [2, 1, 2, 1, 2]
    assert rows_of(groups[::-1], Preset.GRPO) == rows


def test_padding_is_on_the_right_and_trains_nothing() -> None:
    long, short = segment_of([5, 6, 7, 8], [0, 1, 0, 1], temperature=0.5), segment_of([9, 3], [0, 1])
    batch = pad(rows_of([group_of(0, [0.0, 2.0], [long, short])], Preset.GRPO))
    assert batch.ids_BT.tolist() == [[5, 6, 7, 8], [9, 3, 0, 0]]
    assert batch.trained_BT.tolist() == [[False, True, False, True], [False, True, False, False]]
    assert batch.temperatures_BT[batch.trained_BT].tolist() == [0.5, 0.5, 1]
    assert batch.advantages_BT.tolist() == [pytest.approx([-0.707106] * 4), pytest.approx([0.707106] * 4)]
    assert torch.equal(batch.behaviour_BT[batch.trained_BT], torch.full((3,), -0.6931))


def test_numbers_at_tokens_that_do_not_train_are_not_looked_at() -> None:
    odd = replace(
        segment_of([5, 6, 7], [0, 0, 1]), logprobs=[float("nan"), float("inf"), -1.0], temperatures=[0.0, -1.0, 1.0]
    )
    assert len(rows_of([group_of(0, [0.0, 1.0], [odd, odd])], Preset.GRPO)) == 2


def test_a_reward_that_is_no_number_names_its_group() -> None:
    with pytest.raises(TrainerProblem, match=r"group 4 \(toy\).*a reward is nan"):
        rows_of([group_of(4, [0.0, float("nan")], [segment_of([1, 2], [0, 1])] * 2)], Preset.GRPO)


@given(st.integers(0, 1000))
def test_every_token_that_trains_is_in_exactly_one_row(seed: int) -> None:
    groups = random_groups(seed)
    expected = sum(sum(part.mask) for group in groups for one in group.episodes for part in one.segments)
    assert sum(row.tokens for row in rows_of(groups, Preset.GRPO)) == expected
