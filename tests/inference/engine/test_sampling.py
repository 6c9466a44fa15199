"""What is drawn, and the logprob it is reported with."""

import random

import torch
from atropos.inference.engine.sampling import draw
from atropos.inference.engine.wire import SamplingParams
from hypothesis import given, settings
from hypothesis import strategies as st

VOCABULARY = 12

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.2, 0.7, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 50]),
)
rows = st.lists(
    st.tuples(
        st.lists(st.floats(-8, 8, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
        params,
        st.floats(0, 1, exclude_max=True),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(rows)
def test_a_row_depends_on_itself_only(batch: list[tuple[list[float], SamplingParams, float]]) -> None:
    scores, parameters, uniforms = (list(column) for column in zip(*batch, strict=True))
    tokens, logprobs = draw(torch.tensor(scores), parameters, uniforms)
    for row in range(len(batch)):
        alone, logprob = draw(torch.tensor(scores[row : row + 1]), parameters[row : row + 1], uniforms[row : row + 1])
        assert alone.item() == tokens[row]
        assert abs(logprob.item() - logprobs[row].item()) < 1e-5


@settings(max_examples=60, deadline=None)
@given(rows)
def test_only_tokens_of_the_distribution_are_drawn(batch: list[tuple[list[float], SamplingParams, float]]) -> None:
    scores, parameters, uniforms = (list(column) for column in zip(*batch, strict=True))
    tokens, logprobs = draw(torch.tensor(scores), parameters, uniforms)
    assert bool(torch.isfinite(logprobs).all())
    for row, p in enumerate(parameters):
        ranked = sorted(scores[row], reverse=True)
        if p.greedy or p.top_k == 1:
            assert scores[row][int(tokens[row])] == ranked[0]
        elif p.top_k > 0:
            assert scores[row][int(tokens[row])] >= ranked[min(p.top_k, VOCABULARY) - 1]


def test_frequencies_follow_the_reported_logprobs() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    dice = random.Random(0)
    parameters = SamplingParams(temperature=0.5, top_p=0.97)
    count = 20_000
    tokens, logprobs = draw(scores.expand(count, 4), [parameters] * count, [dice.random() for _ in range(count)])
    for token in sorted(set(tokens.tolist())):
        chosen = tokens == token
        share = chosen.float().mean().item()
        assert abs(share - logprobs[chosen][0].exp().item()) < 0.01
    assert set(tokens.tolist()) == {1, 2}


def test_the_last_token_is_the_end_of_the_line() -> None:
    scores = torch.zeros(1, 3)
    tokens, _ = draw(scores, [SamplingParams()], [1.0 - 2**-53])
    assert tokens.item() == 2
