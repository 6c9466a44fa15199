"""The supervised cold start of a tiny policy, stopped by the reward it earns.

Invariant: the weights that come out earn a mean reward inside the band, measured by sampling whole episodes. A loss
alone cannot say that: the skill of copying a tool's result appears late and at once. Below the band reinforcement finds
nothing to reinforce, above it nothing is left to show. Once the reward may be near, snapshots are kept, so that a
stretch of training that runs past the band is searched backwards instead of thrown away.

Deterministic for given demonstrations, settings, thread count and build.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from .generate import generate

_MARGIN: Final = 0.03
"""A reward this far inside the band ends training at once: about 1.5 standard errors of a full measurement."""
_SCREEN: Final = 96
"""Episodes of a first look; the rest are sampled only where that look is near the band."""


@dataclass(frozen=True)
class Demonstration:
    """One demonstrated episode: int ids and a mask of equal length, 1 on what the policy said."""

    ids: Sequence[int]
    mask: Sequence[int]


@dataclass(frozen=True)
class ColdStartSettings:
    """Shape and schedule. Changing any of them changes the policy, and so its place in the cache."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    feed_forward: int = 256
    context: int = 512
    batch: int = 64
    learning_rate: float = 3e-3
    warmup: int = 30
    clip: float = 1.0
    max_steps: int = 1500
    measure_every: int = 25
    measure_below: float = 0.6
    """Smoothed loss from which on the reward is measured: training never ends above it."""
    snapshot_every: int = 5
    episodes: int = 512
    """Of a full measurement: its standard error is at most 0.022."""
    band: tuple[float, float] = (0.2, 0.3)
    temperature: float = 1.0
    """Of the samples that are measured. A tiny policy earns much more at 0.8 than at 1, and how much more differs from
    one to the next: measure at what will be played at."""


@dataclass(frozen=True)
class Progress:
    """Where a cold start is. `reward` is the last measured one."""

    step: int
    loss: float
    reward: float | None


@dataclass(frozen=True)
class ColdStart:
    """A policy whose measured mean reward is inside the band."""

    model: LlamaForCausalLM = field(repr=False)
    step: int
    reward: float
    loss: float


class ColdStartFailed(RuntimeError):
    """The reward never came to lie inside the band; one sentence with what to do."""


Sampler = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""(prompts, max_tokens) → completions, each with its end token unless cut."""
Measure = Callable[[Sampler, int], float]
"""(sampler, episodes) → mean reward. Called with the same number it must use the same tasks."""


def cold_start(
    demonstrations: Sequence[Demonstration],
    *,
    vocabulary: int,
    pad_id: int,
    stop_ids: Sequence[int],
    measure: Measure,
    settings: ColdStartSettings | None = None,
    seed: int = 0,
    threads: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> ColdStart:
    """Train from nothing until the measured reward lies in the band. Raises ColdStartFailed after `max_steps`."""
    chosen = settings or ColdStartSettings()
    with _threads(threads):
        run = _Run(demonstrations, vocabulary, pad_id, stop_ids, measure, chosen, seed)
        for step in range(1, chosen.max_steps + 1):
            run.train_step(step)
            if run.loss < chosen.measure_below:
                if step % chosen.snapshot_every == 0:
                    run.keep(step)
                if step % chosen.measure_every == 0 and (found := run.look(step)) is not None:
                    return found
            if progress is not None:
                progress(Progress(step, run.loss, run.reward))
    low, high = chosen.band
    last = "was never measured" if run.reward is None else f"is {run.reward:.2f}"
    raise ColdStartFailed(
        f"the cold start took {chosen.max_steps} steps and its reward {last}, not between {low} and {high} "
        f"(loss {run.loss:.2f}); try another seed, or demonstrations with more correct ones"
    )


def save(result: ColdStart, folder: Path) -> None:
    """Write config and safetensors weights beside the tokenizer in `folder`."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        result.model.save_pretrained(str(folder))
    finally:
        if shown:
            logging.enable_progress_bar()


