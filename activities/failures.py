"""How exceptions leave an activity: as a verdict, or as something to try again.

Invariant: an error type that names a FailureKind is final and says whose fault it was; everything else is retried by
Temporal. No reward is ever made out of a failure.
"""

from datetime import timedelta

from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from ..contracts.activities import BAD_RUN_FILE
from ..contracts.messages import preview
from ..contracts.reasons import FailureKind
from ..contracts.records import EpisodeFacts
from ..contracts.states import is_live
from ..inference.errors import EngineFailure

_SENTENCE = 1000
"""Bytes of a message that may enter history."""


def final(kind: FailureKind, message: str) -> ApplicationError:
    """A verdict: the same at every try. Whose fault it was is in rows; only our own is worth a log with a traceback."""
    ours = kind is FailureKind.INFRASTRUCTURE
    category = ApplicationErrorCategory.UNSPECIFIED if ours else ApplicationErrorCategory.BENIGN
    return ApplicationError(preview(message, _SENTENCE), type=kind.value, non_retryable=True, category=category)


def bad_run_file(message: str) -> ApplicationError:
    return ApplicationError(preview(message, 4 * _SENTENCE), type=BAD_RUN_FILE, non_retryable=True)


def waited_out(name: str, message: str, delay: timedelta | None = None) -> ApplicationError:
    """Something outside is away: tried again for as long as it takes, without alarm."""
    return ApplicationError(
        preview(message, _SENTENCE), type=name, next_retry_delay=delay, category=ApplicationErrorCategory.BENIGN
    )


def engine_failure(failure: EngineFailure) -> ApplicationError:
    """An outage is waited out; what the engine rejects for good is a verdict."""
    if not failure.retryable:
        return final(FailureKind.ENGINE, failure.message)
    delay = None if failure.retry_after_s is None else timedelta(seconds=failure.retry_after_s)
    return waited_out("EngineUnavailable", failure.message, delay)


def refuse_ended_run(facts: EpisodeFacts) -> None:
    """An ended run buys no more tokens and calls no more tools. Raises the verdict `cancelled`."""
    if not is_live(facts.run_state):
        raise final(FailureKind.CANCELLED, f"the run is {facts.run_state}")
