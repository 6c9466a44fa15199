"""How large a number may be that a person, a scorer, an environment or a file gives.

Invariant: sums, products of a value with its weight, and squares of such numbers stay finite, in float64 as in Postgres
(whose `avg` squares what it averages), and each alone fits a float32. So every door asks here, and nobody behind one
has to think of an overflow. What is stored already is never asked again.
"""

import math
from typing import Annotated, Any, Final

from pydantic import AfterValidator

LARGEST: Final = 1e30
"""Of a reward, a part of one, a score, a weight: the largest distance from 0."""
LARGEST_TOTAL: Final = 1e90
"""Of an episode's reward, the sum of parts times weights: what no number of parts can reach."""


def why_no_number(value: Any, largest: float = LARGEST) -> str | None:
    """Why it cannot be taken, as the end of a sentence; None for a finite number of at most `largest`."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return "it must be finite"
    return None if abs(number) <= largest else f"it must lie between -{largest:g} and {largest:g}"


def _taken(value: float) -> float:
    problem = why_no_number(value)
    if problem is not None:
        raise ValueError(f"{problem}, not {value:g}")
    return value


Bounded = Annotated[float, AfterValidator(_taken)]
"""A number that people give, in a model."""
