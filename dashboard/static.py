"""A run or an episode as a folder of pages that need no server, no scripts and no network.

Invariant: a folder appears whole or not at all, and only a folder that this wrote before, with nothing else in it, is
replaced; one that appeared while pages were being written is another's, and stays. Of two that write to one place at
once the second is refused.
"""

import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..contracts.ids import EpisodeKey
from ..db.overview import group_lines, run_figures
from ..db.runs import RunRow
from ..db.store import Store
from .html import FileLinks, document, episode_file, fragment, group_file
from .reading import read_episode, read_group

MARK: Final = ".atropos-view"
"""The file by which a folder is known as one of ours."""
_FOLDERS: Final = ("groups", "episodes")

Told = Callable[[int, int], None]
"""Told how many episodes of how many are written."""


class ForeignFolder(Exception):
    """The folder holds what this did not write; one sentence for people."""


async def write_run(store: Store, run: RunRow, folder: Path, most_groups: int, told: Told) -> int:
    """Write an index, the newest groups and their episodes; how many episodes. Raises ForeignFolder or OSError."""
    lines = await group_lines(store, run.run_id, most_groups + 1)
    shown, older = lines[:most_groups], len(lines) > most_groups
    episodes = [line.episode(member) for line in shown for member in line.members]
    groups, known = frozenset(line.key.group_no for line in shown), frozenset(episodes)
    figures = (await run_figures(store, [run.run_id]))[run.run_id]
    with replaced(folder) as fresh:
        for name in _FOLDERS:
            (fresh / name).mkdir()
        top, below = FileLinks(groups, known), FileLinks(groups, known, depth=1)
        index = fragment("index.html", top, run=run, figures=figures, lines=shown, older=older)
        _write(fresh / "index.html", f"{run.run_id}", index)
        for line in shown:
            page = await read_group(store, below, line.key)
            _write(fresh / group_file(line.key), f"group {line.key.group_no} of {run.run_id}", page.html)
        for count, key in enumerate(episodes, 1):
            page = await read_episode(store, below, key)
            _write(fresh / episode_file(key), key.workflow_id, page.html)
            told(count, len(episodes))
    return len(episodes)


async def write_episode(store: Store, key: EpisodeKey, folder: Path) -> None:
    """Write one episode as the folder's only page. Raises Unknown, ForeignFolder or OSError."""
    page = await read_episode(store, FileLinks(frozenset(), frozenset()), key)
    with replaced(folder) as fresh:
        _write(fresh / "index.html", key.workflow_id, page.html)


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A fresh folder that takes the place of `folder` once the block is over.

    Raises ForeignFolder where that is not the folder any more that was there before the block.
    """
    check_ours(folder)
    folder = folder.absolute()
    before = _identity(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        (fresh / MARK).write_text("Written by `atropos view`, which may replace this folder.\n", encoding="utf-8")
        yield fresh
        fresh.chmod(0o755)
        check_ours(folder)
        _put(fresh, folder, before)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _put(fresh: Path, folder: Path, before: tuple[int, int] | None) -> None:
    """Rename `fresh` to `folder` where that is still what it was: renames tell, where a look would come too early."""
    elsewhere = ForeignFolder(f"{folder} was written by another `atropos view` meanwhile; name another folder.")
    old = fresh.with_name(f"{fresh.name}.old")
    if before is not None:
        try:
            folder.rename(old)
        except FileNotFoundError:
            raise elsewhere from None
        if _identity(old) != before:
            old.rename(folder)
            raise elsewhere
    try:
        fresh.rename(folder)  # fails on a folder that is not empty
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            if before is not None:
                old.rename(folder)
            raise
        raise elsewhere from None
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from another one of the same name; None where there is none."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def check_ours(folder: Path) -> None:
    """Raise ForeignFolder where something would be lost that this did not write."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ForeignFolder(f"{folder} is no folder; name another one.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / MARK).is_file():
        raise ForeignFolder(f"{folder} is not empty and was not written by `atropos view`; name another folder.")
    for found in folder.rglob("*"):
        place = found.relative_to(folder).parts
        page = found.suffix == ".html" and (len(place) == 1 or place[0] in _FOLDERS) and not found.is_symlink()
        if not (place == (MARK,) or (len(place) == 1 and place[0] in _FOLDERS and found.is_dir()) or page):
            raise ForeignFolder(
                f"{folder} holds {found.name}, which `atropos view` did not write; name another folder."
            )


def _write(path: Path, title: str, body: str) -> None:
    path.write_text(document(title, body), encoding="utf-8")
