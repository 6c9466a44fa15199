"""The cold start ends where its measured reward lies in the band, and the same seed gives the same weights."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from atropos.trainer.cold_start import (
    ColdStart,
    ColdStartFailed,
    ColdStartSettings,
    Demonstration,
    Progress,
    Sampler,
    cold_start,
    imitation_loss,
)
from torch.nn import functional

END, PAD, VOCABULARY = 0, 1, 24
SMALL = ColdStartSettings(
    width=32, layers=1, heads=2, feed_forward=48, context=16, batch=32, warmup=5, max_steps=400, measure_every=10,
    measure_below=9.0, snapshot_every=2, episodes=256,
)  # fmt: skip


def echoes(right: float, seed: int = 0) -> list[Demonstration]:
    """Told a number, say it again: right with the given probability, else any other."""
    rng = random.Random(seed)
    out = []
    for _ in range(400):
        told = rng.randrange(4, VOCABULARY)
        said = told if rng.random() < right else rng.randrange(4, VOCABULARY)
        out.append(Demonstration([2, told, 3, said, END], [0, 0, 0, 1, 1]))
    return out


def echo_reward(sampler: Sampler, episodes: int) -> float:
    told = [4 + i % (VOCABULARY - 4) for i in range(episodes)]
    said = sampler([[2, number, 3] for number in told], 2)
    return sum(answer == [number, END] for number, answer in zip(told, said, strict=True)) / episodes


def start(
    right: float,
    settings: ColdStartSettings = SMALL,
    seed: int = 0,
    measure: Callable[[Sampler, int], float] = echo_reward,
    progress: Callable[[Progress], None] | None = None,
) -> ColdStart:
    return cold_start(
        echoes(right),
        vocabulary=VOCABULARY,
        pad_id=PAD,
        stop_ids=[END],
        measure=measure,
        settings=settings,
        seed=seed,
        threads=1,
        progress=progress,
    )


def weights(result: ColdStart) -> dict[str, torch.Tensor]:
    return dict(result.model.state_dict())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_ends_inside_the_band(seed: int) -> None:
    result = start(right=0.25, seed=seed)
    assert 0.2 <= result.reward <= 0.3
    assert not result.model.config.tie_word_embeddings


def test_a_start_that_ran_past_the_band_goes_back_to_a_snapshot() -> None:
    result = start(right=1.0, settings=replace(SMALL, measure_every=200))
    assert result.step < 200
    assert 0.2 <= result.reward <= 0.3


def test_the_reward_is_measured_at_the_temperature_that_is_asked_for() -> None:
    """Colder samples follow the demonstrations' most likely answer, so that less training reaches the band."""
    cold, warm = (
        start(right=0.25, settings=replace(SMALL, temperature=value, measure_every=2)) for value in (0.3, 1.0)
    )
    assert cold.step < warm.step


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second, other = start(0.25), start(0.25), start(0.25, seed=5)
    assert (first.step, first.reward) == (second.step, second.reward)
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())
    assert any(not torch.equal(value, weights(other)[name]) for name, value in weights(first).items())


def test_a_reward_that_never_comes_is_a_sentence() -> None:
    settings = replace(SMALL, max_steps=20)
    with pytest.raises(ColdStartFailed, match=r"20 steps and its reward is 0\.00, not between 0\.2 and 0\.3"):
        start(0.25, settings, measure=lambda sampler, episodes: 0.0)


def test_nothing_global_is_left_changed() -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    start(0.25)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads


def test_progress_is_told_with_loss_and_reward() -> None:
    seen: list[Progress] = []
    start(0.25, progress=seen.append)
    assert [one.step for one in seen] == list(range(1, len(seen) + 1))
    assert seen[0].reward is None
    assert seen[-1].loss < seen[0].loss


def test_the_loss_is_that_of_what_was_said_whatever_the_padding() -> None:
    model = start(0.25).model.eval()
    batch = [
        Demonstration([2, 9, 3, 9, END], [0, 0, 0, 1, 1]),
        Demonstration([2, 9, 9, 9, 9, 3, 11, END], [0, 0, 0, 0, 0, 0, 1, 1]),
    ]

    def alone(one: Demonstration) -> Sequence[torch.Tensor]:
        logits = model(torch.tensor([list(one.ids)])).logits[0, :-1]
        losses = functional.cross_entropy(logits, torch.tensor(list(one.ids)[1:]), reduction="none")
        return [loss for loss, said in zip(losses, list(one.mask)[1:], strict=True) if said]

    expected = torch.stack([loss for one in batch for loss in alone(one)]).mean()
    torch.testing.assert_close(imitation_loss(model, batch, PAD), expected)
