"""Files that grow over several lives of a command, and appear whole.

Invariant: rows go to FILE.part, and FILE.export.json says what was asked for and up to where the part holds; what a
part has beyond that is cut off when the command goes on. FILE itself appears by one rename once every row is in it, and
one that is there is not replaced unasked. A lock on the part keeps a second command out for as long as the first one
lives, however that ends.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final

from ..contracts.text import printable
from .errors import CommandError

CHECKPOINT_S: Final = 1.0
"""Seconds of work that a kill may cost."""


@dataclass(frozen=True)
class Note:
    """How far an export is."""

    asked: dict[str, Any]
    """What decides which rows are in it and how they look."""
    as_of: str = ""
    """The moment of the store that it shows."""
    total: int = 0
    """Rows it will have."""
    rows: int = 0
    """Rows that are written."""
    last: list[Any] = field(default_factory=list)
    """Key of the last of them."""
    sizes: list[int] = field(default_factory=list)
    """Bytes that they take in each file."""
    counts: dict[str, int] = field(default_factory=dict)
    """What else is known of them."""
    inodes: list[int] = field(default_factory=list)
    """Of the files that were about to get their names."""

    @property
    def begun(self) -> bool:
        return bool(self.as_of)

    @property
    def full(self) -> bool:
        return self.begun and self.rows == self.total


class Complete(Exception):
    """The file is there, from this very command."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.note = note


Finish = Callable[[Path, Path, Note], None]
"""Makes the second file of the first, which is a full part."""


class Parts:
    """The parts of an export while they are locked. `note` says what is in them."""

    def __init__(self, files: list[IO[bytes]], outs: list[Path], note: Note) -> None:
        self._files, self.outs, self.note = files, outs, note
        self._saved = 0.0

    def begin(self, as_of: str, total: int) -> None:
        """Fix what the export is of, before its first row."""
        self.save(as_of=as_of, total=total, sizes=[0] * len(self._files))

    def write(self, file: int, line: bytes, key: tuple[Any, ...], **counts: int) -> None:
        """A row more. It counts once it is saved."""
        self._files[file].write(line)
        note = self.note
        note.sizes[file] += len(line)
        for name, count in counts.items():
            note.counts[name] = note.counts.get(name, 0) + count
        self.note = replace(note, rows=note.rows + 1, last=list(key))
        if time.monotonic() - self._saved > CHECKPOINT_S:
            self.save()

    def save(self, **changes: Any) -> None:
        """What was written until here is kept, whatever happens next."""
        self.note = replace(self.note, **changes)
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        at = note_of(self.outs[0])
        made = at.with_name(f"{at.name}.new")
        with made.open("w", encoding="utf-8") as note:
            json.dump(asdict(self.note), note, ensure_ascii=False, indent=1)
            note.flush()
            os.fsync(note.fileno())
        made.replace(at)
        self._saved = time.monotonic()

    def discard(self) -> None:
        """Leave no trace: nothing fits."""
        for path in (*map(part_of, self.outs), note_of(self.outs[0])):
            path.unlink(missing_ok=True)


def outputs(out: Path, tested: bool) -> list[Path]:
    """The file, and that of the rows for testing beside it."""
    return [out, out.with_name(f"{out.stem}-test{out.suffix}")] if tested else [out]


def note_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.export.json")


def part_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.part")


