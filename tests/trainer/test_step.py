"""One step through a model: what the batch's loss and gradient are, however it is cut."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from atropos.contracts.training import Preset, SampleGroup
from atropos.trainer.advantages import grpo
from atropos.trainer.loss import Sums
from atropos.trainer.packing import Row, rows_of
from atropos.trainer.step import accumulate, train_step
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from .batches import group_of, random_groups, segment_of, tiny_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models are far slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


MODEL = tiny_model(dtype=torch.float64)
GROUPS = st.builds(
    lambda seed, hot, silent: mixed(seed, hot, silent), st.integers(0, 10_000), st.floats(0.3, 3), st.booleans()
)


def mixed(seed: int, hot: float, silent: bool) -> list[SampleGroup]:
    """Groups at two temperatures, one with an unscored member; perhaps one without signal."""
    plain, (warm,) = random_groups(seed, 2, members=3), random_groups(seed + 1, 1, members=3, temperature=hot)
    groups = [*plain, replace(warm, group_no=10)]
    first, *others = groups[0].episodes
    groups[0] = replace(groups[0], episodes=(replace(first, reward=None), *others))
    if silent:
        groups[1] = replace(groups[1], episodes=tuple(replace(one, reward=0.5) for one in groups[1].episodes))
    return groups


def gradients(rows: list[Row], budget: int = 10_000) -> tuple[Sums, list[Tensor]]:
    MODEL.zero_grad()
    sums = accumulate(MODEL, rows, budget)
    return sums, [parameter.grad.clone() for parameter in MODEL.parameters()]


def spelled_out(groups: list[SampleGroup], *, reinforce: bool = False) -> tuple[float, list[Tensor]]:
    """The same loss token by token: no padding, no packing, nothing shared with what is tested but the advantages."""
    losses = []
    for group in groups:
        advantages = grpo([episode.reward for episode in group.episodes])
        for episode, advantage in zip(group.episodes, advantages, strict=True):
            for part in episode.segments if episode.reward is not None else ():
                logits: Any = MODEL(torch.tensor([part.ids])).logits[0]
                for t, trains in enumerate(part.mask):
                    if trains:
                        logprob = torch.log_softmax(logits[t - 1] / part.temperatures[t], -1)[part.ids[t]]
                        plain = -advantage * logprob
                        losses.append(plain if reinforce else clipped(logprob, part.logprobs[t], advantage))
    loss = torch.stack(losses).mean()
    return float(loss.detach()), list(torch.autograd.grad(loss, list(MODEL.parameters())))


def clipped(logprob: Tensor, behaviour: float, advantage: float) -> Tensor:
    ratio = (logprob - behaviour).exp()
    value = float(ratio.detach())
    bounded = min(max(value, 0.8), 1.28)
    return -advantage * ratio if advantage * value <= advantage * bounded else logprob * 0 - advantage * bounded


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=tolerance)


@settings(max_examples=10, deadline=None)
@given(GROUPS)
def test_loss_and_gradient_are_those_of_the_formula(groups: list[SampleGroup]) -> None:
    sums, found = gradients(rows_of(groups, Preset.GRPO), budget=100)
    loss, expected = spelled_out(groups)
    assert sums.loss == pytest.approx(loss, abs=1e-6)
    assert_close(found, expected, 1e-6)
    assert max(float(one.abs().max()) for one in found) > 1e-4


@settings(max_examples=20, deadline=None)
@given(GROUPS, st.integers(1, 400), st.randoms(use_true_random=False))
def test_padding_cut_and_order_change_nothing(groups: list[SampleGroup], budget: int, random: Any) -> None:
    rows = rows_of(groups, Preset.GRPO)
    whole, expected = gradients(rows)
    shuffled = rows[:]
    random.shuffle(shuffled)
    cut, found = gradients(shuffled, budget)
    assert cut.metrics() == pytest.approx(whole.metrics(), abs=1e-7)
    assert_close(found, expected, 1e-7)  # inside, the model's norms round to float32


def own_logprobs(ids: Any, temperature: float) -> list[float]:
    with torch.no_grad():
        all_TV = torch.log_softmax(MODEL(torch.tensor([ids])).logits[0, :-1] / temperature, -1)
    return [float(all_TV[t, token]) for t, token in enumerate(ids[1:])]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_on_policy_the_gradient_is_that_of_reinforce(temperature: float) -> None:
    groups = random_groups(5, logprobs=lambda ids: own_logprobs(ids, temperature), temperature=temperature)
    sums, found = gradients(rows_of(groups, Preset.GRPO), budget=50)
    _, expected = spelled_out(groups, reinforce=True)
    assert_close(found, expected, 1e-6)
    assert sums.clipped == 0


def test_a_member_without_a_reward_is_in_no_sum_and_no_denominator() -> None:
    (group,) = random_groups(3, groups=1)
    absent = replace(group, episodes=group.episodes[1:])
    unscored = replace(group, episodes=(replace(group.episodes[0], reward=None), *group.episodes[1:]))
    expected_sums, expected = gradients(rows_of([absent], Preset.GRPO))
    sums, found = gradients(rows_of([unscored], Preset.GRPO))
    assert sums == expected_sums
    assert_close(found, expected, 0)


def test_a_group_without_signal_has_no_gradient_but_its_tokens_count() -> None:
    (group,) = random_groups(3, groups=1)
    silent = group_of(8, [0.1, 0.1, 0.1], [segment_of([5, 6, 7, 8], [0, 1, 1, 1])] * 3)
    alone, nothing = gradients(rows_of([silent], Preset.GRPO))
    assert (alone.tokens, alone.loss) == (9, 0)
    assert all(not one.any() for one in nothing)
    without, expected = gradients(rows_of([group], Preset.GRPO))
    both, found = gradients(rows_of([group, silent], Preset.GRPO))
    assert both.tokens == without.tokens + 9
    share = without.tokens / both.tokens
    assert both.loss == pytest.approx(without.loss * share)
    assert_close(found, [one * share for one in expected], 1e-7)


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_a_gradient_longer_than_the_clip_is_shortened_to_it(clip: float) -> None:
    """Plain descent with a rate of 1 moves the weights by the gradient."""
    model = tiny_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    rows = rows_of(random_groups(0), Preset.GRPO)
    descent = torch.optim.SGD(model.parameters())
    metrics = train_step(model, descent, rows, lr=1.0, clip=clip, budget=100, before_update=lambda: None)
    moved = torch.cat([(new - old).flatten() for new, old in zip(model.parameters(), before, strict=True)])
    assert 1e-3 < metrics["grad_norm"] < 1e3
    assert float(moved.detach().norm()) == pytest.approx(min(clip, metrics["grad_norm"]), rel=1e-2)
