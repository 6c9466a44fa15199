"""What can go wrong with an engine or a judge, and whether trying again may help: one table.

Invariant: nothing here retries. A failure says what it is, whether another try makes sense and how long the server
asked us to wait; whoever owns the retries (Temporal, or the judge's own bounded loop) acts on that. Rows of the table
1. `x-should-retry: true|false` from the server wins.
2. 408, 409, 429 and every status from 500 may be retried; 429 and 503 mean overloaded, other 5xx unavailable.
3. Any other status from 400 is our own mistake: rejected, not retried.
4. No answer at all (refused, reset, half closed, timed out): unavailable, retried.
5. An answer that contradicts itself: malformed, retried, since the next one may be whole; nothing of it is used.
"""

import math
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Final

import httpx

LONGEST_RETRY_AFTER_S: Final = 600.0
"""A server that asks for more is taken at ten minutes: nobody should be able to park a run for a day."""
_QUOTED: Final = 300
"""Characters of a server's own words that enter a message."""


class EngineFailureKind(StrEnum):
    UNAVAILABLE = "unavailable"
    """It does not answer, or answers with a server error."""
    OVERLOADED = "overloaded"
    """It answers that it is too busy."""
    REJECTED = "rejected"
    """It refuses this request; the same request will be refused again."""
    MALFORMED = "malformed"
    """What it answered contradicts itself or the request."""
    WRONG_VERSION = "wrong_version"
    """It works with other weights than it should."""


class EngineFailure(Exception):
    """A model call that gave nothing. `message` is one sentence for people, without secrets."""

    def __init__(
        self,
        kind: EngineFailureKind,
        message: str,
        *,
        retryable: bool,
        retry_after_s: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        """Seconds the server asked to wait, in [0, 600]; None where it did not ask."""
        self.status = status
        """Of HTTP; None where none came."""


def unavailable(message: str, retry_after_s: float | None = None) -> EngineFailure:
    return EngineFailure(EngineFailureKind.UNAVAILABLE, message, retryable=True, retry_after_s=retry_after_s)


def malformed(message: str) -> EngineFailure:
    return EngineFailure(EngineFailureKind.MALFORMED, message, retryable=True)


def rejected(message: str) -> EngineFailure:
    return EngineFailure(EngineFailureKind.REJECTED, message, retryable=False)


def failure_from_status(who: str, status: int, headers: Mapping[str, str], body: bytes) -> EngineFailure:
    """The failure that a status ≥ 400 means. `who` names the server in the message; header names in lower case."""
    if status in (429, 503):
        kind = EngineFailureKind.OVERLOADED
    elif status >= 500 or status in (408, 409):
        kind = EngineFailureKind.UNAVAILABLE
    else:
        kind = EngineFailureKind.REJECTED
    retryable = kind is not EngineFailureKind.REJECTED
    verdict = headers.get("x-should-retry", "").strip().lower()
    if verdict in ("true", "false"):
        retryable = verdict == "true"
    said = quoted(body)
    message = f"{who} answered {status}" + (f": {said}" if said else "")
    return EngineFailure(kind, message, retryable=retryable, retry_after_s=retry_after_s(headers), status=status)


def quoted(body: bytes) -> str:
    """The beginning of a server's own words on one line."""
    return " ".join(body[: 4 * _QUOTED].decode("utf-8", "replace").split())[:_QUOTED]


def failure_from_transport(who: str, error: httpx.HTTPError | httpx.InvalidURL) -> EngineFailure:
    """The failure that an exception of httpx means."""
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return rejected(f"{who} has an unusable address: {error}")
    if isinstance(error, httpx.DecodingError):
        return malformed(f"{who} sent a body that cannot be decoded: {error}")
    if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
        return unavailable(f"{who} cannot be reached: {error or type(error).__name__}")
    if isinstance(error, httpx.TimeoutException):
        return unavailable(f"{who} did not answer in time ({type(error).__name__})")
    return unavailable(f"{who} broke the connection: {error or type(error).__name__}")


def retry_after_s(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds to wait from `retry-after-ms`, else `retry-after` (seconds or HTTP date); None where there is none or
    it cannot be read. `now`: seconds since the epoch."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return _bounded(milliseconds / 1000)
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None:
        return _bounded(seconds)
    if value is None:
        return None
    try:
        moment = parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return _bounded(moment - (time.time() if now is None else now))


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)
