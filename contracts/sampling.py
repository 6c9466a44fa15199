"""How tokens are drawn.

Invariant: what trains is sampled from the plain temperature distribution, since a truncated one gives logprobs of
another distribution than the trainer computes. Truncation is therefore refused for training, not corrected.
"""

from typing import Self

from pydantic import Field, model_validator

from .base import MOST, Strict


class Sampling(Strict):
    """Sampling parameters of a run or an evaluation."""

    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    """Logits are divided by it. 0 always takes the likeliest token, and so trains nothing."""
    max_tokens: int = Field(default=1024, ge=1, le=MOST)
    """Tokens of one completion."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Only the likeliest tokens that have this probability together are drawn; 1: off. Refused for training."""
    top_k: int = Field(default=0, ge=0, le=MOST)
    """Only this many of the likeliest tokens are drawn; 0: off. Refused for training."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""

    @model_validator(mode="after")
    def _stop_strings_are_not_empty(self) -> Self:
        if any(not text for text in self.stop):
            raise ValueError("a stop string is empty")
        return self

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0
