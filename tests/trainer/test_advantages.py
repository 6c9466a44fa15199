"""Advantages: the table they are specified by, and what holds for any rewards."""

import subprocess
import sys
from math import fsum, inf, nan

import pytest
from atropos.contracts.training import Preset
from atropos.trainer.advantages import advantages, grpo, has_signal
from hypothesis import given
from hypothesis import strategies as st

GRID = st.integers(-64, 64).map(lambda n: n / 16)
"""Sums and differences of these are exact."""


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        ([1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, None, 0], [0.707106, 0, -0.707106]),
        ([1, 1, None], [0, 0, 0]),
        ([1, None, None], [0, 0, 0]),
        ([None, None], [0, 0]),
        ([3], [0]),
        ([], []),
    ],
)
def test_grpo_gives_the_values_it_is_specified_by(rewards: list[float | None], expected: list[float]) -> None:
    assert grpo(rewards) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "rewards",
    [[0.1] * 8, [0.1] * 3, [0.7] * 7, [1e17 + 64] * 5, [0.1 + 0.2, 0.3], [None, 0.1, 0.1, 0.1], [-0.1] * 6, [0.0] * 4],
)
def test_equal_rewards_give_exactly_nothing(rewards: list[float | None]) -> None:
    assert grpo(rewards) == [0.0] * len(rewards)
    assert not has_signal(Preset.GRPO, rewards)


def test_small_differences_are_differences() -> None:
    assert has_signal(Preset.GRPO, [0.5, 0.5 + 1e-6])
    assert has_signal(Preset.GRPO, [0.0, None, 1.0])


@given(st.lists(st.one_of(st.none(), GRID), max_size=12), GRID)
def test_a_constant_added_to_all_rewards_changes_nothing(rewards: list[float | None], shift: float) -> None:
    shifted = [None if reward is None else reward + shift for reward in rewards]
    assert grpo(shifted) == pytest.approx(grpo(rewards), abs=1e-9)


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=12))
def test_advantages_are_centred_and_of_unit_spread_or_nothing(rewards: list[float | None]) -> None:
    found = grpo(rewards)
    assert len(found) == len(rewards)
    assert abs(fsum(found)) < 1e-6
    assert all(value == 0 for value, reward in zip(found, rewards, strict=True) if reward is None)
    votes = sum(reward is not None for reward in rewards)
    assert fsum(value**2 for value in found) <= votes - 1 + 1e-9 or not any(found)


@given(st.lists(st.one_of(st.none(), GRID), max_size=12))
def test_members_without_a_reward_might_as_well_not_be_there(rewards: list[float | None]) -> None:
    alone = iter(grpo([reward for reward in rewards if reward is not None]))
    assert grpo(rewards) == [0.0 if reward is None else next(alone) for reward in rewards]


@given(st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), max_size=8))
def test_there_is_signal_where_an_advantage_is(rewards: list[float | None]) -> None:
    assert has_signal(Preset.GRPO, rewards) == any(value != 0 for value in advantages(Preset.GRPO, rewards))


@pytest.mark.parametrize("wrong", [nan, inf, -inf])
def test_a_reward_that_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="a reward is"):
        grpo([0.0, wrong])


@pytest.mark.parametrize("module", ["advantages", "learner", "checkpoint"])
def test_what_other_workers_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, atropos.trainer.{module}; print(*{{'torch', 'transformers', 'numpy'}} & {{*sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
