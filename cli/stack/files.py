"""The folder of a stack: where each file lies, how files are written, and who may hold it.

Invariants: a reader of one of these files sees the old text or the new, never half of it (temporary file, fsync,
rename, fsync of the folder); one supervisor at a time holds a folder (an flock, released by the kernel when the
holder dies, however it dies).
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import StackError

MIN_FREE_MB = 500
"""Less than this and Postgres may not even finish initdb and its first WAL segments."""


class StackHome:
    """Paths below `ATROPOS_HOME`."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.state = self.root / "stack.json"
        self.kept = self.root / "kept.json"
        self.lock = self.root / "stack.lock"
        self.demo_lock = self.root / "demo.lock"
        self.logs = self.root / "logs"
        self.run = self.root / "run"
        self.launched = self.run / "supervisor.json"
        self.temporal_db = self.root / "temporal" / "temporal.db"
        self.temporal_profile = self.root / "temporal.toml"
        self.engine_journal = self.root / "engine" / "journal.jsonl"

    def log(self, part: str) -> Path:
        """The log file of a part."""
        return self.logs / f"{part}.log"

    def prepare(self) -> None:
        """Make the folders. Raises `StackError` where that is impossible or the disk is nearly full."""
        folders = (self.root, *self._folders())
        missing = [folder for folder in folders if not folder.exists()]
        try:
            with explain_os_errors(self.root):
                for folder in folders:
                    folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.root):
                    pass
                free_mb = shutil.disk_usage(self.root).free // 2**20
            if free_mb < MIN_FREE_MB:
                raise StackError(
                    f"Only {free_mb} MB are free where {self.root} lies and the stack needs {MIN_FREE_MB} MB; "
                    "make room or set ATROPOS_HOME to another disk."
                )
        except BaseException:
            _remove_empty(reversed(missing))
            raise

    def tidy(self) -> None:
        """Remove what a start that failed has left empty, unless somebody else is starting here."""
        with suppress(OSError, StackError), hold_lock(self) as held:
            if held:
                self.launched.unlink(missing_ok=True)
                _remove_empty((*self._folders(), self.root / "postgres"))

    def _folders(self) -> tuple[Path, ...]:
        return (self.logs, self.run, self.temporal_db.parent, self.engine_journal.parent)


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def explain_os_errors(where: Path) -> Iterator[None]:
    """Turn a failing file operation into a sentence about `where`."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StackError(f"The disk that holds {where} is full; make room and try again.") from error
        if reason := why_no_folder(where):
            raise StackError(reason) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StackError(
                f"{error.filename or where} is not writable; set ATROPOS_HOME to a folder of yours."
            ) from error
        raise StackError(f"{where} cannot be used ({error.strerror}); set ATROPOS_HOME elsewhere.") from error


def why_no_folder(home: Path) -> str | None:
    """Why nothing can lie below `home`, because it or a folder above it is a file; None where that is not so."""
    file = next((path for path in (home, *home.parents) if path.exists() and not path.is_dir()), None)
    if file is None:
        return None
    below = "" if file == home else f", so nothing can lie in {home}"
    return f"{file} is a file{below}; set ATROPOS_HOME to a folder."


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by `text`, readable by its owner only."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def hold_lock(home: StackHome, path: Path | None = None) -> Iterator[bool]:
    """Hold the folder's lock for the block; yields False at once, without it, where another process has it.

    `path`: another lock file of the folder, for what is not a supervisor.
    """
    with (path or home.lock).open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise StackError(
                f"The file system of {home.root} has no file locks ({error.strerror}); "
                "set ATROPOS_HOME to a local disk."
            ) from error
        yield True
