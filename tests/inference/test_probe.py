"""An engine is called verified only where the probe could have shown the opposite."""

import math

import pytest
from atropos.inference.probe import (
    FLOAT32_NOISE,
    NOTHING,
    POWER,
    STRANGERS,
    TOLERANCE,
    Judgement,
    Probe,
    Verdict,
    both,
    judge,
    judge_checksums,
    noise_of,
)
from hypothesis import assume, given
from hypothesis import strategies as st

NOISES = st.floats(1e-5, 0.05)
LOGPROBS = st.floats(-30.0, 0.0)
Rows = tuple[tuple[float, ...], ...]


@st.composite
def probes(draw: st.DrawFn) -> Probe:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda all_: max(all_) > 1))

    def rows() -> Rows:
        return tuple(tuple(draw(LOGPROBS) for _ in range(length - 1)) for length in lengths)

    return Probe(tuple(tuple(range(length)) for length in lengths), rows(), rows())


@st.composite
def powerful(draw: st.DrawFn) -> tuple[Probe, float]:
    """A probe whose step is seen above the noise."""
    probe, noise = draw(probes()), draw(NOISES)
    assume(judge(probe, probe.after, noise).step_size > 1.001 * POWER * noise)  # type: ignore[operator]
    return probe, noise


def shifted(rows: Rows, by: float) -> Rows:
    return tuple(tuple(value + by for value in row) for row in rows)


@given(powerful())
def test_new_weights_are_verified_and_old_ones_are_wrong(given_: tuple[Probe, float]) -> None:
    probe, noise = given_
    assert judge(probe, probe.after, noise).verdict is Verdict.VERIFIED
    assert judge(probe, probe.before, noise).verdict is Verdict.WRONG


@given(powerful(), st.floats(-0.999, 0.999))
def test_power_is_enough_to_tell_old_from_new_within_the_tolerance(given_: tuple[Probe, float], part: float) -> None:
    probe, noise = given_
    off = part * TOLERANCE * noise
    assert judge(probe, shifted(probe.after, off), noise).verdict is Verdict.VERIFIED
    assert judge(probe, shifted(probe.before, off), noise).verdict is Verdict.WRONG


@given(probes(), NOISES, st.floats(0.0, 0.99))
def test_a_step_below_the_noise_is_never_verified(probe: Probe, noise: float, part: float) -> None:
    small = Probe(probe.sequences, shifted(probe.after, part * POWER * noise), probe.after)
    assert judge(small, small.after, noise).verdict is Verdict.UNVERIFIABLE
    assert "smaller than the noise" in judge(small, small.after, noise).reason
    far = judge(small, shifted(small.after, 2 * TOLERANCE * noise + 8 * part * noise), noise)
    assert far.verdict is Verdict.WRONG


