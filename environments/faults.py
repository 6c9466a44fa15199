"""What can be wrong with an environment, each as one sentence for people.

Invariant: an exception of author code never travels on as it is: it becomes an `EnvironmentFault` that names the
environment, the function and the author's own line, because the frames in between are ours and say nothing.
"""

import difflib
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..contracts.context import JudgeUnavailable

MACHINERY: Final = (
    "calling.py",
    "tools.py",
    "scoring.py",
    "loaded.py",
    "worker.py",
    "faults.py",
    "base.py",
    "results.py",
)
"""Modules here whose frames say nothing about author code."""


class EnvironmentProblem(Exception):
    """Anything an environment's author or user can put right; the message is one sentence."""


class BadEnvironment(EnvironmentProblem):
    """A class that does not keep the contract: refused when it is defined or loaded."""


class UnknownEnvironment(EnvironmentProblem):
    """No environment of that name, module or file."""


class BadEnvironmentArgs(EnvironmentProblem):
    """Arguments that the environment's config does not take, or a run that lacks what it needs."""


class EnvironmentFault(EnvironmentProblem):
    """The environment's own code raised, or returned what it must not."""


class CallTimedOut(EnvironmentFault):
    """A function took longer than its timeout; in the process pool its worker was killed."""


class WorkerDied(EnvironmentFault):
    """The process of the pool that ran a function ended under it."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name nearest to `word`, or nothing where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def said(error: BaseException) -> str:
    """An exception in words, on one line: its type and what it says (at most 500 characters)."""
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def author_line(error: BaseException) -> str:
    """`file:line` of the innermost frame outside this package's own machinery."""
    machinery = {str(Path(__file__).parent / name) for name in MACHINERY}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in machinery]
    outside = [frame for frame in frames if not _borrowed(frame.filename)]
    chosen = (outside or frames)[-1:]
    if not chosen:
        return "unknown line"
    path = Path(chosen[0].filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{chosen[0].lineno}"


def _borrowed(filename: str) -> bool:
    """The standard library's or an installed package's."""
    return filename.startswith(("<", sysconfig.get_path("stdlib"))) or "site-packages" in filename


@contextmanager
def author_code(where: str) -> Iterator[None]:
    """Turn whatever author code raises into an `EnvironmentFault`; a judge that is away stays what it is."""
    try:
        yield
    except (EnvironmentProblem, JudgeUnavailable):
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFault(f"{where} raised {said(error)} ({author_line(error)})") from error
