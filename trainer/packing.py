"""Groups into micro-batches of padded tensors.

Invariant: what a step computes does not depend on how it is cut. A row carries its own advantage, padding stands on the
right where causal attention never sees it, and the rows' order follows from their place in the run and their length,
never from the order in which groups are handed over.

A member without a reward has no rows, so that its tokens are in no sum and no denominator. A member of a group without
signal has rows of advantage 0: no gradient, and its tokens count. Whoever wants them out leaves the group out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contracts.training import Preset, SampleEpisode, SampleGroup, SampleSegment
from .advantages import advantages
from .problem import TrainerProblem


@dataclass(frozen=True, slots=True)
class Row:
    """One segment and how much better than its group the episode did."""

    segment: SampleSegment
    advantage: float
    place: tuple[int, int, int]
    """Group, member, segment."""

    @property
    def tokens(self) -> int:
        """That train."""
        return sum(self.segment.mask)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one width. Meaning of each entry: SampleSegment; padding trains nothing."""

    ids_BT: Tensor
    trained_BT: Tensor
    """bool"""
    behaviour_BT: Tensor
    """float32 logprobs of the engine that sampled."""
    temperatures_BT: Tensor
    advantages_BT: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(
            self.ids_BT.to(device),
            self.trained_BT.to(device),
            self.behaviour_BT.to(device),
            self.temperatures_BT.to(device),
            self.advantages_BT.to(device),
        )


def rows_of(groups: Sequence[SampleGroup], preset: Preset) -> list[Row]:
    """A row for every segment that trains, by group, member and segment. Raises TrainerProblem where one cannot."""
    rows = []
    for group in groups:
        try:
            found = advantages(preset, [episode.reward for episode in group.episodes])
        except ValueError as error:
            raise TrainerProblem(f"group {group.group_no} ({group.environment}) cannot train: {error}.") from error
        for episode, advantage in zip(group.episodes, found, strict=True):
            rows += _rows(group, episode, advantage)
    return sorted(rows, key=lambda row: row.place)


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Which rows go through the model together, longest first: at most `budget` tokens with padding, at least one row.

    The longest come first, so that what does not fit in memory fails at once.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    out: list[list[int]] = []
    while order:
        count = max(1, budget // max(1, lengths[order[0]]))
        out.append(order[:count])
        order = order[count:]
    return out


def pad(rows: Sequence[Row]) -> MicroBatch:
    """The rows as tensors of the longest one's width."""
    width = max(len(row.segment.ids) for row in rows)

    def filled(values: Sequence[Sequence[float]], filler: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*one, *[filler] * (width - len(one))] for one in values], dtype=dtype)

    return MicroBatch(
        ids_BT=filled([row.segment.ids for row in rows], 0, torch.int64),
        trained_BT=filled([row.segment.mask for row in rows], 0, torch.bool),
        behaviour_BT=filled([row.segment.logprobs for row in rows], 0.0, torch.float32),
        temperatures_BT=filled([row.segment.temperatures for row in rows], 1.0, torch.float32),
        advantages_BT=torch.tensor([[row.advantage] for row in rows], dtype=torch.float32).expand(-1, width),
    )


def _rows(group: SampleGroup, episode: SampleEpisode, advantage: float) -> list[Row]:
    if episode.reward is None:
        return []
    rows = []
    for index, segment in enumerate(episode.segments):
        if (wrong := _wrong(segment)) is not None:
            raise TrainerProblem(
                f"segment {index} of member {episode.member} in group {group.group_no} ({group.environment}) {wrong}."
            )
        if any(segment.mask):
            rows.append(Row(segment, advantage, (group.group_no, episode.member, index)))
    return rows


def _wrong(segment: SampleSegment) -> str | None:
    sizes = {len(segment.ids), len(segment.mask), len(segment.logprobs), len(segment.temperatures)}
    if len(sizes) != 1:
        return f"has lists of different lengths: {sorted(sizes)}"
    if segment.mask and segment.mask[0]:
        return "trains its first token, which no prefix predicts"
    for said, logprob, temperature in zip(segment.mask, segment.logprobs, segment.temperatures, strict=True):
        if said and not (math.isfinite(temperature) and temperature > 0):
            return f"has a token sampled at temperature {temperature}; only what was sampled above 0 can train"
        if said and not math.isfinite(logprob):
            return f"has a sampled token with logprob {logprob}"
    return None
