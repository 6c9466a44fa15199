"""The engine client against a server that misbehaves in every way we thought of."""

import asyncio
import gzip
import math
import socket
from collections.abc import Callable
from typing import Any

import pytest
from atropos.contracts.engines import EngineKind
from atropos.contracts.reasons import FinishReason
from atropos.contracts.sampling import Sampling
from atropos.inference.engines import Completion, EngineAddress, LabelSpan, SampleRequest, why_untrainable
from atropos.inference.errors import EngineFailure, EngineFailureKind
from atropos.inference.vllm import UNREPORTED, VllmEngine
from atropos.tests.inference.servers import Answer, Seen, completion, engine_answer, serving

K = EngineFailureKind
REQUEST = SampleRequest("r-1", [1, 5, 6], Sampling(temperature=0.7, max_tokens=9), 4, (2,), seed=11)


def engine_at(url: str, api_key: str | None = None) -> VllmEngine:
    return VllmEngine(EngineAddress("a", EngineKind.VLLM, url, 8, api_key), vocabulary=100)


async def sample(answer: Callable[[Seen], Answer], request: SampleRequest = REQUEST) -> Completion:
    async with serving(engine_answer(answer)) as server:
        engine = engine_at(server.url)
        try:
            return await engine.sample(request)
        finally:
            await engine.close()


async def test_tokens_go_in_and_come_out_as_they_are() -> None:
    async with serving(engine_answer(lambda seen: Answer(body=completion(seen)))) as server:
        engine = engine_at(server.url + "/v1", api_key="s3cret")
        got = await engine.sample(REQUEST)
        await engine.close()
    assert got == Completion([7, 2], [-0.5, -0.25], FinishReason.STOP, (LabelSpan("v3", 0, 2),), "life-1", 3)
    sent = server.seen[-1]
    assert sent.path == "/inference/v1/generate"
    assert sent.headers["authorization"] == "Bearer s3cret"
    assert sent.json == {
        "request_id": "r-1",
        "model": "policy",
        "token_ids": [1, 5, 6],
        "stream": False,
        "sampling_params": {
            "max_tokens": 4,
            "temperature": 0.7,
            "logprobs": 1,
            "stop_token_ids": [2],
            "ignore_eos": True,
            "seed": 11,
        },
    }


def logprobs(*values: float, ids: tuple[int, ...] = (7, 2)) -> dict[str, Any]:
    return {"content": [{"token_id": i, "logprob": v} for i, v in zip(ids, values, strict=False)]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs": logprobs(-0.5)}, "1 logprobs for 2 tokens"),
        ({"logprobs": logprobs(-0.5, math.nan)}, "not a finite number"),
        ({"logprobs": logprobs(-0.5, -math.inf)}, "not a finite number"),
        ({"logprobs": logprobs(-0.5, 0.4)}, "above 0"),
        ({"logprobs": logprobs(-0.5, -9999.0)}, "placeholder"),
        ({"logprobs": logprobs(-0.5, -0.1, ids=(7, 3))}, "another token"),
        ({"logprobs": None}, "left out or misspelt"),
        ({"token_ids": []}, "no tokens"),
        ({"token_ids": [7, 100]}, "whole number in [0, 100)"),
        ({"token_ids": [7, True]}, "whole number"),
        ({"token_ids": [7, "2"]}, "whole number"),
        ({"token_ids": [2, 2]}, "went on after a stop token"),
        ({"token_ids": [7, 8], "logprobs": logprobs(-1, -1, ids=(7, 8))}, "none of the stop tokens"),
        ({"token_ids": [7] * 5}, "at most 4 were asked for"),
        ({"finish_reason": "tired"}, "a reason we do not know"),
        ({"weight_versions": []}, "cover 0 of 2"),
        ({"weight_versions": [{"version": "v3", "start": 0, "end": 1}]}, "cover 1 of 2"),
        ({"weight_versions": [{"version": "v3", "start": 1, "end": 2}]}, "do not follow"),
        ({"weight_versions": [{"version": "v3", "start": 0.0, "end": 2}]}, "two whole numbers"),
        ({"weight_versions": None}, "left out or misspelt"),
        ({"usage": {"prompt_tokens": 2}}, "read 2 prompt tokens where 3 were sent"),
        ({"usage": {"completion_tokens": 3}}, "counts 3 sampled tokens"),
    ],
)
async def test_a_completion_that_contradicts_itself_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineFailure) as caught:
        await sample(lambda seen: Answer(body=completion(seen, **changes)))
    assert (caught.value.kind, caught.value.retryable) == (K.MALFORMED, True)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("answer", "kind", "retryable"),
    [
        (Answer(500, b"boom"), K.UNAVAILABLE, True),
        (Answer(404, b"no such model"), K.REJECTED, False),
        (Answer(302, b"", {"location": "http://elsewhere/"}), K.REJECTED, False),
        (Answer(200, b"{half"), K.MALFORMED, True),
        (Answer(200, b"[" * 100_000), K.MALFORMED, True),
        (Answer(200, b"[1]"), K.MALFORMED, True),
        (Answer(200, b"\xff\xfe{}"), K.MALFORMED, True),
        (Answer(200, b'{"choices": [', declared=900), K.UNAVAILABLE, True),
        (Answer(200, b"not gzip", {"content-encoding": "gzip"}), K.MALFORMED, True),
        (Answer(200, gzip.compress(b"{}"), {"content-encoding": "gzip"}), K.MALFORMED, True),
        (Answer(raw=b""), K.UNAVAILABLE, True),
        (Answer(raw=b"220 ftp ready\r\n"), K.UNAVAILABLE, True),
        (Answer(body={"choices": [], "usage": {}}), K.MALFORMED, True),
        (Answer(body={}), K.MALFORMED, True),
    ],
)
async def test_a_broken_answer_is_a_failure_of_its_kind(
    answer: Answer, kind: EngineFailureKind, retryable: bool
) -> None:
    with pytest.raises(EngineFailure) as caught:
        await sample(lambda _: answer)
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)


