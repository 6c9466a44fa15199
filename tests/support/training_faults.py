"""Fault points inside a train step and a publication: around functions of the product, which knows none of them.

Invariant: product code has no fault points; these stand around it, and act where a test armed them (`Armed`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import atropos.activities.publishing as publishing
import atropos.activities.training as training
import atropos.trainer.step as step
from atropos.cli.worker import Replaced
from atropos.db.batches import Leased
from atropos.inference.control import UNVERSIONED
from atropos.inference.vllm_control import VllmControl
from atropos.trainer import checkpoint

from .armed import Armed


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

    class Control(VllmControl):
        async def load(self, path: Path, label: str, *, limit_s: float) -> None:
            found = points.take("wrong")
            await super().load(path if found is None else Path(found), label, limit_s=limit_s)

        async def set_version(self, label: str) -> None:
            if label != UNVERSIONED:
                points.reach("loaded")
            await super().set_version(label)

        async def score(self, *arguments: Any, **named: Any) -> list[list[float]]:
            points.reach("probing")
            return await super().score(*arguments, **named)

        async def checksums(self, **named: Any) -> dict[str, str]:
            points.reach("probing")
            return await super().checksums(**named)

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
