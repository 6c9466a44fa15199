"""Each sequence attends to itself only, however a step is cut into blocks."""

import torch
from atropos.inference.engine.attention import Piece, attend, layout
from hypothesis import given, settings
from hypothesis import strategies as st

HEADS, GROUPS, SIZE = 4, 2, 8

sequences = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 1, 2, 7, 40])), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(sequences)
def test_a_ragged_batch_equals_its_sequences_one_by_one(lengths: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    pieces, query, key = [], 0, 0
    for past, new in lengths:
        pieces.append(Piece(query, new, key, past + new))
        query, key = query + new, key + past + new
    q, k, v = torch.randn(1, HEADS, query, SIZE), torch.randn(1, GROUPS, key, SIZE), torch.randn(1, GROUPS, key, SIZE)
    ragged = layout(pieces, torch.device("cpu"))
    mixed, _ = attend(None, q, k[:, :, ragged.read], v[:, :, ragged.read], None, scaling=0.3, ragged=ragged)
    for piece in pieces:
        own_q = q[:, :, piece.query_start : piece.query_start + piece.queries]
        own = slice(piece.key_start, piece.key_start + piece.keys)
        seen = torch.ones(piece.queries, piece.keys).tril(piece.keys - piece.queries).bool()
        expected = torch.nn.functional.scaled_dot_product_attention(
            own_q, k[:, :, own], v[:, :, own], attn_mask=seen, scale=0.3, enable_gqa=True
        )
        actual = mixed[:, piece.query_start : piece.query_start + piece.queries].transpose(1, 2)
        assert torch.allclose(actual, expected, atol=1e-5)
