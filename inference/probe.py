"""Whether an engine computes with the weights it was told to load: one table, no I/O.

Invariant: `VERIFIED` is said only where the measurement could have shown the opposite. On the probe's tokens, let e be
the engine's logprobs, and the trainer's be b under the weights before and a under those after; distances are mean
absolute differences. `noise` is |e - trainer| as measured at version 0, where both hold the same weights.

Right weights differ from a by about one noise, never by more than `TOLERANCE` of them. By the triangle inequality
|e-b| >= |a-b| - |e-a|, so weights within tolerance are also nearer to a than to b by more than one noise as soon as
|a-b| > (2 * TOLERANCE + 1) noises. That is `POWER`: above it the old weights are always told from the new, and right
ones never fail for being too near the old. Below it the step is too small to be seen in logprobs: they can still
convict an engine, but only digests can acquit it.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

TOLERANCE: Final = 3.0
"""Noises by which right weights may differ. A mean over hundreds of tokens varies by far less than itself; kernels that
differ with the shape of a batch make the rest."""
POWER: Final = 2 * TOLERANCE + 1
"""Noises that a step must move the logprobs to be seen."""
FLOAT32_NOISE: Final = 1e-5
"""Least noise: two float32 implementations agree to about this, however well one calibration went."""
STRANGERS: Final = 0.3
"""Nats. Engine and trainer that differ by more at version 0 hold different weights; bfloat16 makes some hundredths."""
NOTHING: Final = hashlib.sha256(b"").hexdigest()
"""Digest of a tensor that the engine could not see: it says nothing about the weights."""
_NAMED: Final = 3
"""Tensors a reason names; the rest are counted."""

Logprobs = Sequence[Sequence[float]]


class Verdict(StrEnum):
    VERIFIED = "verified"
    WRONG = "wrong"
    UNVERIFIABLE = "unverifiable"
    """Neither shown nor refuted; counts as not verified."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Fixed tokens, and the trainer's logprobs of each but the first of a sequence, under the weights `before` and
    `after` a step."""

    sequences: tuple[tuple[int, ...], ...]
    before: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with its reason in one sentence. Distances in nats a token; None where none was measured."""

    verdict: Verdict
    reason: str
    distance_after: float | None = None
    distance_before: float | None = None
    step_size: float | None = None
    same: int = 0
    """Tensors that have the digest they should have."""


def noise_of(distance: float | None) -> float:
    """What to take for the noise where an engine was `distance` off the trainer at version 0. None: that is what is
    being measured, and only strangers are told."""
    return STRANGERS / TOLERANCE if distance is None else max(distance, FLOAT32_NOISE)


def judge(probe: Probe, measured: Logprobs, noise: float) -> Judgement:
    """Compare an engine's logprobs of the probe's sequences with the trainer's. `noise`: from `noise_of`."""
    if not (math.isfinite(noise) and noise > 0):
        raise ValueError(f"noise is {noise}; it must be a positive number")
    if not any(len(ids) > 1 for ids in probe.sequences):
        return Judgement(Verdict.UNVERIFIABLE, "the probe has no token to compare")
    wanted = [ids[1:] for ids in probe.sequences]
    problem = (
        _shape_problem(probe.before, wanted, "the trainer (before)")
        or _shape_problem(probe.after, wanted, "the trainer (after)")
        or _shape_problem(measured, wanted, "the engine")
        or _value_problem(measured, probe.before, probe.after)
    )
    if problem is not None:
        return Judgement(Verdict.WRONG, problem)
    after, before = _distance(measured, probe.after), _distance(measured, probe.before)
    step = _distance(probe.after, probe.before)
    verdict, reason = _weighed(after, before, step, noise)
    return Judgement(verdict, reason, after, before, step)


def judge_checksums(expected: Mapping[str, str], reported: Mapping[str, str]) -> Judgement:
    """Compare digests of tensors by name. Tensors that only the engine knows are not looked at."""
    if not expected:
        return Judgement(Verdict.UNVERIFIABLE, "no tensor was given to compare")
    seen = {name: reported[name] for name in expected if reported.get(name, NOTHING) != NOTHING}
    different = sorted(name for name, digest in seen.items() if digest != expected[name])
    same = len(seen) - len(different)
    if different:
        return Judgement(Verdict.WRONG, f"the engine holds other weights in {_listed(different)}", same=same)
    unseen = sorted(expected.keys() - seen.keys())
    if unseen:
        return Judgement(Verdict.UNVERIFIABLE, f"the engine has no digest of {_listed(unseen)}", same=same)
    return Judgement(Verdict.VERIFIED, f"all {len(expected)} tensors have the digest they should have", same=same)


def both(logprobs: Judgement, digests: Judgement) -> Judgement:
    """What two measurements say together. Either can convict; digests acquit, logprobs only where digests are blind.

    Logprobs cannot see one stale tensor that moves them by less than the noise, and digests cannot compare another
    number format, in which none of them is the same: then they say nothing.
    """
    foreign = digests.verdict is Verdict.WRONG and not digests.same and logprobs.distance_after is not None
    if logprobs.verdict is Verdict.WRONG or digests.verdict is Verdict.UNVERIFIABLE:
        return logprobs
    if foreign and logprobs.verdict is Verdict.VERIFIED:
        return logprobs
    verdict = Verdict.UNVERIFIABLE if foreign else digests.verdict
    reason = f"{logprobs.reason}; {digests.reason}" if foreign else digests.reason
    return replace(logprobs, verdict=verdict, reason=reason, same=digests.same)


def _weighed(after: float, before: float, step: float, noise: float) -> tuple[Verdict, str]:
    allowed, visible = TOLERANCE * noise, POWER * noise
    if after > allowed:
        nearer = f"; it is nearer to the old weights ({before:.3g})" if before < after else ""
        return Verdict.WRONG, f"the engine is {after:.3g} nats a token off the new weights, above {allowed:.3g}{nearer}"
    if step <= visible:
        says = f"logprobs move by {step:.3g}, and only what exceeds {visible:.3g} can be seen"
        return Verdict.UNVERIFIABLE, f"the step is smaller than the noise: {says}"
    if before - after <= noise:
        return Verdict.WRONG, f"the engine is as near to the old weights ({before:.3g}) as to the new ({after:.3g})"
    return Verdict.VERIFIED, f"the engine is {after:.3g} nats a token off the new weights and {before:.3g} off the old"


def _shape_problem(logprobs: Logprobs, like: Sequence[Sequence[object]], who: str) -> str | None:
    if len(logprobs) != len(like):
        return f"{who} gave logprobs for {len(logprobs)} sequences instead of {len(like)}"
    for number, (given, wanted) in enumerate(zip(logprobs, like, strict=True)):
        if len(given) != len(wanted):
            return f"{who} gave {len(given)} logprobs instead of {len(wanted)} for sequence {number}"
    return None


def _value_problem(measured: Logprobs, *trainer: Logprobs) -> str | None:
    if not _finite(measured):
        return "the engine gave a logprob that is not a finite number"
    if not all(map(_finite, trainer)):
        return "the trainer gave a logprob that is not a finite number"
    return None if any(measured) else "there is no token to compare"


def _finite(logprobs: Logprobs) -> bool:
    return all(math.isfinite(value) for row in logprobs for value in row)


def _distance(one: Logprobs, other: Logprobs) -> float:
    """Mean absolute difference over all tokens."""
    differences = [abs(x - y) for a, b in zip(one, other, strict=True) for x, y in zip(a, b, strict=True)]
    return sum(differences) / len(differences)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(every[:_NAMED]) + more
