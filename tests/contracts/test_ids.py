"""Ids: a pure function of what they name, and readable back."""

import pytest
from atropos.contracts.ids import EpisodeKey
from hypothesis import given
from hypothesis import strategies as st

names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


@given(names, st.integers(0, 10**9), st.integers(0, 1023), st.integers(0, 9))
def test_an_episode_id_reads_back_as_the_episode(run: str, group: int, member: int, attempt: int) -> None:
    key = EpisodeKey(run_id=run, group_no=group, member=member, attempt=attempt)
    assert EpisodeKey.parse(key.workflow_id) == key
    assert key.group.episode(member, attempt) == key


def test_ids_read_as_a_path() -> None:
    key = EpisodeKey(run_id="run/demo-1", group_no=12, member=3)
    assert key.workflow_id == "run/demo-1/group/12/episode/3"
    assert key.model_copy(update={"attempt": 2}).workflow_id == "run/demo-1/group/12/episode/3/attempt/2"


def test_other_text_is_refused_with_the_expected_form() -> None:
    with pytest.raises(ValueError, match="it looks like run/NAME/group/12/episode/3"):
        EpisodeKey.parse("run/demo-1/group/12")