class _Run:
    """One cold start in progress."""

    def __init__(
        self,
        demonstrations: Sequence[Demonstration],
        vocabulary: int,
        pad_id: int,
        stop_ids: Sequence[int],
        measure: Measure,
        settings: ColdStartSettings,
        seed: int,
    ) -> None:
        self.settings = settings
        self.loss = float("inf")
        """Smoothed over about ten steps."""
        self.reward: float | None = None
        self._data = demonstrations
        self._pad, self._stops, self._measure, self._seed = pad_id, stop_ids, measure, seed
        self._order = random.Random(seed)
        self._kept: list[tuple[int, dict[str, Any]]] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = _new_model(settings, vocabulary, pad_id, stop_ids[0])
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def train_step(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * min(1.0, step / self.settings.warmup)
        batch = [self._data[self._order.randrange(len(self._data))] for _ in range(self.settings.batch)]
        loss = imitation_loss(self._model, batch, self._pad)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self.settings.clip)
        self._optimizer.step()
        value = float(loss.detach())
        self.loss = value if self.loss == float("inf") else 0.9 * self.loss + 0.1 * value

    def keep(self, step: int) -> None:
        self._kept.append((step, copy.deepcopy(self._model.state_dict())))

    def look(self, step: int) -> ColdStart | None:
        """Measure now; the result where the reward is well inside the band, here or at a snapshot since last time."""
        low, high = self.settings.band
        self.reward = self._measured(step)
        if low + _MARGIN <= self.reward <= high - _MARGIN:
            return ColdStart(self._model, step, self.reward, self.loss)
        if self.reward > high - _MARGIN:
            return self._look_back(step)
        self._kept.clear()
        return None

    def _look_back(self, now: int) -> ColdStart | None:
        """Bisect the snapshots since the last measurement, which was below the band, for one inside it."""
        low, high = self.settings.band
        best: tuple[float, int] | None = None
        first, last = 0, len(self._kept) - 1
        resume = copy.deepcopy(self._model.state_dict())
        while first <= last:
            middle = (first + last) // 2
            step, weights = self._kept[middle]
            self._model.load_state_dict(weights)
            reward = self._measured(step)
            if low + _MARGIN <= reward <= high - _MARGIN:
                return ColdStart(self._model, step, reward, self.loss)
            if low <= reward <= high:
                best = (reward, middle)
            first, last = (middle + 1, last) if reward < low + _MARGIN else (first, middle - 1)
        if best is not None:
            reward, index = best
            self._model.load_state_dict(self._kept[index][1])
            return ColdStart(self._model, self._kept[index][0], reward, self.loss)
        self._model.load_state_dict(resume)
        if self.reward is not None and self.reward <= high:
            return ColdStart(self._model, now, self.reward, self.loss)
        self._kept.clear()
        return None

    def _measured(self, step: int) -> float:
        low, high = self.settings.band
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)

        def sampler(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
            return generate(
                self._model,
                prompts,
                max_tokens=max_tokens,
                stop_ids=self._stops,
                generator=generator,
                temperature=self.settings.temperature,
            )

        self._model.eval()
        first = self._measure(sampler, min(_SCREEN, self.settings.episodes))
        near = low - 3 * _MARGIN <= first <= high + 3 * _MARGIN
        reward = self._measure(sampler, self.settings.episodes) if near else first
        self._model.train()
        return reward


def imitation_loss(model: LlamaForCausalLM, batch: Sequence[Demonstration], pad_id: int) -> torch.Tensor:
    """Mean cross-entropy (float32 scalar, nats a token) over the masked tokens of all demonstrations together."""
    longest = max(len(one.ids) for one in batch)
    ids_BT = torch.tensor([[*one.ids, *[pad_id] * (longest - len(one.ids))] for one in batch])
    said_BT = torch.tensor([[*one.mask, *[0] * (longest - len(one.mask))] for one in batch])[:, 1:].bool()
    # Padding is on the right and attention is causal, so padding is never seen; the head runs where loss is.
    hidden_NH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1][said_BT]
    return functional.cross_entropy(model.lm_head(hidden_NH), ids_BT[:, 1:][said_BT])


def _new_model(settings: ColdStartSettings, vocabulary: int, pad_id: int, end_id: int) -> LlamaForCausalLM:
    """Embeddings are not tied: engines reload tied ones wrongly or not at all."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=False,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=end_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with `count` threads and with denormal numbers taken as zero: a young optimizer's second moments are full
    of them, and they made the first steps five times slower where this was measured."""
    before = torch.get_num_threads()
    torch.set_flush_denormal(True)
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)
