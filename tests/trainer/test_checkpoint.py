"""Checkpoints exist whole or not at all, and a torn one is refused."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from atropos.trainer import checkpoint
from atropos.trainer.problem import TrainerProblem


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"1234" * 1000)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "state").write_text("version 3")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def written(tmp_path: Path) -> Path:
    checkpoint.write(tmp_path / "step-3", fill)
    return tmp_path / "step-3"


def test_what_is_written_is_verified_under_the_same_hash(tmp_path: Path) -> None:
    digest = checkpoint.write(tmp_path / "runs" / "step-3", fill)
    assert checkpoint.verify(tmp_path / "runs" / "step-3") == digest
    assert names(tmp_path / "runs") == ["step-3"]
    assert names(tmp_path / "runs" / "step-3") == ["manifest.json", "trainer", "weights"]


def test_the_hash_depends_on_content_and_names_alone(tmp_path: Path, written: Path) -> None:
    def other_name(folder: Path) -> None:
        fill(folder)
        (folder / "weights").rename(folder / "weight")

    def other_content(folder: Path) -> None:
        fill(folder)
        (folder / "weights").write_bytes(b"1235" * 1000)

    digest = checkpoint.verify(written)
    assert checkpoint.write(tmp_path / "elsewhere", fill) == digest
    others = {checkpoint.write(tmp_path / "a", other_name), checkpoint.write(tmp_path / "b", other_content)}
    assert len({digest, *others}) == 3


def test_the_same_content_again_keeps_the_folder_that_is_there(written: Path) -> None:
    before = (written / "weights").stat()
    assert checkpoint.write(written, fill) == checkpoint.verify(written)
    assert (written / "weights").stat().st_ino == before.st_ino
    assert names(written.parent) == ["step-3"]


def test_other_content_under_the_same_name_is_refused_and_leaves_the_first(written: Path) -> None:
    def other(folder: Path) -> None:
        (folder / "weights").write_bytes(b"other")

    digest = checkpoint.verify(written)
    with pytest.raises(TrainerProblem, match="already holds another checkpoint"):
        checkpoint.write(written, other)
    assert checkpoint.verify(written) == digest
    assert names(written.parent) == ["step-3"]


def test_of_two_writers_at_once_both_get_the_hash(tmp_path: Path) -> None:
    digests = []

    def slow(folder: Path) -> None:
        fill(folder)
        digests.append(checkpoint.write(tmp_path / "step-3", fill))

    digests.append(checkpoint.write(tmp_path / "step-3", slow))
    assert digests == [checkpoint.verify(tmp_path / "step-3")] * 2
    assert names(tmp_path) == ["step-3"]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda folder: os.truncate(folder / "weights", 3999), "weights has changed"),
        (lambda folder: (folder / "weights").write_bytes(b"1234" * 999 + b"1235"), "weights has changed"),
        (lambda folder: (folder / "weights").unlink(), "weights is missing"),
        (lambda folder: (folder / "trainer" / "state").unlink(), "trainer/state is missing"),
        (lambda folder: (folder / "more").write_text(""), "more is not part of it"),
        (lambda folder: (folder / "manifest.json").unlink(), "not a whole checkpoint"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not a whole checkpoint"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "not a whole checkpoint"),
    ],
)
def test_a_torn_or_changed_checkpoint_is_refused(written: Path, harm: Callable[[Path], object], reason: str) -> None:
    harm(written)
    with pytest.raises(TrainerProblem, match=reason):
        checkpoint.verify(written)


def test_a_folder_that_is_not_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TrainerProblem, match="not a whole checkpoint"):
        checkpoint.verify(tmp_path / "nowhere")


def test_hidden_files_that_others_leave_do_not_matter(written: Path) -> None:
    digest = checkpoint.verify(written)
    (written / ".DS_Store").write_text("looked at")
    assert checkpoint.verify(written) == digest


def test_everything_is_on_disk_before_the_name_appears_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []

    def sync(path: Path) -> None:
        name = path.relative_to(tmp_path).as_posix()
        synced.append((name.partition("/")[2] if "/" in name else "", (tmp_path / "step-3").exists()))

    monkeypatch.setattr(checkpoint, "_sync", sync)
    checkpoint.write(tmp_path / "step-3", fill)
    *before, last = synced
    assert sorted(before) == [(name, False) for name in ("", "manifest.json", "trainer", "trainer/state", "weights")]
    assert last == ("", True)


def test_a_failure_while_filling_leaves_nothing(tmp_path: Path) -> None:
    def breaks(folder: Path) -> None:
        fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.write(tmp_path / "step-3", breaks)
    assert names(tmp_path) == []


CRASH = """
import os, sys
from pathlib import Path
from atropos.trainer import checkpoint

def fill(folder):
    (folder / "weights").write_bytes(b"12")
    if sys.argv[2] == "filling":
        os._exit(9)

if sys.argv[2] == "sealing":
    checkpoint._sync = lambda path: os._exit(9)
checkpoint.write(Path(sys.argv[1]), fill)
"""


@pytest.mark.parametrize("when", ["filling", "sealing"])
def test_a_crash_while_writing_leaves_no_checkpoint_but_something_to_sweep(tmp_path: Path, when: str) -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path / "step-3"), when], check=False)
    assert ended.returncode == 9
    assert not (tmp_path / "step-3").exists()
    (left,) = checkpoint.leftovers(tmp_path)
    assert left.name.startswith(".step-3.partial-")
    checkpoint.write(tmp_path / "step-3", fill)
    assert checkpoint.leftovers(tmp_path) == [left]


def test_removing_leaves_nothing_and_may_be_repeated(written: Path) -> None:
    checkpoint.remove(written)
    assert names(written.parent) == []
    checkpoint.remove(written)


def test_an_interrupted_removal_is_no_checkpoint_and_gets_swept(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.remove(written)
    assert not written.exists()
    (left,) = written.parent.iterdir()
    assert checkpoint.leftovers(written.parent) == []  # this process lives
    an_hour_ago = time.time() - 3700
    for path in (*left.rglob("*"), left):
        os.utime(path, (an_hour_ago, an_hour_ago))
    assert checkpoint.leftovers(written.parent) == [left]


def test_what_is_being_written_is_no_leftover(tmp_path: Path) -> None:
    seen = []

    def looks(folder: Path) -> None:
        fill(folder)
        seen.extend(checkpoint.leftovers(tmp_path))

    checkpoint.write(tmp_path / "step-3", looks)
    assert seen == []
    assert checkpoint.leftovers(tmp_path) == []
    assert checkpoint.leftovers(tmp_path / "nowhere") == []


def test_a_writer_on_another_machine_is_left_its_hour(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    partial = tmp_path / f".step-3.partial-{int(dead.stdout)}-{'0' * 16}"
    partial.mkdir()
    assert checkpoint.leftovers(tmp_path) == []
    an_hour_ago = time.time() - 3700
    os.utime(partial, (an_hour_ago, an_hour_ago))
    assert checkpoint.leftovers(tmp_path) == [partial]