@given(probes(), st.data(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_a_number_is_wrong(probe: Probe, data: st.DataObject, bad: float) -> None:
    number = data.draw(st.sampled_from([i for i, row in enumerate(probe.after) if row]))
    measured = [list(row) for row in probe.after]
    measured[number][data.draw(st.integers(0, len(measured[number]) - 1))] = bad
    judgement = judge(probe, measured, 1e-5)
    assert (judgement.verdict, judgement.distance_after) == (Verdict.WRONG, None)
    assert "the engine gave a logprob that is not a finite number" in judgement.reason
    spoilt = Probe(probe.sequences, probe.before, tuple(map(tuple, measured)))
    assert "the trainer gave" in judge(spoilt, probe.after, 1e-5).reason


@given(probes())
def test_lengths_that_differ_are_wrong(probe: Probe) -> None:
    fewer = judge(probe, probe.after[:-1], 1e-5)
    longer = judge(probe, [(*probe.after[0], -1.0), *probe.after[1:]], 1e-5)
    assert (fewer.verdict, longer.verdict) == (Verdict.WRONG, Verdict.WRONG)
    assert f"{len(probe.after) - 1} sequences instead of {len(probe.after)}" in fewer.reason
    assert "for sequence 0" in longer.reason


def test_a_probe_without_tokens_verifies_nothing() -> None:
    assert judge(Probe(((5,),), ((),), ((),)), ((),), 1e-5).verdict is Verdict.UNVERIFIABLE
    assert judge(Probe((), (), ()), (), 1e-5).verdict is Verdict.UNVERIFIABLE


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_noise_is_refused(noise: float) -> None:
    with pytest.raises(ValueError, match="positive number"):
        judge(Probe(((1, 2),), ((-1.0,),), ((-2.0,),)), ((-2.0,),), noise)


@given(probes(), st.floats(-0.29, 0.29))
def test_at_version_0_the_noise_is_measured_and_only_strangers_are_told(probe: Probe, off: float) -> None:
    begun = Probe(probe.sequences, probe.after, probe.after)
    first = judge(begun, shifted(begun.after, off), noise_of(None))
    assert first.verdict is Verdict.UNVERIFIABLE
    assert first.distance_after == pytest.approx(abs(off))
    assert noise_of(first.distance_after) == max(first.distance_after or 0.0, FLOAT32_NOISE)
    strangers = judge(begun, shifted(begun.after, math.copysign(1.01 * STRANGERS, off)), noise_of(None))
    assert strangers.verdict is Verdict.WRONG


GOOD = {"a.weight": "11", "b.weight": "22", "c.bias": "33"}


@pytest.mark.parametrize(
    ("change", "verdict", "says"),
    [
        ({}, Verdict.VERIFIED, "all 3 tensors"),
        ({"extra": "44"}, Verdict.VERIFIED, "all 3 tensors"),
        ({"b.weight": "99"}, Verdict.WRONG, "other weights in b.weight"),
        ({"b.weight": NOTHING}, Verdict.UNVERIFIABLE, "no digest of b.weight"),
        ({"b.weight": None}, Verdict.UNVERIFIABLE, "no digest of b.weight"),
        ({"a.weight": NOTHING, "b.weight": "99"}, Verdict.WRONG, "other weights in b.weight"),
    ],
)
def test_digests_acquit_only_whole_and_equal(change: dict[str, str | None], verdict: Verdict, says: str) -> None:
    reported = {name: digest for name, digest in (GOOD | change).items() if digest is not None}
    judgement = judge_checksums(GOOD, reported)
    assert judgement.verdict is verdict
    assert says in judgement.reason


V, W, U = Verdict.VERIFIED, Verdict.WRONG, Verdict.UNVERIFIABLE


@pytest.mark.parametrize(
    ("logprobs", "measured", "digests", "same", "together"),
    [
        (V, True, V, 3, V),
        (U, True, V, 3, V),  # a step too small for logprobs, and every tensor as it should be
        (U, False, V, 3, V),
        (V, True, W, 2, W),  # one stale tensor that logprobs do not see
        (U, True, W, 2, W),
        (V, True, W, 0, V),  # another number format: no digest can be compared
        (U, True, W, 0, U),
        (U, False, W, 0, W),  # nothing else speaks for it
        (V, True, U, 1, V),  # blind digests
        (U, True, U, 1, U),
        (W, True, V, 3, W),
        (W, True, U, 0, W),
    ],
)
def test_either_measurement_convicts_and_the_sharper_one_acquits(
    logprobs: Verdict, measured: bool, digests: Verdict, same: int, together: Verdict
) -> None:
    found = both(Judgement(logprobs, "a", 0.1 if measured else None), Judgement(digests, "b", same=same))
    assert found.verdict is together
    assert found.distance_after == (0.1 if measured else None)


def test_many_tensors_are_counted_not_listed() -> None:
    names = {f"layer.{i}": "11" for i in range(9)}
    assert judge_checksums(names, {}).reason.endswith("layer.0, layer.1, layer.2 and 6 more")
    assert judge_checksums({}, names) == Judgement(Verdict.UNVERIFIABLE, "no tensor was given to compare")
