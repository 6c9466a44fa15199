"""The transition table: terminal states stay, and every change is an arrow of the table."""

from enum import StrEnum

import pytest
from atropos.contracts.states import (
    OPEN_GROUPS,
    TRANSITIONS,
    BatchState,
    EngineState,
    EpisodeState,
    EvaluationState,
    GroupState,
    IllegalTransition,
    PublicationState,
    RunState,
    check_transition,
    sources,
)
from hypothesis import given
from hypothesis import strategies as st

KINDS: list[type[StrEnum]] = [
    RunState,
    GroupState,
    EpisodeState,
    EngineState,
    EvaluationState,
    BatchState,
    PublicationState,
]
ALL = [state for kind in KINDS for state in kind]


def test_every_state_has_its_row_in_the_table() -> None:
    assert {kind: set(rows) for kind, rows in TRANSITIONS.items()} == {kind: set(kind) for kind in KINDS}


@given(st.sampled_from(ALL), st.sampled_from(ALL))
def test_sources_and_the_check_agree(old: StrEnum, new: StrEnum) -> None:
    if type(old) is type(new) and old in sources(new):
        check_transition(old, new)
    else:
        with pytest.raises(IllegalTransition):
            check_transition(old, new)


@pytest.mark.parametrize(
    "state",
    [
        RunState.COMPLETED,
        RunState.CANCELLED,
        GroupState.TRAINED,
        GroupState.FAILED,
        EpisodeState.FAILED,
        BatchState.COMMITTED,
    ],
)
def test_what_has_ended_stays_ended(state: StrEnum) -> None:
    assert not TRANSITIONS[type(state)][state]


def test_states_of_two_kinds_that_are_spelt_alike_keep_their_own_arrows() -> None:
    assert RunState.RUNNING.value == GroupState.RUNNING.value
    assert sources(EpisodeState.FAILED) == {EpisodeState.RUNNING, EpisodeState.DONE}
    assert sources(RunState.PAUSED) == {RunState.RUNNING}
    with pytest.raises(IllegalTransition):
        check_transition(RunState.RUNNING, GroupState.SEALED)


def test_a_group_cannot_be_trained_twice_or_without_a_lease() -> None:
    assert sources(GroupState.TRAINED) == {GroupState.LEASED}
    assert not OPEN_GROUPS & sources(GroupState.TRAINED)
