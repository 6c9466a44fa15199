"""How values become bytes and JSON in the store, and come back.

Invariant: what is read equals what was written. Token arrays are packed little-endian. JSONB keeps a display copy;
where it cannot hold a value exactly (NUL and lone surrogates, which become U+FFFD; non-finite numbers, which become
null; floats from 1e16, which come back as integers) the exact JSON is kept beside it and wins when read. JSONB keeps no
order of keys.
"""

import array
import contextlib
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter

from ..contracts.messages import Message
from ..contracts.numbers import LARGEST, why_no_number
from ..contracts.records import BadRecord

INLINE_STATE: Final = 2048
"""Bytes of JSON up to which a state lies in its row; Postgres would move more than that out of line anyway."""
MAX_STATE: Final = 256 * 1024
"""Bytes of JSON a state may have."""
REPLACEMENT: Final = "\ufffd"

_BAD: Final = re.compile("[\x00\ud800-\udfff]")
_MESSAGES: Final = TypeAdapter(tuple[Message, ...])


@dataclass(frozen=True, slots=True)
class Encoded:
    """JSON text for JSONB, and the exact bytes where JSONB cannot hold the value."""

    display: str
    exact: bytes | None

    @property
    def lossy(self) -> bool:
        return self.exact is not None


@dataclass(frozen=True, slots=True)
class StoredState:
    """An environment's state as its row keeps it: inline, or in a blob."""

    inline: str | None
    digest: str | None
    data: bytes | None


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32. Raises BadRecord for one outside [0, 2³¹)."""
    try:
        packed = array.array("i", ids)
    except (OverflowError, TypeError) as error:
        raise BadRecord(f"a token id is no 32-bit integer: {error}") from error
    if packed and min(packed) < 0:
        raise BadRecord(f"a token id is negative: {min(packed)}")
    return _little(packed)


def pack_floats(values: Sequence[float]) -> bytes:
    """Numbers as float32, rounded to nearest. The database refuses what is not finite."""
    return _little(array.array("f", values))


def pack_mask(mask: Sequence[int]) -> bytes:
    """Mask entries as uint8. The database refuses all but 0 and 1."""
    try:
        return bytes(mask)
    except (ValueError, TypeError) as error:
        raise BadRecord(f"a mask entry is neither 0 nor 1: {error}") from error


def unpack_ids(data: bytes) -> list[int]:
    return _unpack("i", data).tolist()


def unpack_floats(data: bytes) -> list[float]:
    return _unpack("f", data).tolist()


def _little(packed: "array.array[Any]") -> bytes:
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: bytes) -> "array.array[Any]":
    out: array.array[Any] = array.array(code)
    out.frombytes(data)
    if sys.byteorder == "big":
        out.byteswap()
    return out


def encode(value: Any) -> Encoded:
    """Plain data (dicts, lists, tuples, strings, numbers, None) as JSON."""
    with contextlib.suppress(ValueError):  # a number that is not finite, or a lone surrogate
        text = _dumped(value, allow_nan=False)
        text.encode()
        if "\\u0000" not in text and "e+" not in text:
            return Encoded(text, None)
    text = _dumped(value)
    display = _dumped(_cleaned(value))
    exact = display == text and not _has_large_float(value)
    return Encoded(display, None if exact else text.encode("utf-8", "surrogatepass"))


def decode(display: str, exact: bytes | None) -> Any:
    return json.loads(display if exact is None else exact)


def encode_message(message: Message) -> Encoded:
    return encode(plain_message(message))


def decode_message(display: str, exact: bytes | None) -> Message:
    if exact is None:
        return Message.model_validate_json(display)
    return Message.model_validate(json.loads(exact))


def decode_messages(value: Any) -> tuple[Message, ...]:
    return _MESSAGES.validate_python(value)


def plain_message(message: Message) -> dict[str, Any]:
    """The message as plain data without its empty fields."""
    return {name: value for name, value in message.model_dump().items() if value or name == "role"}


def encode_state(state: dict[str, Any]) -> StoredState:
    """Inline where it is small and JSONB holds it, else by content. Raises BadRecord above 256 KiB."""
    encoded = encode(state)
    data = encoded.exact or encoded.display.encode()
    if len(data) > MAX_STATE:
        raise BadRecord(
            f"the environment's state has {len(data)} bytes as JSON, more than {MAX_STATE}: "
            "keep less in it, or rebuild it by replaying seed and actions"
        )
    if encoded.exact is None and len(data) <= INLINE_STATE:
        return StoredState(encoded.display, None, None)
    return StoredState(None, hashlib.sha256(data).hexdigest(), data)


def decode_state(inline: str | None, data: bytes | None) -> dict[str, Any] | None:
    """The state of a row and its joined blob; None where there is neither."""
    text = data if inline is None else inline
    return None if text is None else dict(json.loads(text))


def clean(text: str) -> str:
    """Text fit for a text column: NUL and lone surrogates become U+FFFD."""
    return _BAD.sub(REPLACEMENT, text)


def clean_or_none(text: str | None) -> str | None:
    return None if text is None else clean(text)


def check_finite(values: Iterable[float | None], what: str) -> None:
    """Raise BadRecord where a number that a person or scorer supplied is not finite."""
    for value in values:
        if value is not None and not math.isfinite(value):
            raise BadRecord(f"{what} is not finite: {value}")


def check_bounded(values: Iterable[float | None], what: str, largest: float = LARGEST) -> None:
    """Raise BadRecord where a number that a person or scorer supplied is not finite, or so large that sums overflow."""
    for value in values:
        problem = None if value is None else why_no_number(value, largest)
        if problem is not None:
            raise BadRecord(f"{what} is {value}; {problem}")


def _dumped(value: Any, *, allow_nan: bool = True) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=allow_nan, separators=(",", ":"))


def _has_large_float(value: Any) -> bool:
    if isinstance(value, float):
        return abs(value) >= 1e16
    if isinstance(value, dict):
        return any(_has_large_float(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_has_large_float(item) for item in value)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {clean(key) if isinstance(key, str) else key: _cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    return value
