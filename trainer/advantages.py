"""How much better than its group a member did.

Invariant: a group tells nothing exactly where every advantage is 0. Equal rewards give zeros and not the float noise of
their mean divided by a small number, and a member without a reward neither votes nor gets one. Pure Python: rollout
workers ask whether a group has signal without loading torch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from ..contracts.training import Preset

_SMALLEST_STD: Final = 1e-6
_NOISE: Final = 1e-9
"""Rewards closer than this, relative to the largest where that exceeds 1, are equal: sums in another order differ."""


def grpo(rewards: Sequence[float | None]) -> list[float]:
    """(r - mean) / (sample std + 1e-6) over the members with a reward; 0 for the others.

    All 0 where fewer than two have one or all are equal. Raises ValueError where a reward is not finite.
    """
    votes = [reward for reward in rewards if reward is not None]
    for reward in votes:
        if not math.isfinite(reward):
            raise ValueError(f"a reward is {reward}; a member that could not be scored has the reward None")
    if len(votes) < 2 or max(votes) - min(votes) <= _NOISE * max(1.0, *(abs(vote) for vote in votes)):
        return [0.0] * len(rewards)
    mean = math.fsum(votes) / len(votes)
    std = math.hypot(*(vote - mean for vote in votes)) / math.sqrt(len(votes) - 1)
    return [0.0 if reward is None else (reward - mean) / (std + _SMALLEST_STD) for reward in rewards]


_BY_PRESET: Final[dict[Preset, Callable[[Sequence[float | None]], list[float]]]] = {Preset.GRPO: grpo}


def advantages(preset: Preset, rewards: Sequence[float | None]) -> list[float]:
    """The advantage of each member of a group, in order."""
    return _BY_PRESET[preset](rewards)


def has_signal(preset: Preset, rewards: Sequence[float | None]) -> bool:
    """Whether a group with these rewards has a gradient: for some presets equal rewards may have one."""
    return any(advantages(preset, rewards))
