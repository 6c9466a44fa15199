"""The run files of the demo: the one that learns, and its control that differs in the learning rate alone.

Invariant: both come from one document, so that whatever the control does not show is owed to learning. The figures
were chosen for a machine of two cores: 3,840 episodes and their control in about nine minutes.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..contracts.runfile import RunConfig, parse_run
from .policy_recipe import COMPLETION, TEMPERATURE

ENVIRONMENT: Final = "calculator"
STEPS: Final = 60
GROUPS: Final = 16
"""Groups drawn for a step. Late in the run most have no signal: a step takes those that have one."""
MEMBERS: Final = 4
"""Few, so that a step sees many tasks: a task that fails, fails as a whole, and makes the mean of few tasks jump."""
EPISODES: Final = STEPS * GROUPS * MEMBERS
EVALUATED: Final = 256
CONTROL_STEPS: Final = 3
_AT_ONCE: Final = 64
"""Requests in flight: what the engine batches on a few cores without starving the workers beside it."""
_LEARNING_RATE: Final = 7e-4
_WARMUP: Final = 10
"""Steps. Without them the first figures would show what was learnt already."""
_BETAS: Final = (0.9, 0.99)
"""A long memory of the gradient's size: late steps have few groups and so large gradients."""


@dataclass(frozen=True)
class DemoSize:
    """How much of the demo is played."""

    steps: int
    groups: int
    """Of one step."""

    @property
    def begins(self) -> bool:
        """Enough for a mean reward before anything was learnt."""
        return self.steps >= 3 and self.groups >= GROUPS

    @property
    def whole(self) -> bool:
        """Enough for it to have learnt."""
        return self.steps >= STEPS and self.groups >= GROUPS


def demo_size(steps: int | None, episodes: int | None) -> DemoSize:
    """The whole demo, or as many steps, or about as many training episodes, as asked for."""
    a_step = GROUPS * MEMBERS
    if episodes is None:
        return DemoSize(steps or STEPS, GROUPS)
    chosen = steps or max(1, round(episodes / a_step))
    return DemoSize(chosen, min(GROUPS, max(1, math.ceil(episodes / (chosen * MEMBERS)))))


def demo_run(policy: Path, engine: str, size: DemoSize, seed: int) -> RunConfig:
    """The run that learns, and at its end an evaluation on tasks that no group was drawn from."""
    sets = [{"id": ENVIRONMENT, "split": "eval", "tasks": EVALUATED, "samples": 1}]
    changes = {"name": "demo", "eval": {"at_end": True, "sets": sets}}
    return parse_run(_document(policy, engine, size.groups, seed, size.steps, _LEARNING_RATE) | changes)


def control_run(policy: Path, engine: str, size: DemoSize, seed: int) -> RunConfig:
    """The same at learning rate 0, for a few steps: everything runs and nothing is learnt."""
    steps = min(CONTROL_STEPS, size.steps)
    return parse_run(_document(policy, engine, size.groups, seed, steps, 0.0) | {"name": "demo-control"})


def _document(policy: Path, engine: str, groups: int, seed: int, steps: int, lr: float) -> dict[str, Any]:
    optim = {"lr": lr, "warmup": _WARMUP, "decay": "linear", "betas": _BETAS}
    return {
        "seed": seed,
        "model": {"path": str(policy)},
        "engines": [{"kind": "dev", "url": engine, "concurrency": _AT_ONCE}],
        "environments": [{"id": ENVIRONMENT, "group_size": MEMBERS}],
        "sampling": {"temperature": TEMPERATURE, "max_tokens": COMPLETION},
        "batch": {"groups": groups, "when_short": "train", "resample_cap": 1},
        "staleness": {"max": 1},
        "trainer": {"kind": "builtin", "steps": steps, "optim": optim},
    }
