"""What the journal of the engine says was sampled, and what twice."""

import json
from collections import Counter
from pathlib import Path

import pytest
from atropos.cli.chaos.journal import Journal
from atropos.contracts.ids import EpisodeKey
from hypothesis import given
from hypothesis import strategies as st

RUN = "run/sampled"
Tried = tuple[int, int, int]
"""A turn, the number of a try of it, and how many tokens that try came to."""
TRIES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 6)), max_size=12, unique_by=lambda one: one[:2]
)


def lines(turn: int, attempt: int, tokens: int, run: str = RUN, member: int = 0) -> list[str]:
    """What one try leaves in the journal."""
    key = EpisodeKey(run_id=run, group_no=1, member=member, attempt=2)
    request = f"{key.workflow_id}/turn/{turn}/try/{attempt}"
    return [
        json.dumps({"request_id": request, "position": at, "token_id": 7, "version": "v", "call": f"{turn}-{attempt}"})
        for at in range(tokens)
    ]


@given(tries=TRIES)
def test_every_position_that_comes_again_is_counted(
    tmp_path_factory: pytest.TempPathFactory, tries: list[Tried]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal(path, RUN)
    path.write_text("".join(f"{line}\n" for one in tries for line in lines(*one)))
    journal.read()
    positions = Counter((turn, at) for turn, _, tokens in tries for at in range(tokens))
    assert journal.resampled() == sum(count - 1 for count in positions.values())
    for turn in {one[0] for one in tries}:
        place = (1, 0, 2, turn)
        assert place in journal.places(without=set())
        assert journal.tries(place) == sum(1 for one in tries if one[0] == turn)
        assert journal.tokens(place) == [tokens for number, _, tokens in tries if number == turn][-1]


def test_only_whole_lines_of_this_run_and_of_its_time_are_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("".join(f"{line}\n" for line in lines(0, 1, 5)))
    journal = Journal(path, RUN)
    more = [*lines(1, 1, 2), *lines(1, 1, 9, run="run/other"), "{half a", '{"request_id": 3}', "[]", *lines(2, 1, 3)]
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in more[:-1]) + more[-1][:20])
    journal.read()
    assert [(place, journal.tokens(place)) for place in journal.places(without=set())] == [
        ((1, 0, 2, 1), 2),
        ((1, 0, 2, 2), 2),
    ]
    with path.open("a") as file:
        file.write(more[-1][20:] + "\n")
    journal.read()
    assert journal.tokens((1, 0, 2, 2)) == 3
    assert journal.places(without={(1, 0, 2, 1)}) == [(1, 0, 2, 2)]
    assert journal.resampled() == 0


def test_a_journal_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", RUN)
    journal.read()
    assert journal.places(without=set()) == []
    assert (journal.tokens((0, 0, 0, 0)), journal.tries((0, 0, 0, 0))) == (0, 0)
