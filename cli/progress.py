"""The tiny policy with its progress shown: a bar at a terminal, a line now and then elsewhere."""

import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from .policy import PolicyProgress, ensure_policy, ensure_policy_shown

_LINE_EVERY_S: Final = 10.0


def tiny_policy(home: Path, seed: int) -> Path:
    """Its folder, made on first use. Raises PolicyError."""
    console = Console(stderr=True)
    if console.is_terminal:
        return ensure_policy_shown(home, seed, console)
    said = [0.0]

    def line(progress: PolicyProgress) -> None:
        if time.monotonic() - said[0] < _LINE_EVERY_S:
            return
        said[0] = time.monotonic()
        reward = "" if progress.reward is None else f", reward {progress.reward:.2f}"
        console.print(Text(f"tiny policy: {progress.done:.0%} made{reward}"), soft_wrap=True)

    return ensure_policy(home, seed, line)
