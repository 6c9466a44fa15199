"""Small models and hand-made groups for the tests of the trainer."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from atropos.contracts.training import (
    OptimConfig,
    SampleEpisode,
    SampleGroup,
    SampleSegment,
    TrainerConfig,
    TrainerKind,
)
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 24


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, tied: bool = False) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,  # far from uniform
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=0,
            dtype="float32",
        )
        return LlamaForCausalLM(config).to(dtype).eval()


def tiny_folder(folder: Path, seed: int = 0, tied: bool = False) -> Path:
    """A model folder with some of the files that stand beside the weights in real ones."""
    tiny_model(seed, tied=tied).save_pretrained(str(folder))
    (folder / "tokenizer.json").write_text('{"pretend": true}\n')
    (folder / "renderer.json").write_text('{"name": "pretend"}\n')
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 3]}\n')
    return folder


def trainer_config(
    *, lr: float = 1e-2, warmup: int = 0, clip: float = 1.0, micro_batch_tokens: int = 64
) -> TrainerConfig:
    optim = OptimConfig(lr=lr, warmup=warmup, clip=clip)
    return TrainerConfig(kind=TrainerKind.BUILTIN, optim=optim, micro_batch_tokens=micro_batch_tokens)


Logprobs = Callable[[Sequence[int]], list[float]]
"""Of each token but the first."""


def segment_of(
    ids: Sequence[int], mask: Sequence[int], logprobs: Logprobs | None = None, temperature: float = 1.0
) -> SampleSegment:
    """Sampled by the policy whose `logprobs` are given, else with a probability of 1/2 a token."""
    said = [0.0, *(logprobs(ids) if logprobs else [-0.6931] * (len(ids) - 1))]
    return SampleSegment(
        ids=list(ids),
        mask=list(mask),
        logprobs=[value if trains else 0.0 for value, trains in zip(said, mask, strict=True)],
        temperatures=[temperature if trains else 0.0 for trains in mask],
    )


def group_of(
    number: int, rewards: Sequence[float | None], segments: Sequence[SampleSegment | tuple[SampleSegment, ...]]
) -> SampleGroup:
    """A group with one episode a reward."""
    episodes = (
        SampleEpisode(member, reward, parts if isinstance(parts, tuple) else (parts,))
        for member, (reward, parts) in enumerate(zip(rewards, segments, strict=True))
    )
    return SampleGroup(number, "toy", tuple(episodes))


def random_groups(
    seed: int, groups: int = 3, members: int = 4, logprobs: Logprobs | None = None, temperature: float = 1.0
) -> list[SampleGroup]:
    """Episodes of one or two segments of 3 to 14 tokens, half of which train, with rewards 0 and 1."""
    rng = random.Random(seed)

    def segment() -> SampleSegment:
        length = rng.randint(3, 14)
        mask = [0, 1, *(rng.randint(0, 1) for _ in range(length - 2))]
        return segment_of([rng.randrange(VOCABULARY) for _ in range(length)], mask, logprobs, temperature)

    return [
        group_of(
            number,
            [float(member % 2) for member in range(members)],
            [tuple(segment() for _ in range(rng.randint(1, 2))) for _ in range(members)],
        )
        for number in range(groups)
    ]
