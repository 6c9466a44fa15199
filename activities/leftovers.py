"""What runs in this process, written where its successor finds it.

Invariant: a file here belongs to a living process (which holds its lock, released by the kernel however it dies) or
is what a dead one left. A process that ends in good order leaves none. A note costs one write into the page cache,
microseconds: it survives the process, and the machine need not survive. What is remembered here is what no row can
hold; it is only ever added to.
"""

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_log = logging.getLogger(__name__)
_NOTE: Final = 1024
"""Bytes of one note; what is longer is not noted."""
_NOTHING: Final = b"\0"


class Notes:
    """The notes of this process: one slot of its file for each thing that runs now."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._slots = 0
        self._free: list[int] = []

    @classmethod
    def begin(cls, folder: Path, owner: str) -> "Notes":
        """A new file, locked before others can see it. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{owner}-{os.getpid()}-{secrets.token_hex(4)}"
        hidden = path.with_name(f".{path.name}")
        descriptor = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        hidden.rename(path)
        return cls(path, descriptor)

    @contextmanager
    def note(self, facts: Sequence[Any]) -> Iterator[None]:
        """Say so while the block runs."""
        text = json.dumps(facts).encode()
        if len(text) > _NOTE:
            yield
            return
        if not self._free:
            self._free.append(self._slots)
            self._slots += 1
        slot = self._free.pop()
        os.pwrite(self._descriptor, text.ljust(_NOTE, _NOTHING), slot * _NOTE)
        try:
            yield
        finally:
            os.pwrite(self._descriptor, _NOTHING, slot * _NOTE)
            self._free.append(slot)

    def close(self) -> None:
        """The process ends in good order."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


@contextmanager
def left_by_the_dead(folder: Path, owner: str) -> Iterator[Iterator[tuple[str, list[Any]]]]:
    """Files of `owner`'s dead processes, each as its name and what ran: gone once the block has ended without error."""
    held: list[tuple[Path, int]] = []
    try:
        yield _read(folder, owner, held)
        for path, _ in held:
            path.unlink(missing_ok=True)
    finally:
        for _, descriptor in held:
            os.close(descriptor)


def _read(folder: Path, owner: str, held: list[tuple[Path, int]]) -> Iterator[tuple[str, list[Any]]]:
    for path in sorted(folder.glob(f"{owner}-*")):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:  # another successor was quicker
            continue
        held.append((path, descriptor))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.pop()
            os.close(descriptor)  # its process lives, or another successor is reading it
            continue
        if os.fstat(descriptor).st_nlink:  # else it was read and removed between our two steps
            yield path.name, list(_notes(path.read_bytes()))


def _notes(data: bytes) -> Iterator[Any]:
    for start in range(0, len(data), _NOTE):
        text = data[start : start + _NOTE]
        if text[:1] == _NOTHING:
            continue
        try:
            yield json.loads(text.rstrip(_NOTHING))
        except ValueError:
            _log.warning("a note of a worker that died cannot be read")


def remember(folder: Path, owner: str, facts: Sequence[Any]) -> None:
    """Keep a fact for all successors. Raises OSError."""
    with _remembered(folder, owner).open("a") as file:
        file.write(json.dumps(facts) + "\n")


def remembered(folder: Path, owner: str) -> list[Any]:
    """What was kept, in order. Raises OSError."""
    try:
        lines = _remembered(folder, owner).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [fact for line in lines if (fact := _fact(line)) is not None]


def _fact(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        _log.warning("a fact that was kept by a worker cannot be read")
        return None


def _remembered(folder: Path, owner: str) -> Path:
    return folder / f"kept-{owner}"
