"""Notes of what runs: the dead leave theirs, the living and the orderly none, and of two successors one reads them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from atropos.activities.leftovers import Notes, left_by_the_dead, remember, remembered
from hypothesis import given
from hypothesis import strategies as st

_DIES = """
import os, signal, sys, threading
from contextlib import suppress
from pathlib import Path
from atropos.activities.leftovers import Notes
notes = Notes.begin(Path(sys.argv[1]), "owner")
with notes.note(["over"]):
    print("inside", flush=True)
first = notes.note(["first", 1])
second = notes.note(["s\\u00e9cond"])
first.__enter__()
second.__enter__()
with notes.note(["x" * 2000]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def die(folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", _DIES, str(folder)], check=False)
    assert ended.returncode == -signal.SIGKILL


def left(folder: Path, owner: str = "owner") -> list[list[Any]]:
    with left_by_the_dead(folder, owner) as found:
        return [running for _, running in found]


def test_a_process_that_was_killed_leaves_what_ran_in_it(tmp_path: Path) -> None:
    die(tmp_path)
    assert left(tmp_path, "somebody else") == []
    assert left(tmp_path) == [[["first", 1], ["sécond"]]]
    assert left(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_living_are_not_read(tmp_path: Path) -> None:
    notes = Notes.begin(tmp_path / "inline", "owner")
    with notes.note(["mine"]):
        assert left(tmp_path / "inline") == []
    notes.close()


def test_an_orderly_end_leaves_nothing(tmp_path: Path) -> None:
    first, second = (Notes.begin(tmp_path / "inline", "owner") for _ in range(2))
    with first.note(["ended before"]):
        assert len(list((tmp_path / "inline").iterdir())) == 2
    first.close()
    assert left(tmp_path / "inline") == []
    second.close()
    assert os.listdir(tmp_path / "inline") == []


def test_what_could_not_be_recorded_is_read_again(tmp_path: Path) -> None:
    die(tmp_path)
    with suppress(ConnectionError), left_by_the_dead(tmp_path, "owner") as found:
        assert len(list(found)) == 1
        raise ConnectionError
    assert len(left(tmp_path)) == 1


def test_of_two_successors_one_reads(tmp_path: Path) -> None:
    die(tmp_path)
    with left_by_the_dead(tmp_path, "owner") as mine:
        assert len(list(mine)) == 1
        assert left(tmp_path) == []
    assert os.listdir(tmp_path) == []


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.text(max_size=4), max_size=3))))
def test_what_is_remembered_is_there_in_order_for_its_owner_alone(facts: list[tuple[str, list[str]]]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for owner, fact in facts:
            remember(folder, owner, fact)
        for owner in "abc":
            assert remembered(folder, owner) == [fact for whose, fact in facts if whose == owner]
        assert left(folder, "a") == []


def test_a_fact_that_was_cut_short_hides_no_other(tmp_path: Path) -> None:
    remember(tmp_path, "owner", ["whole"])
    with (tmp_path / "kept-owner").open("a") as file:
        file.write('["ha\n')
    remember(tmp_path, "owner", ["later"])
    assert remembered(tmp_path, "owner") == [["whole"], ["later"]]
