"""One train step, and the forward pass it shares with probes.

Invariant: weights change in one place, `optimizer.step()`, and only after loss and gradient of the whole batch are
known to be finite. What fails before leaves them bit for bit as they were.

Suffixes name dimensions: B rows, T tokens, K columns in which some row trains, N trained tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from ..contracts.training import TrainerConfig
from .loss import Sums, grpo, token_logprobs
from .packing import Row, pad, plan
from .problem import TrainerProblem

LEAST_SHARE: Final = 0.05
"""Of the learning rate, that a decay leaves."""


def learning_rate(config: TrainerConfig, version: int) -> float:
    """Of the step that leads to `version`, the first being 1."""
    optim = config.optim
    warmed = min(1.0, version / optim.warmup) if optim.warmup else 1.0
    left = max(LEAST_SHARE, 1.0 - (version - 1) / config.steps) if optim.decay == "linear" else 1.0
    return optim.lr * warmed * left


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Row],
    *,
    lr: float,
    clip: float,
    budget: int,
    before_update: Callable[[], None],
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, float]:
    """Gradient of the whole batch, clip, update. Returns metrics. Raises TrainerProblem with the weights untouched."""
    optimizer.zero_grad()  # also of what a step that failed has left
    sums = accumulate(model, rows, budget, on_progress)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
    if not (sums.finite() and math.isfinite(norm)):
        raise TrainerProblem(
            f"the loss ({sums.loss}) or the norm of its gradient ({norm}) is not finite; no weight was changed. "
            "Lower optim.lr, or look for absurd logprobs in the batch."
        )
    for group in optimizer.param_groups:
        group["lr"] = lr
    before_update()
    if lr > 0:  # at 0 the arithmetic of an update would still turn -0.0 into 0.0 and flush denormal weights
        optimizer.step()
    return {**sums.metrics(), "grad_norm": norm, "lr": lr}


def accumulate(
    model: Any, rows: Sequence[Row], budget: int, on_progress: Callable[[float], None] | None = None
) -> Sums:
    """Add the gradient of the batch's loss to the parameters, micro-batch by micro-batch."""
    tokens = sum(row.tokens for row in rows)
    parts = plan([len(row.segment.ids) for row in rows], budget)
    sums = Sums()
    for done, part in enumerate(parts, 1):
        batch = pad([rows[index] for index in part]).to(model.device)
        trained = batch.trained_BT
        logprobs_N, entropy_N = predict(model, batch.ids_BT, trained, batch.temperatures_BT)
        loss, part_sums = grpo(logprobs_N, batch.behaviour_BT[trained], batch.advantages_BT[trained], entropy_N, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        sums += part_sums
        if on_progress is not None:
            on_progress(done / len(parts))
    return sums


def predict(model: Any, ids_BT: Tensor, chosen_BT: Tensor, temperatures_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the chosen tokens, each predicted from those before it, row by row.

    Padding is on the right and attention is causal, so no mask is needed. The head runs only in columns with a chosen
    token; through the model's own forward, for some models scale or cap their logits after it.
    """
    columns_K = chosen_BT.any(dim=0).nonzero()[:, 0]
    logits_BKV = model(input_ids=ids_BT, use_cache=False, logits_to_keep=columns_K - 1).logits
    at_BK = chosen_BT[:, columns_K]
    return token_logprobs(logits_BKV[at_BK], ids_BT[:, columns_K][at_BK], temperatures_BT[:, columns_K][at_BK])


@torch.no_grad()
def sequence_logprobs(
    model: Any, sequences: Sequence[Sequence[int]], temperature: float, budget: int
) -> list[list[float]]:
    """The logprob of each token but the first, in the order given."""
    out: list[list[float]] = [[] for _ in sequences]
    for part in plan([len(ids) for ids in sequences], budget):
        width = len(sequences[part[0]])
        if width < 2:
            continue
        ids_BT = torch.tensor([[*sequences[i], *[0] * (width - len(sequences[i]))] for i in part], device=model.device)
        chosen_BT = torch.tensor([[0 < t < len(sequences[i]) for t in range(width)] for i in part], device=model.device)
        found_N, _ = predict(model, ids_BT, chosen_BT, torch.full(ids_BT.shape, temperature, device=model.device))
        found = found_N.tolist()
        for index in part:
            count = max(0, len(sequences[index]) - 1)
            out[index], found = found[:count], found[count:]
    return out


@contextmanager
def computing(threads: int, rng: Tensor) -> Iterator[Callable[[], Tensor]]:
    """Compute with `threads` threads, from this random state, and leave the process as it was. Gives what tells how far
    the random state has come.

    Denormal numbers count as zero meanwhile: a young optimizer's second moments are full of them, and arithmetic on
    them is several times slower.
    """
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng)
        torch.set_flush_denormal(True)
        torch.set_num_threads(threads)
        try:
            yield torch.get_rng_state
        finally:
            torch.set_num_threads(before)
            torch.set_flush_denormal(False)
