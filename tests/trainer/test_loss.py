"""The loss of a token and what is measured beside it: specified values, and gradients against autograd."""

from math import exp, log

import pytest
import torch
from atropos.trainer.loss import Sums, clipped_loss, grpo, token_logprobs
from hypothesis import given
from hypothesis import strategies as st


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_and_sums(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, tokens: int | None = None
) -> tuple[torch.Tensor, Sums]:
    return grpo(logprobs, behaviour, advantages, torch.zeros_like(logprobs), tokens or len(logprobs))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 1, -1.28), (1.5, -1, 1.5), (0.5, 1, -0.5), (0.5, -1, 0.8), (10, -1, 10), (1, 2, -2), (1.25, 1, -1.25)],
)
def test_a_token_has_the_loss_it_is_specified_to_have(ratio: float, advantage: float, expected: float) -> None:
    assert float(clipped_loss(doubles(ratio), doubles(advantage))) == pytest.approx(expected)
    loss, _ = loss_and_sums(doubles(log(ratio)) - 2, doubles(-2), doubles(advantage))
    assert float(loss) == pytest.approx(expected)


def test_losses_are_averaged_over_all_tokens_of_the_batch() -> None:
    """Episodes of two tokens with loss 1 and of four with loss 2: 10 / 6, not the mean of the episodes' means."""
    zeros = torch.zeros(6, dtype=torch.float64)
    advantages = doubles(-1, -1, -2, -2, -2, -2)
    whole, _ = loss_and_sums(zeros, zeros, advantages)
    parts = [loss_and_sums(zeros[at], zeros[at], advantages[at], 6) for at in (slice(0, 2), slice(2, 6))]
    assert float(whole) == pytest.approx(10 / 6)
    assert sum(float(loss) for loss, _ in parts) == pytest.approx(10 / 6)
    assert (parts[0][1] + parts[1][1]).metrics()["loss"] == pytest.approx(10 / 6)


def test_no_token_at_all_is_no_division_by_zero() -> None:
    loss, sums = loss_and_sums(torch.zeros(0), torch.zeros(0), torch.zeros(0))
    assert float(loss) == 0
    assert set(sums.metrics().values()) == {0.0}


def test_at_the_behaviour_policy_the_gradient_is_that_of_reinforce() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1))
    ids, temperatures = torch.tensor([0, 3, 6, 3, 1]), torch.ones(5)
    advantages = doubles(1.5, -0.5, 0, 2, -1)
    logprobs, entropy = token_logprobs(logits, ids, temperatures)
    loss, _ = grpo(logprobs, logprobs.detach(), advantages, entropy, 5)
    (found,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(-(advantages * token_logprobs(logits, ids, temperatures)[0]).mean(), logits)
    assert torch.allclose(found, expected, atol=1e-12)
    assert float(found.abs().max()) > 0.1


@pytest.mark.parametrize(
    ("ratio", "advantage", "pulls"),
    [(1.5, 1, False), (1.5, -1, True), (0.5, 1, True), (0.5, -1, False), (1.27, 1, True), (1.29, 1, False)],
)
def test_the_clip_takes_the_gradient_where_the_policy_went_far_enough(
    ratio: float, advantage: float, pulls: bool
) -> None:
    logprobs = doubles(log(ratio) - 3).requires_grad_()
    loss, sums = loss_and_sums(logprobs, doubles(-3), doubles(advantage))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert float(gradient) == pytest.approx(-ratio * advantage if pulls else 0)
    assert sums.clipped == (0 if pulls else 1)


def test_metrics_have_the_values_they_are_specified_by() -> None:
    """Log ratios 0, 1, -1 and 2."""
    behaviour = doubles(-3, -3, -3, -3)
    _, sums = grpo(behaviour + doubles(0, 1, -1, 2), behaviour, doubles(1, 1, 1, 1), doubles(1, 2, 3, 4), 4)
    metrics = sums.metrics()
    assert metrics["ess"] == pytest.approx(0.521528, abs=1e-6)
    assert metrics["max_ratio"] == pytest.approx(exp(2))
    assert metrics["mean_abs_logprob_difference"] == pytest.approx(1.0)
    assert metrics["k3"] == pytest.approx((exp(1) + exp(-1) + exp(2) - 3 - 2) / 4)
    assert metrics["clip_fraction"] == pytest.approx(0.5)
    assert metrics["entropy"] == pytest.approx(2.5)
    assert metrics["tokens"] == 4


def test_k3_estimates_the_divergence_of_the_behaviour_policy_from_the_trained_one() -> None:
    """Exactly so in expectation over what the behaviour policy samples: Bernoulli 0.5 against 0.25 is 0.143841."""
    behaviour, policy = doubles(0.5, 0.5).log(), doubles(0.25, 0.75).log()
    _, sums = loss_and_sums(policy, behaviour, doubles(1, 1))
    assert sums.metrics()["k3"] == pytest.approx(0.143841, abs=1e-6)


def test_an_absurd_ratio_stays_finite_and_teaches_nothing() -> None:
    logprobs = doubles(-0.1).requires_grad_()
    loss, sums = loss_and_sums(logprobs, doubles(-1000), doubles(-1))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert float(gradient) == 0
    assert sums.finite()
    assert sums.metrics()["max_ratio"] == pytest.approx(exp(20))


def test_a_value_that_is_no_number_shows() -> None:
    assert not loss_and_sums(doubles(float("nan")), doubles(-1), doubles(1))[1].finite()


def test_each_token_is_judged_at_the_temperature_it_was_sampled_at() -> None:
    logits = doubles(1, 2, 4).repeat(2, 1)
    logprobs, entropies = token_logprobs(logits, torch.tensor([2, 2]), doubles(1, 2))
    for row, temperature in enumerate([1, 2]):
        shares = [exp(value / temperature) for value in (1, 2, 4)]
        chances = [share / sum(shares) for share in shares]
        assert float(logprobs[row]) == pytest.approx(log(chances[2]))
        assert float(entropies[row]) == pytest.approx(-sum(p * log(p) for p in chances))


@given(
    st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3)), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_loss_and_metrics_do_not_depend_on_where_the_batch_is_cut(
    tokens: list[tuple[float, float, float]], cut: int
) -> None:
    logprobs, behaviour, advantages = torch.tensor(tokens, dtype=torch.float64).T
    _, whole = loss_and_sums(logprobs, behaviour, advantages)
    first = loss_and_sums(logprobs[:cut], behaviour[:cut], advantages[:cut], len(tokens))[1]
    rest = loss_and_sums(logprobs[cut:], behaviour[cut:], advantages[cut:], len(tokens))[1]
    assert (first + rest).metrics() == pytest.approx(whole.metrics(), abs=1e-9)
    assert whole.metrics()["k3"] >= 0
    assert 0 < whole.metrics()["ess"] <= 1 + 1e-12