@pytest.mark.parametrize(
    ("headers", "seconds"), [({"retry-after": "2"}, 2.0), ({"Retry-After-Ms": "40"}, 0.04), ({}, None)]
)
async def test_what_an_overloaded_engine_asks_for_is_passed_on(headers: dict[str, str], seconds: float | None) -> None:
    with pytest.raises(EngineFailure) as caught:
        await sample(lambda _: Answer(429, b"", headers))
    assert (caught.value.kind, caught.value.retry_after_s) == (K.OVERLOADED, seconds)


async def test_an_aborted_request_may_be_tried_again() -> None:
    with pytest.raises(EngineFailure) as caught:
        await sample(lambda seen: Answer(body=completion(seen, finish_reason="abort")))
    assert (caught.value.kind, caught.value.retryable) == (K.UNAVAILABLE, True)


async def test_a_cut_completion_gets_no_end_token() -> None:
    changes = {"finish_reason": "length", "token_ids": [7, 8], "logprobs": logprobs(-1, -1, ids=(7, 8))}
    got = await sample(lambda seen: Answer(body=completion(seen, **changes)))
    assert (got.finish, got.token_ids) == (FinishReason.LENGTH, [7, 8])


async def test_nobody_listening_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        engine = engine_at(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(EngineFailure) as caught:
            await engine.health()
        await engine.close()
    assert (caught.value.kind, caught.value.retryable) == (K.UNAVAILABLE, True)


async def test_cancelling_a_call_closes_its_connection() -> None:
    async with serving(engine_answer(lambda _: Answer(hang=True))) as server:
        engine = engine_at(server.url)
        call = asyncio.create_task(engine.sample(REQUEST))
        await asyncio.wait_for(server.hanging.wait(), 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(server.gone.wait(), 10)
        await engine.close()


async def test_an_engine_is_asked_once_for_its_model_and_says_its_limit() -> None:
    async with serving(engine_answer(lambda seen: Answer(body=completion(seen)))) as server:
        engine = engine_at(server.url)
        assert await engine.context_limit() == 512
        await engine.health()
        await asyncio.gather(*(engine.sample(REQUEST) for _ in range(8)))
        assert await engine.context_limit() == 512
        await engine.close()
    paths = [seen.path for seen in server.seen]
    assert (paths.count("/v1/models"), paths.count("/weight_info")) == (1, 1)


async def test_those_who_ask_for_the_label_at_once_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atropos.inference.connection._LABEL_S", 60.0)
    async with serving(engine_answer(lambda seen: Answer(body=completion(seen)))) as server:
        engine = engine_at(server.url)
        assert await asyncio.gather(*(engine.label() for _ in range(5))) == ["v3"] * 5
        assert [seen.path for seen in server.seen] == ["/weight_info"]
        monkeypatch.setattr("atropos.inference.connection._LABEL_S", 0.0)
        assert await engine.label() == "v3"
        await engine.close()
    assert [seen.path for seen in server.seen] == ["/weight_info"] * 2


@pytest.mark.parametrize(
    ("metrics", "incarnation"),
    [(b"# HELP\nprocess_start_time_seconds 1.7e+09\n", "start-1700000000.00"), (b"vllm:x 1\n", UNREPORTED)],
)
async def test_an_engine_that_names_no_incarnation_is_known_by_its_start(metrics: bytes, incarnation: str) -> None:
    def answer(seen: Seen) -> Answer:
        bodies: dict[str, Any] = {"/weight_info": {"weight_version": "default"}, "/metrics": metrics}
        return Answer(body=bodies[seen.path])

    async with serving(answer) as server:
        engine = engine_at(server.url)
        info = await engine.weight_info()
        await engine.close()
    assert (info.label, info.incarnation) == ("default", incarnation)


async def test_stop_strings_are_refused_before_anything_is_sent() -> None:
    request = SampleRequest("r", [1], Sampling(stop=("\n\n",)), 4, (2,))
    with pytest.raises(EngineFailure) as caught:
        await engine_at("http://127.0.0.1:9").sample(request)
    assert (caught.value.kind, caught.value.retryable) == (K.REJECTED, False)


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        (Sampling(), None),
        (Sampling(top_p=0.9), "top_p"),
        (Sampling(top_k=5), "top_k"),
        (Sampling(temperature=0), "temperature"),
        (Sampling(min_p=0.1), "min_p"),
        (Sampling(presence_penalty=0.5), "presence_penalty"),
        (Sampling(frequency_penalty=-1.0), "frequency_penalty"),
        (Sampling(repetition_penalty=1.1), "repetition_penalty"),
        (Sampling(logit_bias={"5": 1.0}), "logit_bias"),
    ],
)
def test_sampling_that_cannot_train_is_named(sampling: Sampling, word: str | None) -> None:
    problem = why_untrainable(sampling)
    assert problem is None if word is None else problem is not None and word in problem


def test_a_key_never_shows() -> None:
    assert "s3cret" not in repr(EngineAddress("a", EngineKind.VLLM, "http://x", 1, "s3cret"))
