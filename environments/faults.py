"""What can be wrong with an environment, each as one sentence for people.

Invariant: an exception of author code never travels on as it is: it becomes an `EnvironmentFault` that names the
environment, the function and the author's own line, because the frames in between are ours and say nothing.
"""

import difflib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..contracts.context import JudgeUnavailable


class EnvironmentFault(Exception):
    """An environment is at fault: its code raised, or returned what it must not. The message is one sentence."""


class BadEnvironment(EnvironmentFault):
    """A class that does not keep the contract: refused when it is defined or loaded."""


class UnknownEnvironment(EnvironmentFault):
    """No environment of that name, module or file."""


class BadEnvironmentArgs(EnvironmentFault):
    """Arguments that the environment's config does not take, or a run that lacks what it needs."""


class CallTimedOut(EnvironmentFault):
    """A function took longer than its timeout; in the process pool its worker was killed."""


class WorkerDied(EnvironmentFault):
    """The process of the pool that ran a function ended under it."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name nearest to `word`, or nothing where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def said(error: BaseException) -> str:
    """An exception in words: its type and what it says."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def author_line(error: BaseException) -> str:
    """`file:line` of the innermost frame outside this package's own machinery."""
    ours = Path(__file__).parent
    machinery = {str(ours / name) for name in ("loaded.py", "parameters.py", "faults.py", "base.py", "worker.py")}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in machinery]
    outside = [
        frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename
    ]
    chosen = (outside or frames)[-1:]
    if not chosen:
        return "unknown line"
    path = Path(chosen[0].filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{chosen[0].lineno}"


@contextmanager
def author_code(where: str) -> Iterator[None]:
    """Turn whatever author code raises into an `EnvironmentFault`; a judge that is away stays what it is."""
    try:
        yield
    except (EnvironmentFault, JudgeUnavailable):
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFault(f"{where} raised {said(error)} ({author_line(error)})") from error
