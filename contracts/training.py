"""The parts of a run file that say how it trains, and what a trainer is given.

Invariant: a sample carries only what was sampled: logprobs and temperatures mean something exactly where the mask is 1.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field

from .base import MOST, Strict


class TrainerKind(StrEnum):
    """Who turns groups into weights."""

    BUILTIN = "builtin"
    """The run's own trainer, on a worker with torch."""
    EXTERNAL = "external"
    """Somebody else leases batches and commits steps; this run publishes what they commit."""
    NONE = "none"
    """Rollouts only."""


class Preset(StrEnum):
    """A named choice of advantage, ratio treatment and aggregation."""

    GRPO = "grpo"
    """Advantage (r - mean) / (sample std + 1e-6) over valid members; ratio to the engine's logprobs, clipped to
    [1 - 0.2, 1 + 0.28] (DAPO's clip-higher, arXiv 2503.14476); mean over all tokens of the batch; no KL term."""


class OptimConfig(Strict):
    """AdamW."""

    lr: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """0 trains nothing: everything runs and the weights stay as they are."""
    warmup: int = Field(default=10, ge=0, le=MOST)
    """Steps over which the learning rate grows linearly to `lr`."""
    decay: Literal["none", "linear"] = "none"
    """`linear`: from `lr` at the first step to a twentieth of it at the last of the run's."""
    clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    betas: tuple[float, float] = (0.9, 0.95)
    """How much of the running means of the gradient, and of its square, is kept from step to step."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Share of each weight, times the learning rate, that a step takes away."""


class CheckpointConfig(Strict):
    """What is kept of each step. Every step writes one: a version exists only once its weights are on disk."""

    dir: str | None = None
    """Folder of all runs' checkpoints, readable where engines load from; default: `checkpoints` in ATROPOS_HOME."""
    keep: int = Field(default=3, ge=2, le=MOST)
    """Newest checkpoints to keep; those an evaluation is pinned to stay as well."""


class TrainerConfig(Strict):
    """Who trains, and how."""

    kind: TrainerKind = TrainerKind.NONE
    """Who trains."""
    preset: Preset = Preset.GRPO
    """What is computed from a batch."""
    steps: int = Field(default=100, ge=1, le=MOST)
    """Train steps of the run."""
    optim: OptimConfig = OptimConfig()
    scores: str = Field(default="first", min_length=1, max_length=100)
    """Whose scores make the rewards where episodes were scored again (`atropos rescore`): `first`, `latest`, or the
    name of a version; where that has given none, the first ones do."""
    micro_batch_tokens: int = Field(default=16384, ge=1, le=MOST)
    """Tokens, padding included, that go through the model at once; changes memory and speed, never the result."""
    checkpoint: CheckpointConfig = CheckpointConfig()


class BatchConfig(Strict):
    """What a train step consumes."""

    groups: int = Field(default=16, ge=1, le=4096)
    """Groups with signal (their rewards differ) of one step."""
    resample_cap: float = Field(default=3.0, ge=1, allow_inf_nan=False)
    """Groups drawn for one batch, in batches, before it counts as short: groups without signal are drawn again."""
    when_short: Literal["wait", "train"] = "wait"
    """`wait` for a whole batch, or `train` on what there is once the cap is reached."""


class StalenessConfig(Strict):
    """How far rollouts may run ahead of the weights."""

    max: int = Field(default=1, ge=0, le=64)
    """Versions between the weights a step starts from and the oldest that sampled one of its tokens. 0: on-policy,
    rollouts and steps take turns. What is older is dropped whole and counted."""


class PublishConfig(Strict):
    """How new weights reach the engines."""

    method: Literal["auto", "reload"] = "auto"
    """`reload`: each engine loads the checkpoint from its path. `auto` chooses by the engine's kind."""
    verify: Literal["auto", "logprobs", "checksum"] = "auto"
    """How an engine proves that it holds them: by its logprobs on known tokens, by each tensor's digest, or (`auto`) by
    both, of which either can convict. Digests see one stale tensor that logprobs cannot, and cost a pass over all
    weights, which `logprobs` spares very large models."""


class WandbConfig(Strict):
    """Where metrics go besides the store."""

    project: str = Field(default="atropos", min_length=1)
    """Project there."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online where a key is found, else offline."""


@dataclass(frozen=True, slots=True)
class SampleSegment:
    """A token-contiguous part of an episode: one training sample. All lists are equally long.

    `mask`: 1 where the token was sampled and trains. `logprobs`: there, the engine's float32 logprob at the sampling
    temperature; `temperatures`: there, that temperature (> 0). Elsewhere both are without meaning.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    temperatures: list[float]


@dataclass(frozen=True, slots=True)
class SampleEpisode:
    """One member of a group. `reward` None: unscored or invalid; it neither votes nor trains."""

    member: int
    reward: float | None
    segments: tuple[SampleSegment, ...]


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """A group as a trainer is given it."""

    group_no: int
    environment: str
    episodes: tuple[SampleEpisode, ...]
