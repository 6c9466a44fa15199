"""Limits of an episode, as data. Every limit is off (None) unless set; the order of checks is in `flow`."""

from typing import Self

from pydantic import Field

from .base import MOST, Strict


class Limits(Strict):
    """What an episode may spend."""

    turns: int | None = Field(default=None, ge=1, le=MOST)
    """Model calls."""
    tokens: int | None = Field(default=None, ge=1, le=MOST)
    """Sampled tokens over all turns."""
    context: int | None = Field(default=None, ge=1, le=MOST)
    """Prompt plus completion of one call, in tokens; the model's own limit applies besides."""

    def tightened(self, other: Self) -> Self:
        """Each limit of `other` where it is set, else ours."""
        return self.model_copy(update=other.model_dump(exclude_none=True))
