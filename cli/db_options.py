"""Ages and sizes, as people write and read them."""

import re
from datetime import timedelta
from typing import Final

from .errors import CommandError

_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE: Final = re.compile(r"(\d{1,6})([mhdw])")


def age_of(text: str) -> timedelta:
    """`90d`, `12h`, `30m`, `4w`. Raises CommandError."""
    found = _AGE.fullmatch(text.strip().lower())
    if found is None:
        raise CommandError(f"{text!r} is no age; it looks like 90d, 12h, 30m or 4w.")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def size_of(count: int) -> str:
    """Bytes for people."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
