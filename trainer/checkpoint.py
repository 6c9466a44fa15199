"""Folders that exist whole or not at all.

Invariant: under its final name a checkpoint is complete and on disk. It is filled under a hidden name, every file and
folder is synced, a manifest of all files is written, and one rename makes it appear. The hash of the manifest names the
content; `verify` computes it again from the files, so a torn or changed one is refused.

Two attempts at the same content meet in peace: the second finds the first's folder, compares and keeps it.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from .problem import TrainerProblem

MANIFEST: Final = "manifest.json"
_LEFT_BEHIND: Final = re.compile(r"^\..+\.(?:partial|removed)-(?P<pid>\d+)-(?P<host>[0-9a-f]{8})[0-9a-f]{8}$")
_HOUR: Final = 3600.0


def write(folder: Path, fill: Callable[[Path], object]) -> str:
    """Have `fill` write into an empty folder, and make that `folder`. Returns its hash.

    Where `folder` exists with this very content it is kept; with another, TrainerProblem is raised.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = _hidden(folder, "partial")
    try:
        partial.mkdir()
        fill(partial)
        digest = _seal(partial)
        if not _appears(partial, folder) and (there := verify(folder)) != digest:
            raise TrainerProblem(
                f"{folder} already holds another checkpoint ({there[:12]}, not {digest[:12]}); it was left as it is."
            )
        _sync(folder.parent)  # also where it was there before: whoever renamed it may have died before syncing
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return digest


def verify(folder: Path) -> str:
    """The hash of a checkpoint whose every file is as its manifest says. Raises TrainerProblem where one is not."""
    try:
        manifest = (folder / MANIFEST).read_bytes()
        listed: dict[str, list[object]] = json.loads(manifest)["files"]
        # Hidden files that others leave in folders they look at are nobody's weights.
        found = {name: path for name, path in _files(folder) if name in listed or not path.name.startswith(".")}
        wrong = [f"{name} is missing" for name in sorted(listed.keys() - found.keys())]
        wrong += [f"{name} is not part of it" for name in sorted(found.keys() - listed.keys())]
        both = sorted(found.keys() & listed.keys())
        wrong += [f"{name} has changed" for name in both if _entry(found[name]) != listed[name]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainerProblem(f"{folder} is not a whole checkpoint: {error}.") from error
    if wrong:
        raise TrainerProblem(f"{folder} is not the checkpoint that was written: {'; '.join(wrong[:3])}.")
    return hashlib.sha256(manifest).hexdigest()


def remove(folder: Path) -> None:
    """Delete it for good; under its own name it is never seen in part. One that is gone already is no problem."""
    doomed = _hidden(folder, "removed")
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    _sync(folder.parent)
    shutil.rmtree(doomed)
    _sync(folder.parent)


def leftovers(parent: Path) -> list[Path]:
    """What interrupted writes and removals left here, to be deleted.

    One is left over where its process ran on this machine and is dead, or where nothing in it changed for an hour.
    """
    if not parent.is_dir():
        return []
    out = []
    for path in sorted(parent.iterdir()):
        name = _LEFT_BEHIND.match(path.name)
        if name is not None and ((name["host"] == _host() and not _alive(int(name["pid"]))) or _age(path) > _HOUR):
            out.append(path)
    return out


def _hidden(folder: Path, kind: str) -> Path:
    """A sibling that names its writer. The machine is part of it: its process ids mean nothing on another one."""
    return folder.with_name(f".{folder.name}.{kind}-{os.getpid()}-{_host()}{secrets.token_hex(4)}")


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _age(folder: Path) -> float:
    changed = 0.0
    for path in (folder, *folder.rglob("*")):
        try:
            changed = max(changed, path.stat().st_mtime)
        except FileNotFoundError:  # its writer is at work
            return 0.0
    return time.time() - changed


def _appears(partial: Path, folder: Path) -> bool:
    """Give the folder its name; False where that is taken."""
    if folder.exists():
        return False
    try:
        partial.rename(folder)
    except OSError:
        if folder.exists():  # another writer was quicker
            return False
        raise
    return True


def _seal(folder: Path) -> str:
    """Write the manifest, sync everything below and return the hash."""
    files = {name: _entry(path) for name, path in _files(folder)}
    manifest = (json.dumps({"files": files}, indent=1, sort_keys=True) + "\n").encode()
    (folder / MANIFEST).write_bytes(manifest)
    for base, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(base, name))
        _sync(Path(base))
    return hashlib.sha256(manifest).hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            yield path.relative_to(folder).as_posix(), path


def _entry(path: Path) -> list[object]:
    """Size and SHA-256."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
