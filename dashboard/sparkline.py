"""A line of numbers as a small picture: SVG, so that it needs neither scripts nor another file."""

import math
from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

WIDTH: Final = 120
HEIGHT: Final = 24
_MARGIN: Final = 2


def sparkline(values: Sequence[float | None]) -> Markup:
    """The line of `values`, lowest at the bottom; what is not a finite number is left out."""
    found = [(place, value) for place, value in enumerate(values) if value is not None and math.isfinite(value)]
    if not found:
        return Markup("")
    low, high = min(value for _, value in found), max(value for _, value in found)
    across, up = (WIDTH - 2 * _MARGIN) / max(1, len(values) - 1), HEIGHT - 2 * _MARGIN

    def at(place: int, value: float) -> str:
        height = (value - low) / (high - low) if high > low else 0.5
        return f"{_MARGIN + place * across:.1f},{HEIGHT - _MARGIN - height * up:.1f}"

    points = " ".join(at(place, value) for place, value in found)
    last = at(*found[-1]).split(",")
    return Markup(
        '<svg class="spark" viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img" aria-label="{2}">'
        '<polyline points="{3}"/><circle cx="{4}" cy="{5}" r="2"/></svg>'
    ).format(WIDTH, HEIGHT, f"from {found[0][1]:.3g} to {found[-1][1]:.3g}", points, *last)
