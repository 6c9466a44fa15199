"""The client streams from the dev engine what it would have got at once."""

import itertools

import pytest
from atropos.contracts.engines import EngineKind
from atropos.contracts.sampling import Sampling
from atropos.inference import vllm
from atropos.inference.engines import Completion, EngineAddress, SampleRequest
from atropos.inference.vllm import VllmEngine

from .conftest import Running


async def test_a_streamed_completion_equals_the_one_that_comes_at_once(
    engine: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "PROGRESS_S", 0.0)
    told: list[Completion] = []

    async def progress(partial: Completion) -> None:
        told.append(partial)

    client = VllmEngine(EngineAddress("dev", EngineKind.DEV, engine.url))
    request = SampleRequest("client", [3, 4, 5], Sampling(temperature=0.8), 60, (), seed=5)
    at_once = await client.sample(request)
    streamed = await client.sample(request, progress)
    await client.close()
    assert (streamed.token_ids, streamed.finish) == (at_once.token_ids, at_once.finish)
    assert streamed.logprobs == pytest.approx(at_once.logprobs, abs=1e-4)
    assert (streamed.spans, streamed.incarnation) == (at_once.spans, at_once.incarnation)
    assert len(told) > 1
    for before, after in itertools.pairwise([*told, streamed]):
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert before.spans[-1].end == len(before.token_ids)
