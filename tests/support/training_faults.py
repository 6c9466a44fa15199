"""Fault points inside a train step and a publication: around functions of the product, which knows none of them.

Invariant: a point is armed by a file that says how often it is passed before and what happens then, and acts once. So a
test arms one, starts a run, and sees by the file being gone that it happened.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import atropos.activities.publishing as publishing
import atropos.activities.training as training
import atropos.trainer.step as step
from atropos.cli.worker import Replaced
from atropos.db.batches import Leased
from atropos.inference.control import UNVERSIONED, EngineControl
from atropos.trainer import checkpoint

KILL, STOP = "kill", "stop"
POINTS = (
    "leased",
    "gradient",
    "optimised",
    "half-written",
    "written",
    "before-commit",
    "committed",
    "loaded",
    "probing",
)
"""Where a trainer or publisher may die, in the order it comes by."""


@dataclass(frozen=True)
class Armed:
    """Files of `folder`: the point's name → `PASSES ACTION`."""

    folder: Path

    def arm(self, point: str, action: str = KILL, passes: int = 1) -> None:
        """Act the next time but `passes` that the point is reached."""
        hidden = self.folder / f".{point}"
        hidden.write_text(f"{passes} {action}")
        hidden.rename(self.folder / point)

    def waiting(self, point: str) -> bool:
        """Whether it has not happened yet."""
        return (self.folder / point).exists()

    def stopped(self, point: str) -> int | None:
        """The process that stopped itself there."""
        found = self.folder / f"{point}.stopped"
        return int(found.read_text()) if found.exists() else None

    def forget(self, point: str) -> None:
        """It goes on, and may stop there again."""
        (self.folder / f"{point}.stopped").unlink()

    def take(self, point: str) -> str | None:
        """What to do here and now."""
        file = self.folder / point
        try:
            passes, action = file.read_text().split()
        except FileNotFoundError:
            return None
        if int(passes) > 0:
            self.arm(point, action, int(passes) - 1)
            return None
        file.unlink()
        return action

    def reach(self, point: str) -> None:
        action = self.take(point)
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # nothing after this line runs while the signal is on its way
        elif action == STOP:
            hidden = self.folder / f".{point}.stopped"
            hidden.write_text(str(os.getpid()))
            hidden.rename(self.folder / f"{point}.stopped")
            os.kill(os.getpid(), signal.SIGSTOP)


def armed(folder: Path) -> Replaced:
    """Put the points of `folder` around this process's own trainer and publisher."""
    points = Armed(folder)
    _around(step, "accumulate", after=lambda _: points.reach("gradient"))
    _around(step, "train_step", after=lambda _: points.reach("optimised"))
    _around(checkpoint, "_seal", before=lambda: points.reach("half-written"))
    _around(checkpoint, "write", after=lambda _: points.reach("written"))
    _around_async(
        training, "lease_batch", after=lambda found: points.reach("leased") if isinstance(found, Leased) else None
    )
    _around_async(
        training,
        "commit_step",
        before=lambda: points.reach("before-commit"),
        after=lambda done: points.reach("committed") if done is not None else None,
    )
    _around_async(publishing, "publish", before=lambda: points.reach("loading"))

    class Control(EngineControl):
        async def load(self, path: Path, *, limit_s: float) -> None:
            found = points.take("wrong")
            await super().load(path if found is None else Path(found), limit_s=limit_s)

        async def set_version(self, label: str) -> None:
            if label != UNVERSIONED:
                points.reach("loaded")
            await super().set_version(label)

        async def score(self, *arguments: Any, **named: Any) -> list[list[float]]:
            points.reach("probing")
            return await super().score(*arguments, **named)

    return Replaced(control_engine=Control)


def _around(
    module: Any, name: str, before: Callable[[], object] | None = None, after: Callable[[Any], object] | None = None
) -> None:
    inner = getattr(module, name)

    def outer(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before()
        result = inner(*arguments, **named)
        if after is not None:
            after(result)
        return result

    setattr(module, name, outer)


def _around_async(
    module: Any, name: str, before: Callable[[], object] | None = None, after: Callable[[Any], object] | None = None
) -> None:
    inner = getattr(module, name)

    async def outer(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before()
        result = await inner(*arguments, **named)
        if after is not None:
            after(result)
        return result

    setattr(module, name, outer)
