"""The trainer's head: a policy in memory, the step that improves it, and the folders it comes from and goes to.

Invariant: `digest` names the checkpoint that memory equals, or is None. Whoever steps compares it with what is
committed first; a head that differs is thrown away and restored. Identical state, batch, threads and build give
identical weights.

Importing this module does not load torch; making a Learner does.
"""

import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..contracts.training import SampleGroup, TrainerConfig
from . import checkpoint
from .problem import TrainerProblem

if TYPE_CHECKING:
    from .packing import Row
    from .state import State


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step that was taken."""

    version: int
    """Of the weights it made."""
    metrics: dict[str, float]
    """Finite numbers by name."""


class Learner:
    """Made by `fresh` or `restore`. For one thread at a time."""

    def __init__(self, state: "State", config: TrainerConfig, digest: str | None, threads: int) -> None:
        self.digest = digest
        """Hash of the checkpoint these weights were loaded from or last saved as; None after a step not saved yet."""
        self._state, self._config, self._threads = state, config, threads

    @classmethod
    def fresh(cls, path: Path, config: TrainerConfig, seed: int, *, threads: int = 1, device: str = "cpu") -> "Learner":
        """From a model folder, at version 0. Raises TrainerProblem where it cannot be loaded."""
        need_torch()
        from . import state

        return cls(state.fresh(path, config.optim, seed, _device(device)), config, None, threads)

    @classmethod
    def restore(cls, folder: Path, config: TrainerConfig, *, threads: int = 1, device: str = "cpu") -> "Learner":
        """From a checkpoint. Raises TrainerProblem where that is torn or changed."""
        need_torch()
        from . import state

        digest = checkpoint.verify(folder)
        return cls(state.read(folder, config.optim, _device(device)), config, digest, threads)

    @property
    def version(self) -> int:
        """Steps taken since the initial weights."""
        return self._state.version

    def step(self, groups: Sequence[SampleGroup], on_progress: Callable[[float], None] | None = None) -> StepOutcome:
        """Train once on the whole batch. `on_progress` is told the share done after every micro-batch.

        Raises TrainerProblem, with weights, optimiser and version as they were, where the batch holds nothing to train
        on or something that cannot train, or where loss or gradient is not finite.
        """
        from .packing import rows_of
        from .step import computing, learning_rate, train_step

        started = time.perf_counter()
        config, state = self._config, self._state
        rows = rows_of(groups, config.preset)
        if not rows:
            raise TrainerProblem("the batch holds no token to train on: no member of its groups has a reward.")
        self._check_ids([row.segment.ids for row in rows])
        with computing(self._threads, state.rng) as rng:
            metrics = train_step(
                state.model,
                state.optimizer,
                rows,
                lr=learning_rate(config, state.version + 1),
                clip=config.optim.clip,
                budget=config.micro_batch_tokens,
                before_update=self._forget_digest,
                on_progress=on_progress,
            )
            state.rng = rng()
        state.version += 1
        metrics |= _about(groups, rows) | {"seconds": time.perf_counter() - started}
        return StepOutcome(state.version, metrics)

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """The logprob of each token but the first, given those before it."""
        from .step import computing, sequence_logprobs

        self._check_ids(sequences)
        with computing(self._threads, self._state.rng):
            return sequence_logprobs(self._state.model, sequences, temperature, self._config.micro_batch_tokens)

    def checksums(self) -> dict[str, str]:
        """The SHA-256 of every parameter's bytes, by the parameter's name."""
        from .state import checksums

        return checksums(self._state.model)

    def save(self, folder: Path) -> str:
        """Write a checkpoint that an engine can load and a Learner can be restored from. Returns its hash.

        Saving the same state to the same folder again changes nothing.
        """
        from .state import fill

        self.digest = checkpoint.write(folder, lambda partial: fill(self._state, self._config, partial))
        return self.digest

    def _forget_digest(self) -> None:
        self.digest = None

    def _check_ids(self, sequences: Sequence[Sequence[int]]) -> None:
        known = self._state.vocabulary
        for ids in sequences:
            if foreign := [token for token in ids if not 0 <= token < known]:
                raise TrainerProblem(
                    f"token {foreign[0]} is not one of the model's {known}; it was sampled from another model."
                )


def _about(groups: Sequence[SampleGroup], rows: Sequence["Row"]) -> dict[str, float]:
    """What the batch was made of."""
    rewards = [one.reward for group in groups for one in group.episodes if one.reward is not None]
    return {
        "groups": float(len(groups)),
        "episodes": float(len(rewards)),
        "segments": float(len(rows)),
        "reward": math.fsum(rewards) / len(rewards),
        "length": sum(len(row.segment.ids) for row in rows) / len(rows),
    }


def _device(name: str) -> str:
    """`auto` is a CUDA device where there is one, else the CPU, where a small model is as fast as on MPS."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def need_torch() -> None:
    """Raises TrainerProblem where something is not installed."""
    try:
        for name in ("torch", "transformers", "safetensors", "numpy"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise TrainerProblem(
            f'training needs {error.name}, which is not installed; run: pip install "atropos-durable[train]"'
        ) from error
