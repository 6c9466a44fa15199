"""Sampling in this process, for measuring a model that no engine serves yet.

Invariant: a row's tokens depend on its prompt, the weights and the generator alone, never on padding. Not for rollouts:
those go through an engine, which batches continuously and reports logprobs.
"""

import inspect
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    generator: torch.Generator,
    temperature: float = 1.0,
) -> list[list[int]]:
    """Draw one completion a prompt at a temperature above 0, each ending with its stop token or after `max_tokens`."""
    out: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_tokens < 1:
        return out
    longest = max(len(prompt) for prompt in prompts)
    ids_BT = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts))
    stops = torch.tensor(list(stop_ids))
    cache = DynamicCache(config=model.config)
    # Renamed by transformers; both names are alive in the versions we accept.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    for _ in range(max_tokens):
        output = model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=positions_BT,
            use_cache=True,
            logits_to_keep=1,
            **{argument: cache},
        )
        drawn_B = torch.multinomial(torch.softmax(output.logits[:, -1] / temperature, -1), 1, generator=generator)[:, 0]
        for row, token in zip(rows.tolist(), drawn_B.tolist(), strict=True):
            out[row].append(token)
        going = (~torch.isin(drawn_B, stops)).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(rows):
            cache.batch_select_indices(going)
            rows = rows[going]
        ids_BT = drawn_B[going][:, None]
        mask_BT = torch.cat([mask_BT[going], torch.ones(len(going), 1, dtype=mask_BT.dtype)], dim=1)
        positions_BT = positions_BT[going, -1:] + 1
    return out
