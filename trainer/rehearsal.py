"""A first train step before there is one to take: on a model of a few random weights, in a folder that is thrown away.

Why: a first step loads thousands of modules behind torch, seconds of a CPU, while the interpreter is held again and
again. A worker that has rehearsed takes up the step of a dead one at once, and no heartbeat waits for an import.

Invariant: nothing is left of it but loaded code. Random state is as before; no device but the CPU is touched.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ..contracts.training import SampleEpisode, SampleGroup, SampleSegment, TrainerConfig, TrainerKind
from .learner import Learner, need_torch

_TOKENS: Final = 8


def rehearse() -> None:
    """Load, step, save and restore. Raises TrainerProblem where something is not installed."""
    need_torch()
    import torch

    config = TrainerConfig(kind=TrainerKind.BUILTIN)
    with TemporaryDirectory(prefix="atropos-rehearsal-") as name, torch.random.fork_rng(devices=[]):
        model, saved = Path(name, "model"), Path(name, "saved")
        _make_model(model)
        learner = Learner.fresh(model, config, seed=0)
        learner.logprobs([[0, 1]])
        learner.step([SampleGroup(0, "rehearsal", (_episode(0, 0.0), _episode(1, 1.0)))])
        learner.save(saved)
        Learner.restore(saved, config).checksums()


def _make_model(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from .state import quiet

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=_TOKENS, num_hidden_layers=1, head_dim=8, max_position_embeddings=_TOKENS, **shape)
    with quiet():
        Qwen3ForCausalLM(config).save_pretrained(str(folder))


def _episode(member: int, reward: float) -> SampleEpisode:
    segment = SampleSegment(ids=[0, 1 + member], mask=[0, 1], logprobs=[0.0, -2.0], temperatures=[1.0, 1.0])
    return SampleEpisode(member, reward, (segment,))
