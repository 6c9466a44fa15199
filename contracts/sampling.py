"""How tokens are drawn.

Invariant: what trains is sampled from the plain temperature distribution, since a truncated one gives logprobs of
another distribution than the trainer computes. Truncation, penalties and biases are therefore refused for training,
not corrected.
"""

import re
from typing import Any, Final, Self

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
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Only tokens at least this part as likely as the likeliest are drawn; 0: off. Refused for training."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken from the logit of every token that was sampled before; 0: off. Refused for training."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """The same for each time it was; 0: off. Refused for training."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    """Divides the logits of tokens that were there before; 1: off. Refused for training."""
    logit_bias: dict[str, float] = Field(default_factory=dict)
    """Token id → what is added to its logit. Refused for training."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""

    @model_validator(mode="after")
    def _texts_and_biases_are_usable(self) -> Self:
        if any(not text for text in self.stop):
            raise ValueError("a stop string is empty")
        if any(not (_TOKEN.fullmatch(token) and -100.0 <= bias <= 100.0) for token, bias in self.logit_bias.items()):
            raise ValueError("logit_bias has token ids from 0 and biases from -100 to 100")
        return self

    @property
    def special(self) -> dict[str, Any]:
        """What is asked for beyond temperature and length, by name: each changes what is drawn or where it ends."""
        return {name: getattr(self, name) for name in _SPECIAL if getattr(self, name) != _default(name)}


_TOKEN: Final = re.compile(r"\d{1,9}")
_SPECIAL: Final = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop",
)  # fmt: skip


def _default(name: str) -> object:
    return Sampling.model_fields[name].get_default(call_default_factory=True)