@contextmanager
def opened_parts(outs: list[Path], asked: dict[str, Any], force: bool) -> Iterator[Parts]:
    """The parts of these files, where they were left by the same command, or new ones.

    Raises Complete where the files are there, from the same command; CommandError where they, or parts of another
    command, must not be replaced, or where another process writes them.
    """
    for one in outs:
        _check_target(one)
    part, at = part_of(outs[0]), note_of(outs[0])
    _check_finished(outs, asked, force, part.exists())
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_locked(part, outs[0]))]
        note = _read_note(at)
        begun = part.stat().st_size > 0 or (note is not None and note.rows > 0 and not note.full)
        try:
            _check_finished(outs, asked, force, begun)  # another one may have finished it just now
            if begun and not force and (note is None or not note.begun):
                raise CommandError(
                    f"{part} is there already and no export's; name another --out, or overwrite it with --force."
                )
            if begun and not force and note is not None and note.asked != asked:
                raise _another(part, note)
        except (Complete, CommandError):
            if not begun:
                part.unlink()
            raise
        held = [part_of(one).stat().st_size if part_of(one).exists() else 0 for one in outs]
        if note is None or note.asked != asked or not _is_held(note, outs, held):
            note = Note(asked)
        if not note.full:
            files += [stack.enter_context(_opened(part_of(one))) for one in outs[1:]]
            for file, size in zip(files, note.sizes or [0] * len(files), strict=True):
                file.truncate(size)
                file.seek(size)
        yield Parts(files, outs, note)


def publish(parts: Parts, finish: Finish | None, force: bool) -> None:
    """Give full parts their names, the main file last, through `finish` where they are of another format."""
    parts.save()
    ready = []
    for out in parts.outs:
        ready.append(part_of(out) if finish is None else out.with_name(f"{out.name}.part.new"))
        if finish is not None and not _is_ours(out, parts.note, parts.outs):
            finish(part_of(out), ready[-1], parts.note)
    before = parts.note.inodes or [0] * len(ready)
    parts.save(
        inodes=[path.stat().st_ino if path.exists() else inode for path, inode in zip(ready, before, strict=True)]
    )
    for out, path in reversed(list(zip(parts.outs, ready, strict=True))):
        if path.exists():
            if not force and out.exists():
                raise there(out)
            path.replace(out)
        part_of(out).unlink(missing_ok=True)


def there(out: Path) -> CommandError:
    return CommandError(f"{out} is there already; name another --out, or overwrite it with --force.")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """An error of the system as a sentence."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{what} cannot be written: {error.strerror}.") from None


def _check_target(out: Path) -> None:
    if out.is_dir():
        raise CommandError(f"{out} is a folder; --out names a file in it, or - for standard output.")
    if out.exists() and not out.is_file():
        raise CommandError(f"{out} is no file that could be replaced; name another --out.")


def _check_finished(outs: list[Path], asked: dict[str, Any], force: bool, waiting: bool) -> None:
    """Nothing to do, or nothing that may be done, where the files are there. `waiting`: so is a part."""
    note = _read_note(note_of(outs[0]))
    same = note is not None and note.full and note.asked == asked
    if note is not None and same and not force and not waiting and all(one.exists() for one in outs):
        raise Complete(note)
    for one in outs:
        if one.exists() and not force and not (note is not None and same and _is_ours(one, note, outs)):
            raise there(one)


def _is_held(note: Note, outs: list[Path], held: list[int]) -> bool:
    """All that the note speaks of is there, in parts or in files that have their names already."""
    sizes = note.sizes or [0] * len(outs)
    return len(sizes) == len(outs) and all(
        have >= size or (note.full and _is_ours(one, note, outs))
        for one, have, size in zip(outs, held, sizes, strict=True)
    )


def _is_ours(out: Path, note: Note, outs: list[Path]) -> bool:
    """The file got its name from the export of the note, which a kill kept from ending."""
    inode = dict(zip(outs, note.inodes, strict=False)).get(out)
    return out.exists() and out.stat().st_ino == inode


def _another(part: Path, note: Note) -> CommandError:
    return CommandError(
        f"{part} holds {note.rows} of {note.total} rows of an export that was asked for otherwise: repeat that command "
        f"to finish it ({printable(json.dumps(note.asked, ensure_ascii=False))}), name another --out, or start anew "
        "with --force."
    )


@contextmanager
def _locked(part: Path, out: Path) -> Iterator[IO[bytes]]:
    while True:
        with _opened(part) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CommandError(
                    f"{out} is being written by another export; wait for it, or name another --out."
                ) from None
            # Whoever held the lock may have renamed the part meanwhile: then this is the finished file.
            if part.exists() and part.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield file
                return


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        yield file


def _read_note(at: Path) -> Note | None:
    try:
        return Note(**json.loads(at.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
