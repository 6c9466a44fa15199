"""Attention for a ragged batch on any device.

Invariant: a row attends to the keys of its own sequence, up to its own position, and to nothing else. transformers'
continuous batching hands over all sequences packed end to end; its own SDPA path multiplies every query with every key
of the whole batch under one block-diagonal mask, which on a CPU costs more than the rest of the model together. Here
sequences of similar length are read from the paged cache padded side by side, and each is multiplied with itself only.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

NAME = "ragged_sdpa"
"""The name under which `attend` is registered with transformers."""

SMALL = 127
"""Sequences up to this many keys share one block: padding to the longest then costs less than another kernel call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence's part in a step: where its queries and its keys lie in the packed batch, in tokens."""

    query_start: int
    queries: int
    key_start: int
    keys: int


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences computed together, padded to the longest. B sequences, Q queries and K keys after padding."""

    sequences: int
    queries: int
    keys: int
    take: Tensor
    """[B·Q] packed positions of the queries; padding repeats a sequence's last query."""
    keep: Tensor | None
    """Which of the B·Q rows are no padding; None if all are."""
    mask: Tensor
    """[B, 1, Q, K] True where a query sees a key."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one step's packed batch is cut into blocks; the same for all layers."""

    blocks: tuple[Block, ...]
    read: Tensor
    """[ΣB·K] packed positions of the keys, block after block."""


def layout(pieces: Sequence[Piece], device: torch.device) -> Layout:
    """Group the pieces of a step by kind (one query or more) and by length."""
    groups: dict[tuple[bool, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        groups[piece.queries == 1, max(piece.keys, SMALL).bit_length()].append(piece)
    blocks, reads = [], []
    for group in groups.values():
        block, read = _block(group)
        blocks.append(
            Block(
                block.sequences,
                block.queries,
                block.keys,
                block.take.to(device),
                None if block.keep is None else block.keep.to(device),
                block.mask.to(device),
            )
        )
        reads.append(read)
    return Layout(tuple(blocks), torch.cat(reads).to(device))


def _block(group: list[Piece]) -> tuple[Block, Tensor]:
    table = torch.tensor([(p.query_start, p.queries, p.key_start, p.keys) for p in group])
    query_start, queries, key_start, keys = table.unsqueeze(2).unbind(1)
    most_queries, most_keys = int(queries.max()), int(keys.max())
    q, k = torch.arange(most_queries), torch.arange(most_keys)
    own_query = torch.minimum(q, queries - 1)
    take = (query_start + own_query).reshape(-1)
    read = (key_start + torch.minimum(k, keys - 1)).reshape(-1)
    last_key = keys - queries + own_query
    mask = (k <= last_key.unsqueeze(2)).unsqueeze(1)
    keep = None if most_queries == 1 else (q < queries).reshape(-1).nonzero().squeeze(1)
    return Block(len(group), most_queries, most_keys, take, keep, mask), read


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    ragged: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. `query` [1, H, tokens, D] is packed; `key` and `value` [1, H', ΣB·K, D] were
    read from the cache in the order of `ragged.read`. Returns [1, tokens, H, D]."""
    if ragged is None:
        raise RuntimeError("this attention serves continuous batching only")
    heads, size = query.shape[1], query.shape[3]
    grouped = heads != key.shape[1]
    queries, keys, values = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    output = query.new_empty(queries.shape[0], heads, values.shape[2])
    start = 0
    for block in ragged.blocks:
        end = start + block.sequences * block.keys
        wide = (block.sequences, block.keys, -1, size)
        mixed = functional.scaled_dot_product_attention(
            queries[block.take].view(block.sequences, block.queries, heads, size).transpose(1, 2),
            keys[start:end].view(wide).transpose(1, 2),
            values[start:end].view(*wide[:3], values.shape[2]).transpose(1, 2),
            attn_mask=block.mask,
            scale=scaling,
            enable_gqa=grouped,
        )
        rows = mixed.transpose(1, 2).reshape(block.sequences * block.queries, heads, -1)
        if block.keep is None:
            output[block.take] = rows
        else:
            output[block.take[block.keep]] = rows[block.keep]
        start = end
    return output.unsqueeze(0), None


AttentionInterface.register(NAME, attend)
