"""What a server's answer means: kind, whether to try again, how long to wait."""

from email.utils import formatdate

import httpx
import pytest
from atropos.inference.errors import (
    LONGEST_RETRY_AFTER_S,
    EngineFailureKind,
    failure_from_status,
    failure_from_transport,
    retry_after_s,
)

K = EngineFailureKind


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, K.REJECTED, False),
        (401, K.REJECTED, False),
        (404, K.REJECTED, False),
        (408, K.UNAVAILABLE, True),
        (409, K.UNAVAILABLE, True),
        (422, K.REJECTED, False),
        (429, K.OVERLOADED, True),
        (500, K.UNAVAILABLE, True),
        (503, K.OVERLOADED, True),
        (529, K.UNAVAILABLE, True),
    ],
)
def test_a_status_has_one_meaning(status: int, kind: EngineFailureKind, retryable: bool) -> None:
    failure = failure_from_status("engine a", status, {}, b"no\nreason")
    assert (failure.kind, failure.retryable) == (kind, retryable)
    assert failure.message == f"engine a answered {status}: no reason"


@pytest.mark.parametrize(
    ("status", "word", "retryable"), [(500, "false", False), (400, "TRUE", True), (429, "?", True)]
)
def test_the_servers_own_word_on_retrying_wins(status: int, word: str, retryable: bool) -> None:
    assert failure_from_status("e", status, {"x-should-retry": word}, b"").retryable is retryable


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": formatdate(1_000_030, usegmt=True)}, 30.0),
        ({"retry-after": formatdate(999_000, usegmt=True)}, 0.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "1e9"}, LONGEST_RETRY_AFTER_S),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "when it pleases us"}, None),
    ],
)
def test_every_form_of_retry_after_is_read(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers, now=1_000_000) == expected


def test_a_long_error_page_is_cut() -> None:
    assert len(failure_from_status("e", 500, {}, b"x" * 100_000).message) < 400


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (httpx.ConnectError("refused"), K.UNAVAILABLE, True),
        (httpx.ConnectTimeout(""), K.UNAVAILABLE, True),
        (httpx.ReadTimeout(""), K.UNAVAILABLE, True),
        (httpx.RemoteProtocolError("cut"), K.UNAVAILABLE, True),
        (httpx.ReadError(""), K.UNAVAILABLE, True),
        (httpx.DecodingError("gzip"), K.MALFORMED, True),
        (httpx.UnsupportedProtocol("ftp"), K.REJECTED, False),
    ],
)
def test_a_broken_connection_has_one_meaning(error: httpx.HTTPError, kind: EngineFailureKind, retryable: bool) -> None:
    failure = failure_from_transport("engine a", error)
    assert (failure.kind, failure.retryable) == (kind, retryable)
    assert failure.message.startswith("engine a ")
