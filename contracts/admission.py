"""Admission as pure arithmetic: how many groups may start, of which environment, on which task.

Invariant: what is admitted is a function of counts that come from rows, so a restart admits exactly what an
uninterrupted run would have. Draws walk a seeded permutation: within one pass over an environment's tasks none is
skipped and none repeats (NeMo-RL pull request 3599 shows what a separate cursor does instead).
"""

import hashlib
from collections.abc import Mapping


def room(*, concurrency: int, running: int, counted: int, budget: int | None) -> int:
    """Groups to admit in a run without trainer.

    `running`: groups' worth of episodes in flight; `counted`: groups that used the budget or still may (in flight,
    sealed, filtered).
    """
    free = concurrency - running
    if budget is not None:
        free = min(free, budget - counted)
    return max(0, free)


def room_training(
    *, concurrency: int, running: int, batch: int, ahead: int, unconsumed: int, unpublished: int, wanted: int
) -> int:
    """Groups to admit in a run that trains: (η + 1)·B - (in flight + unconsumed + unpublished), design of AReaL
    (arXiv 2505.24298, equation 3), computed from rows instead of counters.

    `running`: groups' worth of episodes in flight, all of them; `batch`: groups a step consumes (B); `ahead`: versions
    that rollouts may be ahead of the weights (η); `unconsumed`: training groups in flight, sealed or leased;
    `unpublished`: trained groups whose step's version is not on the engines yet; `wanted`: groups that the steps to
    come still need, those in `unconsumed` included. Filtered, failed and stale groups count nowhere, so they are
    replaced.
    """
    free = concurrency - running
    fresh = (ahead + 1) * batch - unconsumed - unpublished
    return max(0, min(free, fresh, wanted - unconsumed))


def next_environment(weights: Mapping[str, float], counted: Mapping[str, int]) -> str:
    """The environment furthest behind its weight; ties go to the first in order.

    Weights hold over groups that count: a failed group leaves the sum, so its environment is drawn again.
    """
    return min(weights, key=lambda label: (counted.get(label, 0) + 1) / weights[label])


def task_index(draw: int, size: int | None, seed: int) -> int:
    """Which task the `draw`-th draw of an environment takes. Endless environments (size None) are walked in order.

    Each pass over a finite one has a permutation of its own.
    """
    if draw < 0:
        raise ValueError("a draw is counted from 0")
    if size is None:
        return draw
    if size < 1:
        raise ValueError("an environment without tasks cannot be drawn from")
    return permute(draw % size, size, f"{seed}/{draw // size}")


def permute(index: int, size: int, key: str) -> int:
    """A keyed permutation of [0, size): a four-round Feistel network, walking past values ≥ size."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for round_no in range(4):
            left, right = right, left ^ (_mix(f"{key}/{round_no}/{right}") & mask)
        value = left << half | right
        if value < size:
            return value


def _mix(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
