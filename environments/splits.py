"""Proof by hash that the splits of an environment share no task.

Invariant: a task that is evaluated on is never trained on. A split's tasks are a function of the author's code, so
this is checked by key over the first N of each split, when a run starts and by `atropos env check`.
"""

from dataclasses import dataclass

from ..contracts.tasks import SPLITS
from .faults import EnvironmentProblem
from .loaded import LoadedEnvironment


class SplitsOverlap(EnvironmentProblem):
    """The same task is in two splits."""


@dataclass(frozen=True)
class SplitReport:
    """What was looked at: per split the number of tasks compared, how many of them differ, and its size."""

    compared: dict[str, int]
    distinct: dict[str, int]
    sizes: dict[str, int | None]


async def check_disjoint(env: LoadedEnvironment, n: int = 256) -> SplitReport:
    """Compare the first `n` tasks of each split by key. Raises SplitsOverlap naming the first shared task."""
    await env.ready()
    owner: dict[str, tuple[str, int]] = {}
    compared: dict[str, int] = {}
    distinct: dict[str, int] = {}
    sizes: dict[str, int | None] = {}
    for split in SPLITS:
        size = await env.size(split)
        count = n if size is None else min(n, size)
        keys = [(await env.make_task(split, index)).key for index in range(count)]
        for index, key in enumerate(keys):
            other, at = owner.setdefault(key, (split, index))
            if other != split:
                raise SplitsOverlap(
                    f"{env.name}: task {index} of {split} is task {at} of {other} (key {key}); "
                    "make the split part of how tasks are chosen"
                )
        compared[split], distinct[split], sizes[split] = count, len(set(keys)), size
    return SplitReport(compared, distinct, sizes)


async def require_size(env: LoadedEnvironment, split: str, needed: int) -> None:
    """Raise EnvironmentProblem unless a split has `needed` tasks."""
    size = await env.size(split)
    if size is not None and size < needed:
        has = f"{size} tasks" if size > 1 else "1 task" if size else "no tasks"
        asked = f"{needed} are asked for" if needed > 1 else "a run needs one at least"
        raise EnvironmentProblem(f"{env.name} has {has} in {split}; {asked}")
