"""Sampling in this process: a row depends on its own prompt alone."""

import pytest
import torch
from atropos.trainer.generate import generate
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def sharp() -> LlamaForCausalLM:
    """A random model whose next token is all but certain, so that samples can be compared."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(100_000)
    return model


def draw(model: LlamaForCausalLM, prompts: list[list[int]], stops: list[int], max_tokens: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return generate(model, prompts, max_tokens=max_tokens, stop_ids=stops, generator=generator)


def test_padding_and_neighbours_change_nothing(sharp: LlamaForCausalLM) -> None:
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [2, 2]]
    assert draw(sharp, prompts, [31]) == [draw(sharp, [prompt], [31])[0] for prompt in prompts]


def test_tokens_are_those_of_a_plain_forward_pass(sharp: LlamaForCausalLM) -> None:
    (said,) = draw(sharp, [[3, 1, 4]], [31])
    ids = [3, 1, 4, *said]
    with torch.no_grad():
        best = sharp(torch.tensor([ids])).logits[0, 2:-1].argmax(-1).tolist()
    assert best == said


def test_a_row_ends_with_its_stop_token_or_is_cut(sharp: LlamaForCausalLM) -> None:
    prompts = [[1, 2, 3], [4], [5, 6, 7]]
    free = draw(sharp, prompts, [31], max_tokens=6)
    stop = free[1][3]
    for whole, said in zip(free, draw(sharp, prompts, [stop], max_tokens=6), strict=True):
        expected = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert said == expected
        assert len(said) <= 6


def test_a_temperature_divides_the_logits() -> None:
    """Ten thousand first tokens of an even model: at a half its probabilities are squared and normed again."""
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        probability = torch.softmax(model(torch.tensor([[1, 2]])).logits[0, -1], -1)
    said = generate(
        model,
        [[1, 2]] * 10_000,
        max_tokens=1,
        stop_ids=[3],
        generator=torch.Generator().manual_seed(1),
        temperature=0.5,
    )
    drawn = torch.bincount(torch.tensor(said)[:, 0], minlength=4) / len(said)
    squared = probability**2 / (probability**2).sum()
    assert (probability - squared).abs().max() > 0.05
    torch.testing.assert_close(drawn, squared, atol=0.02, rtol=0)


def test_nothing_asked_gives_nothing(sharp: LlamaForCausalLM) -> None:
    assert draw(sharp, [], [31]) == []
    assert draw(sharp, [[1]], [31], max_tokens=0) == [[]]
