"""SGLang's clients against real weights: what they return is what those weights sampled, over a publication too."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
from atropos.contracts.engines import EngineKind
from atropos.contracts.reasons import FinishReason
from atropos.contracts.sampling import Sampling
from atropos.inference import sglang
from atropos.inference.control import UNVERSIONED, publish
from atropos.inference.engines import Completion, EngineAddress, SampleRequest
from atropos.inference.errors import EngineFailure
from atropos.inference.probe import Probe, Verdict, judge, noise_of
from atropos.inference.sglang import SglangEngine
from atropos.inference.sglang_control import SglangControl
from atropos.tests.inference.conformance import Target, reference_logprobs

from .conftest import Running
from .sglang_facade import sglang_in_front
from .test_control import SEQUENCES, Weights, logprobs


@pytest.fixture
async def address(engine: Running, target: Target, weights: Weights) -> AsyncIterator[EngineAddress]:
    async with sglang_in_front(engine.url, target.model) as url:
        address = EngineAddress("s", EngineKind.SGLANG, url, 8)
        yield address
        control = SglangControl(address)
        await publish(control, path=weights[0], label="default", load_timeout_s=60)
        await control.close()


@pytest.fixture
async def client(address: EngineAddress) -> AsyncIterator[SglangEngine]:
    client = SglangEngine(address)
    yield client
    await client.close()


@pytest.fixture
async def control(address: EngineAddress) -> AsyncIterator[SglangControl]:
    control = SglangControl(address)
    yield control
    await control.close()


async def test_logprobs_are_those_of_the_sampling_distribution_up_to_our_end_token(
    client: SglangEngine, weights: Weights
) -> None:
    plain = await client.sample(SampleRequest("a", [5, 6, 7], Sampling(temperature=0.7), 40, (), seed=3))
    assert plain.logprobs == pytest.approx(reference_logprobs(weights[0], [5, 6, 7], plain.token_ids, 0.7), abs=1e-4)
    end = plain.token_ids[20]
    ended = await client.sample(SampleRequest("b", [5, 6, 7], Sampling(temperature=0.7), 40, (end,), seed=3))
    assert ended.finish is FinishReason.STOP
    assert ended.token_ids == plain.token_ids[: plain.token_ids.index(end) + 1]


async def test_a_streamed_completion_equals_the_one_that_comes_at_once(
    client: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "PROGRESS_S", 0.0)
    told: list[Completion] = []

    async def progress(partial: Completion) -> None:
        told.append(partial)

    request = SampleRequest("c", [3, 4, 5], Sampling(temperature=0.8), 60, (), seed=5)
    at_once = await client.sample(request)
    streamed = await client.sample(request, progress)
    assert (streamed.token_ids, streamed.spans) == (at_once.token_ids, at_once.spans)
    assert streamed.logprobs == pytest.approx(at_once.logprobs, abs=1e-4)
    assert len(told) > 1
    for before, after in itertools.pairwise([*told, streamed]):
        assert after.token_ids[: len(before.token_ids)] == before.token_ids


async def test_a_call_in_flight_crosses_a_publication_in_two_spans_and_the_version_is_proved(
    client: SglangEngine, control: SglangControl, weights: Weights
) -> None:
    old, new = logprobs(weights[0]), logprobs(weights[1])
    await publish(control, path=weights[0], label="v0", load_timeout_s=60)
    noise = noise_of(
        judge(Probe(SEQUENCES, old, old), await control.score(SEQUENCES, label="v0"), noise_of(None)).distance_after
    )
    growing = asyncio.Event()

    async def progress(_: Completion) -> None:
        growing.set()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sglang, "PROGRESS_S", 0.0)
        request = SampleRequest("d", [9, 8, 7], Sampling(), 900, (), seed=7)
        sampling = asyncio.create_task(client.sample(request, progress))
        await asyncio.wait_for(growing.wait(), 60)
        await publish(control, path=weights[1], label="v1", load_timeout_s=60)
    crossed = await sampling
    assert [span.label for span in crossed.spans] == ["v0", "v1"]
    edge = crossed.spans[0].end
    before = reference_logprobs(weights[0], [9, 8, 7], crossed.token_ids)[:edge]
    after = reference_logprobs(weights[1], [9, 8, 7], crossed.token_ids)[edge:]
    assert crossed.logprobs == pytest.approx([*before, *after], abs=1e-3)
    assert (
        judge(Probe(SEQUENCES, old, new), await control.score(SEQUENCES, label="v1"), noise).verdict is Verdict.VERIFIED
    )


async def test_weights_that_cannot_be_loaded_leave_it_running_and_unnamed(
    client: SglangEngine, control: SglangControl, weights: Weights
) -> None:
    with pytest.raises(EngineFailure, match="Failed to update weights"):
        await publish(control, path=weights[0] / "nothing", label="v1", load_timeout_s=60)
    assert (await control.weight_info()).label == UNVERSIONED
    got = await client.sample(SampleRequest("e", [1, 2], Sampling(), 4, ()))
    assert {span.label for span in got.spans} == {UNVERSIONED}
