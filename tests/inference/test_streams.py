"""Streamed completions: the same as those that come at once, and told of while they grow."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from atropos.contracts.engines import EngineKind
from atropos.contracts.reasons import FinishReason
from atropos.contracts.sampling import Sampling
from atropos.inference import vllm
from atropos.inference.answers import events
from atropos.inference.engines import Completion, EngineAddress, LabelSpan, SampleRequest
from atropos.inference.errors import EngineFailure, EngineFailureKind
from atropos.inference.vllm import GENERATE, VllmEngine
from atropos.tests.inference.servers import Answer, Seen, completion, engine_answer, serving
from hypothesis import given, settings
from hypothesis import strategies as st

K = EngineFailureKind
REQUEST = SampleRequest("r-1", [1, 5, 6], Sampling(temperature=0.7), 8, (2,), seed=11)
IDS = [7, 8, 9, 7, 2]
LABELS = ["v3", "v3", "v4", "v4", "v4"]


@pytest.fixture(autouse=True)
def _told_of_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PROGRESS_S", 0.0)


def choice(start: int, end: int, **changes: Any) -> dict[str, Any]:
    """Tokens [start, end) of the completion as a choice that has not ended, spans counted from its first token."""
    spans: list[dict[str, Any]] = []
    for position, label in enumerate(LABELS[start:end]):
        if spans and spans[-1]["version"] == label:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": label, "start": position, "end": position + 1})
    content = [{"token_id": token, "logprob": -token / 8} for token in IDS[start:end]]
    fields = {"token_ids": IDS[start:end], "weight_versions": spans, "logprobs": {"content": content}}
    return {"index": 0, "finish_reason": None, **fields, **changes}


def event(start: int, end: int, *, usage: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": 3, "completion_tokens": end, "total_tokens": 3 + end} | (usage or {})
    return {"request_id": "x", "incarnation": "life-1", "usage": counts, "choices": [choice(start, end, **changes)]}


def lines(*parts: Any, done: bool = True) -> bytes:
    said = [json.dumps(one) for one in parts] + (["[DONE]"] if done else [])
    return b"".join(f"data: {one}\n\n".encode() for one in said)


def streamed(*parts: Any, done: bool = True, **answer: Any) -> Callable[[Seen], Answer]:
    headers = {"content-type": "text/event-stream"}
    return lambda _: Answer(body=lines(*parts, done=done), headers=headers, **answer)


async def drawn(
    answer: Callable[[Seen], Answer], *, weights: bool = False
) -> tuple[Completion | EngineFailure, list[Completion], Any]:
    """What became of a streamed call, what was told of it, and what was sent. `weights`: `answer` names them, too."""
    told: list[Completion] = []

    async def progress(partial: Completion) -> None:
        told.append(partial)

    def sent() -> Any:
        return next(seen.json for seen in reversed(server.seen) if seen.path == GENERATE)

    usual = engine_answer(answer)
    async with serving(lambda seen: answer(seen) if seen.path == "/weight_info" and weights else usual(seen)) as server:
        engine = VllmEngine(EngineAddress("a", EngineKind.VLLM, server.url), vocabulary=100)
        try:
            return await engine.sample(REQUEST, progress), told, sent()
        except EngineFailure as failure:
            return failure, told, sent()
        finally:
            await engine.close()


async def at_once() -> Completion:
    whole = choice(0, 5, finish_reason="stop")

    def answer(seen: Seen) -> Answer:
        return Answer(body=completion(seen, usage={"completion_tokens": 5}, **whole))

    async with serving(engine_answer(answer)) as server:
        engine = VllmEngine(EngineAddress("a", EngineKind.VLLM, server.url), vocabulary=100)
        got = await engine.sample(REQUEST)
        await engine.close()
    return got


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3, 4], [2, 2, 5], [5]])
async def test_a_streamed_completion_equals_the_one_that_comes_at_once(cuts: list[int]) -> None:
    edges = [0, *cuts, 5]
    parts = [event(a, b) for a, b in itertools.pairwise(edges)]
    parts[-1]["choices"][0]["finish_reason"] = "stop"
    got, told, sent = await drawn(streamed(*parts))
    assert got == await at_once()
    assert sent["stream"] is True
    assert [partial.token_ids for partial in told] == [IDS[:end] for end in dict.fromkeys(edges) if end]
    for partial in told:
        assert len(partial.logprobs) == len(partial.token_ids) == partial.spans[-1].end
    assert told[-1].spans == (LabelSpan("v3", 0, 2), LabelSpan("v4", 2, 5))


def late(*cuts: int, labels: Any = None, finish: str = "stop") -> list[dict[str, Any]]:
    """The completion in events of which only the last says what sampled it, all of it."""
    parts = [event(a, b, weight_versions=None) for a, b in itertools.pairwise((0, *cuts, 5))]
    spans = [{"version": "v3", "start": 0, "end": 2}, {"version": "v4", "start": 2, "end": 5}]
    parts[-1]["choices"][0] |= {"finish_reason": finish, "weight_versions": labels or spans}
    return parts


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3, 4]])
async def test_a_stream_may_say_at_its_end_what_sampled_all_of_it(cuts: list[int]) -> None:
    got, _, _ = await drawn(streamed(*late(*cuts)))
    assert got == await at_once()


async def test_a_last_event_without_tokens_may_say_what_sampled_all() -> None:
    parts = [event(0, 5, weight_versions=None), event(5, 5, finish_reason="stop")]
    parts[-1]["choices"][0]["weight_versions"] = [{"version": "v4", "start": 0, "end": 5}]
    got, _, _ = await drawn(streamed(*parts))
    assert isinstance(got, Completion)
    assert got.spans == (LabelSpan("v4", 0, 5),)


async def test_tokens_without_a_version_are_told_of_while_the_engine_holds_what_it_held_before() -> None:
    got, told, _ = await drawn(streamed(*late(2, 4)))
    assert isinstance(got, Completion)
    assert [(partial.token_ids, partial.spans) for partial in told] == [
        (IDS[:2], (LabelSpan("v3", 0, 2),)),
        (IDS[:4], (LabelSpan("v3", 0, 4),)),
        (IDS, got.spans),
    ]


@pytest.mark.parametrize("now", [Answer(body={"weight_version": "v4", "incarnation": "life-1"}), Answer(503, b"")])
async def test_tokens_without_a_version_are_not_told_of_once_the_engine_holds_another_or_is_gone(now: Answer) -> None:
    parts, begun = late(2, 4)[:2], []

    def generate(seen: Seen) -> Answer:
        begun.append(seen.path)
        return streamed(*parts)(seen)

    usual = engine_answer(generate)
    failure, told, _ = await drawn(
        lambda seen: now if begun and seen.path == "/weight_info" else usual(seen), weights=True
    )
    assert isinstance(failure, EngineFailure)
    assert "broke off after 4 tokens" in failure.message
    assert told == []


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([{"version": "v4", "start": 0, "end": 3}], "cover 3 of 5"),
        ([{"version": "v4", "start": 2, "end": 5}], "follow"),
    ],
)
async def test_versions_said_at_the_end_must_cover_the_whole(labels: Any, says: str) -> None:
    failure, _, _ = await drawn(streamed(*late(2, labels=labels)))
    assert isinstance(failure, EngineFailure)
    assert failure.kind is K.MALFORMED
    assert says in failure.message


async def test_a_completion_that_was_cut_ends_so() -> None:
    got, _, _ = await drawn(streamed(event(0, 3), event(3, 4, finish_reason="length")))
    assert isinstance(got, Completion)
    assert (got.finish, got.token_ids) == (FinishReason.LENGTH, IDS[:4])


async def test_usage_may_come_in_an_event_of_its_own_or_not_at_all() -> None:
    end = event(3, 5, finish_reason="stop")
    usage = {"usage": end.pop("usage"), "choices": []}
    first = event(0, 3) | {"usage": None}
    expected = await at_once()
    assert (await drawn(streamed(first, end, usage)))[0] == expected
    assert (await drawn(streamed(first, end)))[0] == expected


async def test_comments_and_other_fields_of_events_are_passed_over() -> None:
    body = b": ping\r\n\r\nevent: tokens\r\nid: 1\r\n" + lines(event(0, 5, finish_reason="stop")).replace(
        b"\n", b"\r\n"
    )
    got, _, _ = await drawn(lambda _: Answer(body=body))
    assert got == await at_once()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>nothing here</html>", "sent something that is no event where it should stream: <html>nothing here"),
        (b"<html>\nnothing here", "sent something that is no event where it should stream: <html>"),
        (b"data: <oops>\n\n", "sent an event that is not JSON: <oops>"),
        (b"data: [1]\n\n", "sent an event that is no JSON object: [1]"),
        (b"da", "broke off after 0 tokens"),
        (b'data: {"choi', "broke off after 0 tokens"),
        (b": a comm", "broke off after 0 tokens"),
    ],
)
async def test_what_is_no_stream_is_quoted_and_half_a_line_of_one_is_a_break(body: bytes, says: str) -> None:
    failure, told, _ = await drawn(lambda _: Answer(body=body))
    assert isinstance(failure, EngineFailure)
    assert says in failure.message
    assert (failure.kind is K.UNAVAILABLE, failure.retryable, told) == ("broke off" in says, True, [])


ERROR = {"error": {"message": "the device is gone", "type": "InternalServerError", "code": 500}}


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (streamed(event(0, 2), done=False), K.UNAVAILABLE, "broke off after 2 tokens"),
        (streamed(event(0, 2)), K.UNAVAILABLE, "broke off after 2 tokens"),
        (streamed(event(0, 2), done=False, declared=9999), K.UNAVAILABLE, "broke the connection"),
        (streamed(event(0, 2), ERROR), K.UNAVAILABLE, "the device is gone"),
        (streamed(event(0, 2), {"error": "gone"}), K.UNAVAILABLE, "gone"),
        (streamed(event(0, 2), {"error": ERROR["error"] | {"code": 429}}), K.OVERLOADED, "answered 429"),
        (streamed(event(0, 2, finish_reason="abort")), K.UNAVAILABLE, "aborted"),
    ],
)
async def test_a_stream_that_breaks_off_may_be_tried_again_and_tells_what_came(
    answer: Callable[[Seen], Answer], kind: EngineFailureKind, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "PROGRESS_S", 1000.0)
    failure, told, _ = await drawn(answer)
    assert isinstance(failure, EngineFailure)
    assert (failure.kind, failure.retryable) == (kind, True)
    assert says in failure.message
    assert [partial.token_ids for partial in told] == [IDS[:2]]


def logprobs(*values: float) -> dict[str, Any]:
    return {"content": [{"token_id": token, "logprob": value} for token, value in zip(IDS[2:4], values, strict=False)]}


def span(start: int, end: int) -> list[dict[str, Any]]:
    return [{"version": "v3", "start": start, "end": end}]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (event(2, 4, token_ids=[9, 100]), "whole number in [0, 100)"),
        (event(2, 4, token_ids=[9, "7"]), "whole number"),
        (event(2, 4, token_ids=[2, 7]), "went on after a stop token"),
        (event(2, 4, logprobs=logprobs(-1.0)), "1 logprobs for 2 tokens"),
        (event(2, 4, logprobs=logprobs(-1.0, float("nan"))), "not a finite number"),
        (event(2, 4, logprobs=logprobs(-1.0, -9999.0)), "placeholder"),
        (event(2, 4, logprobs=None), "left out or misspelt"),
        (event(2, 4, weight_versions=span(2, 4)), "do not follow"),
        (event(2, 4, weight_versions=span(0, 1)), "cover 1 of 2"),
        (event(2, 4, weight_versions=None), "does not say which weights sampled these tokens"),
        (event(2, 4) | {"choices": [choice(2, 3), choice(3, 4)]}, "2 completions"),
        (event(2, 4) | {"choices": None}, "left out or misspelt"),
        ([], "no JSON object"),
    ],
)
async def test_an_event_that_contradicts_itself_is_refused_and_nothing_of_it_told(wrong: Any, says: str) -> None:
    failure, told, _ = await drawn(streamed(event(0, 2), wrong, event(4, 5, finish_reason="stop")))
    assert isinstance(failure, EngineFailure)
    assert (failure.kind, failure.retryable) == (K.MALFORMED, True)
    assert says in failure.message
    assert [partial.token_ids for partial in told] == [IDS[:2]]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([event(0, 5), event(0, 1, finish_reason="stop")], "went on after its end"),
        ([event(0, 2, finish_reason="length"), event(2, 3)], "went on after its end"),
        ([event(0, 4), event(0, 4), event(4, 5)], "9 tokens where at most 8"),
        ([event(0, 3, finish_reason="stop")], "none of the stop tokens"),
        ([event(0, 5, finish_reason="tired")], "a reason we do not know"),
        ([event(0, 5, finish_reason="stop", usage={"prompt_tokens": 4})], "read 4 prompt tokens"),
        ([event(0, 5, finish_reason="stop", usage={"completion_tokens": 4})], "counts 4 sampled tokens"),
        ([event(0, 0, finish_reason="length")], "no tokens"),
    ],
)
async def test_a_stream_that_contradicts_the_request_or_itself_is_refused(parts: list[Any], says: str) -> None:
    failure, _, _ = await drawn(streamed(*parts))
    assert isinstance(failure, EngineFailure)
    assert (failure.kind, failure.retryable) == (K.MALFORMED, True)
    assert says in failure.message


@pytest.mark.parametrize(
    "body", [b"data: {half\n\n", b'{"choices": []}\n', b"<html>\n", b"data: " + b"[" * 100_000 + b"\n"]
)
async def test_what_is_no_stream_is_refused(body: bytes) -> None:
    failure, told, _ = await drawn(lambda _: Answer(body=body))
    assert isinstance(failure, EngineFailure)
    assert (failure.kind, failure.retryable, told) == (K.MALFORMED, True, [])


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(500, b"boom"), K.UNAVAILABLE),
        (Answer(429, b"", {"retry-after": "2"}), K.OVERLOADED),
        (Answer(404, b"no"), K.REJECTED),
    ],
)
async def test_a_stream_that_never_begins_is_classified_as_any_answer(answer: Answer, kind: EngineFailureKind) -> None:
    failure, told, _ = await drawn(lambda _: answer)
    assert isinstance(failure, EngineFailure)
    assert (failure.kind, told) == (kind, [])
    assert failure.retry_after_s == (2.0 if kind is K.OVERLOADED else None)


async def test_progress_is_told_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PROGRESS_S", 1000.0)
    got, told, _ = await drawn(streamed(event(0, 2), event(2, 5, finish_reason="stop")))
    assert isinstance(got, Completion)
    assert told == []


@settings(deadline=None)
@given(st.data())
async def test_events_are_read_however_the_bytes_are_cut(data: st.DataObject) -> None:
    said = [{"a": 1}, {"b": "ü\u2028"}]
    body = "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in said).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))

    async def chunks() -> Any:
        for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
            yield body[start:end]

    assert [one async for one in events("it", chunks())] == said
