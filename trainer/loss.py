"""The policy-gradient loss a token, and what is measured beside it. Pure functions of tensors.

Invariant: everything is a sum over tokens, divided once by the count of the whole batch, so that any cut into
micro-batches gives the same loss, gradient and metrics.

The anchor of the ratio is the behaviour policy: the logprob that the engine reported when it sampled. The ratio itself
then corrects for stale weights and for the engine's arithmetic alike; multiplying by a further importance weight would
count that twice.

Suffixes name dimensions: N trained tokens, V vocabulary.
"""

import math
from dataclasses import astuple, dataclass, replace
from typing import Final

import torch
from torch import Tensor

CLIP_LOW: Final = 0.2
CLIP_HIGH: Final = 0.28
"""Wider upwards, so that unlikely tokens may still grow (DAPO's clip-higher, arXiv 2503.14476)."""
_LARGEST_LOG_RATIO: Final = 20.0
"""Beyond it a token has a finite loss and no gradient: one absurd ratio must not turn a batch into infinity."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over trained tokens; `d` is log(policy) - log(behaviour), `w` its exponential, the ratio."""

    tokens: float = 0.0
    loss: float = 0.0
    """Already divided by the batch's count: these add up to the loss of the batch."""
    clipped: float = 0.0
    """Tokens whose gradient the clip took away."""
    absolute: float = 0.0
    """|d|"""
    k3: float = 0.0
    """exp(d) - 1 - d. Sampled by the behaviour policy, it estimates KL(behaviour || policy), and is never negative."""
    ratio: float = 0.0
    ratio_squared: float = 0.0
    entropy: float = 0.0
    """Of the policy's whole next-token distribution, at the sampling temperature."""
    max_ratio: float = 0.0

    def __add__(self, other: "Sums") -> "Sums":
        added = Sums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        return replace(added, max_ratio=max(self.max_ratio, other.max_ratio))

    def finite(self) -> bool:
        return all(math.isfinite(value) for value in astuple(self))

    def metrics(self) -> dict[str, float]:
        """Means over tokens. `ess`: the share of its tokens that the batch is worth, (sum w)^2 / (n sum w^2)."""
        count = max(1.0, self.tokens)
        return {
            "loss": self.loss,
            "tokens": self.tokens,
            "clip_fraction": self.clipped / count,
            "mean_abs_logprob_difference": self.absolute / count,
            "k3": self.k3 / count,
            "max_ratio": self.max_ratio,
            "ess": self.ratio**2 / (count * self.ratio_squared) if self.ratio_squared else 0.0,
            "entropy": self.entropy / count,
        }


def token_logprobs(logits_NV: Tensor, ids_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs of the ids at the temperature each was sampled at, and the entropies there (without gradient)."""
    all_NV = torch.log_softmax(logits_NV / temperatures_N[:, None].to(logits_NV.dtype), dim=-1)
    with torch.no_grad():
        entropy_N = torch.special.entr(all_NV.exp()).sum(-1)
    return all_NV.gather(1, ids_N[:, None])[:, 0], entropy_N


def clipped_loss(ratio_N: Tensor, advantages_N: Tensor) -> Tensor:
    """-min(ratio A, clip(ratio) A), the loss of each token."""
    return -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages_N)


def grpo(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, entropy_N: Tensor, tokens: int
) -> tuple[Tensor, Sums]:
    """This part's share of the batch's loss (a scalar to differentiate) and its sums.

    `tokens`: how many train in the whole batch, all micro-batches together.
    """
    behaviour_N, advantages_N = behaviour_N.to(logprobs_N.dtype), advantages_N.to(logprobs_N.dtype)
    difference_N = logprobs_N - behaviour_N
    bounded_N = difference_N.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    ratio_N = bounded_N.exp()
    each_N = clipped_loss(ratio_N, advantages_N)
    loss = each_N.sum() / max(1, tokens)
    with torch.no_grad():
        sums = Sums(
            tokens=float(len(ratio_N)),
            loss=float(loss),
            clipped=float((each_N > -ratio_N * advantages_N).sum()),
            absolute=float(difference_N.abs().sum()),
            k3=float((torch.expm1(bounded_N) - bounded_N).sum()),
            ratio=float(ratio_N.sum()),
            ratio_squared=float(ratio_N.square().sum()),
            entropy=float(entropy_N.sum()),
            max_ratio=float(ratio_N.max()) if len(ratio_N) else 0.0,
        )
    return loss, sums
