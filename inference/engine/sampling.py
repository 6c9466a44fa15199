"""Drawing one token for each row of a batch, with the logprob of exactly the distribution drawn from.

Invariant: a row's token depends on its own scores, parameters and uniform number only, never on its neighbours, so that
a seeded request gives the same tokens alone and among sixty-three others. It is the inverse of the cumulative
distribution: one uniform number a token, which a request's own generator supplies.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .wire import SamplingParams


def draw(scores: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Sample a token a row.

    `scores`: [rows, vocabulary] float32 logits. `uniforms`: a number in [0, 1) a row.
    Returns tokens [rows] int64 and their logprobs [rows] float32. A greedy row takes the largest score and reports its
    logprob at temperature 1.
    """
    if any(p.temperature not in (0.0, 1.0) for p in params):
        temperatures = [p.temperature or 1.0 for p in params]
        scores = scores / scores.new_tensor(temperatures).unsqueeze(1)
    limited = [row for row, p in enumerate(params) if not p.greedy and (p.top_p < 1.0 or p.top_k > 0)]
    if limited:
        scores = scores.clone()
        scores[limited] = _truncate(scores[limited], [params[row] for row in limited])
    logprobs = torch.log_softmax(scores, dim=-1)
    tokens = _invert(logprobs, uniforms)
    greedy = [row for row, p in enumerate(params) if p.greedy]
    if greedy:
        tokens[greedy] = scores[greedy].argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _invert(logprobs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """The token at which each row's cumulative probability first exceeds its uniform number."""
    exact = logprobs.dtype if logprobs.device.type == "mps" else torch.float64
    cumulative = logprobs.to(exact).exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = cumulative.new_tensor(uniforms).unsqueeze(1) * total
    # Rounding may reach the total itself, which would point behind the last token.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _truncate(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores with everything outside each row's top-k and then top-p set at minus infinity."""
    vocabulary = scores.shape[-1]
    ordered, order = scores.sort(dim=-1, descending=True)
    ranks = torch.arange(vocabulary, device=scores.device)
    top_k = torch.tensor([min(p.top_k, vocabulary) if p.top_k > 0 else vocabulary for p in params])
    ordered = ordered.masked_fill(ranks >= top_k.to(scores.device).unsqueeze(1), float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = scores.new_tensor([p.top_p for p in params]).unsqueeze(1)
    outside = (before >= top_p) & (ranks > 0)
    ordered = ordered.masked_fill(outside, float("-inf"))
    return torch.full_like(scores, float("-inf")).scatter(1, order, ordered)
