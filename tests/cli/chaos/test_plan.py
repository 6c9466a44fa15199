"""Which component dies when is decided by the seed alone."""

from itertools import pairwise

from atropos.cli.chaos.conductor import KNOWN
from atropos.cli.chaos.plan import CELLS, Component, plan
from atropos.cli.stack.apps import WORKERS
from hypothesis import given
from hypothesis import strategies as st

SEEDS = st.integers(min_value=0, max_value=2**31 - 1)


@given(SEEDS, st.integers(min_value=1, max_value=200))
def test_every_cell_is_killed_once_in_the_order_of_steps(seed: int, steps: int) -> None:
    planned = plan(seed, steps)
    assert sorted(one.cell.part + one.cell.moment for one in planned) == sorted(c.part + c.moment for c in CELLS)
    assert all(before.step <= after.step for before, after in pairwise(planned))
    assert all(0 <= one.step < max(2, steps) and 0 <= one.delay < 1 for one in planned)


@given(SEEDS)
def test_with_steps_enough_no_two_kills_fall_on_the_same_one(seed: int) -> None:
    steps = [one.step for one in plan(seed, 60)]
    assert len(set(steps)) == len(CELLS)
    assert steps[-1] <= 54


def test_a_seed_makes_the_same_plan_again_and_another_makes_another() -> None:
    assert plan(3, 60) == plan(3, 60)
    assert len({tuple(one.cell.part for one in plan(seed, 60)) for seed in range(20)}) > 10


def test_every_kind_of_component_has_a_trap_and_a_proof() -> None:
    assert {cell.component for cell in CELLS} == set(Component)
    assert {(cell.component, cell.moment) for cell in CELLS} == set(KNOWN)
    assert {cell.part for cell in CELLS} == {*WORKERS, "engine", "temporal", "postgres"}
