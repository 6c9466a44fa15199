"""What a command may fail with in words, and how that reaches the person at the terminal.

Invariant: whoever typed something wrong, or whose servers are away, reads sentences and never a traceback. The list
names classes by module instead of importing them: an error can only be of a class whose module is loaded already,
and `atropos --help` must load neither Temporal nor torch.
"""

import sys
from typing import Final

import typer

from ..contracts.text import printable

PACKAGE: Final = __name__.removesuffix(".cli.errors")

_USER_ERRORS: Final = (
    ("settings", "SettingsError"),
    ("contracts.runfile", "RunFileError"),
    ("contracts.states", "IllegalTransition"),
    ("contracts.context", "JudgeUnavailable"),
    ("cli.errors", "CommandError"),
    ("cli.policy", "PolicyError"),
    ("cli.temporal", "TemporalUnready"),
    ("cli.stack.errors", "StackError"),
    ("db.errors", "StoreError"),
    ("environments.faults", "EnvironmentProblem"),
    ("inference.tokens", "TokensError"),
    ("inference.errors", "EngineFailure"),
)


class CommandError(Exception):
    """A command cannot do what was asked; the message is one sentence that says what to do."""


def sentences(error: BaseException) -> list[str] | None:
    """What to tell the person, one sentence a line; None where the error is a bug and not theirs."""
    for module_name, class_name in _USER_ERRORS:
        module = sys.modules.get(f"{PACKAGE}.{module_name}")
        if module is not None and isinstance(error, getattr(module, class_name)):
            problems = getattr(error, "problems", None) or [str(error)]
            return [printable(" ".join(str(problem).split())) for problem in problems]
    rpc = sys.modules.get("temporalio.service")
    if rpc is not None and isinstance(error, rpc.RPCError):
        return [f"Temporal refused or did not answer: {printable(' '.join(error.message.split()))}."]
    return None


def tell(error: BaseException) -> bool:
    """Print an error's sentences on stderr; False, and nothing, where it is a bug."""
    told = sentences(error)
    for sentence in told or ():
        typer.echo(f"atropos: {sentence}", err=True)
    return told is not None
