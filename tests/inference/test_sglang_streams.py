"""The SGLang client against recorded streams, and any answer at all."""

import contextlib
import itertools
import math
from typing import Any

import pytest
from atropos.contracts.reasons import FinishReason
from atropos.inference import sglang
from atropos.inference.engines import Completion, LabelSpan
from atropos.inference.errors import EngineFailure, EngineFailureKind
from atropos.inference.sglang_answers import Reader, SglangGrowing
from atropos.tests.inference import sglang_wire as wire
from atropos.tests.inference.servers import Answer, Seen
from atropos.tests.inference.sglang_wire import IDS, LABELS, REQUEST, WHOLE, completion_of, drawn, failure_of
from hypothesis import given, settings
from hypothesis import strategies as st

K = EngineFailureKind


@pytest.fixture(autouse=True)
def _told_of_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "PROGRESS_S", 0.0)


@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3, 4], [5]])
async def test_a_streamed_completion_equals_the_one_that_comes_at_once(cuts: list[int], only_new: bool) -> None:
    """What each event says the weights are called is what they are called as it leaves."""

    def answer(seen: Seen) -> Answer:
        edges = [0, *cuts]
        events = [
            wire.generated(seen, IDS[:b], LABELS[:b], None, since=a if only_new else 0)
            for a, b in itertools.pairwise(edges)
        ]
        last = wire.generated(seen, IDS, LABELS, wire.stopped(2), since=edges[-1] if only_new else 0)
        return wire.stream(*events, last)

    got, told, (sent,) = await drawn(answer, streamed=True)
    assert got == WHOLE
    assert (sent["stream"], sent["sampling_params"]["stream_interval"]) == (True, 32)
    assert [one.token_ids for one in told] == [IDS[:b] for b in cuts if b <= 2]
    assert all(one.spans == (LabelSpan("v3", 0, len(one.token_ids)),) for one in told)


async def test_old_servers_send_new_tokens_with_all_logprobs() -> None:
    def answer(seen: Seen) -> Answer:
        last = wire.generated(seen, IDS, ["v3"] * 5, wire.stopped(2), version=wire.OLD)
        last["output_ids"] = IDS[2:]
        return wire.stream(wire.generated(seen, IDS[:2], ["v3"] * 2, None, version=wire.OLD), last)

    got, told, _ = await drawn(answer, streamed=True, info=wire.server_info(wire.OLD))
    assert completion_of(got).logprobs == WHOLE.logprobs
    assert [len(one.token_ids) for one in told] == [2, 5]


async def test_tokens_are_told_of_only_while_their_weights_are_certain() -> None:
    """A late event says what the weights are called now, not what they were as it was sampled."""

    def answer(seen: Seen) -> Answer:
        events = [wire.generated(seen, IDS[:n], [label] * n, None) for n, label in ((1, "v3"), (2, "v4"), (3, "v3"))]
        return wire.stream(*events, done=False)

    got, told, _ = await drawn(answer, streamed=True)
    assert failure_of(got).message.endswith("broke off after 3 tokens")
    assert [one.token_ids for one in told] == [IDS[:1]]


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (([7, 9, 9], 0, {}), "after 2 tokens it sent 3 and counts 3"),
        (([7], 0, {}), "after 2 tokens it sent 1 and counts 1"),
        ((IDS[:4], 3, {}), "after 2 tokens it sent 1 and counts 4"),
        ((IDS[:3], 0, {"output_token_logprobs": [[-1.0, 1, None]] * 3}), "another token"),
        (([7, 8, 2, 9], 0, {}), "went on after a stop token"),
        (([*IDS, *IDS], 0, {}), "10 tokens where at most 8"),
    ],
)
async def test_events_that_contradict_each_other_are_refused(
    second: tuple[list[int], int, dict[str, Any]], says: str
) -> None:
    ids, since, changes = second

    def answer(seen: Seen) -> Answer:
        first = wire.generated(seen, IDS[:2], ["v3"] * 2, None)
        return wire.stream(first, wire.generated(seen, ids, ["v3"] * len(ids), None, since=since, **changes))

    got, _, _ = await drawn(answer, streamed=True)
    assert failure_of(got).kind is K.MALFORMED
    assert says in failure_of(got).message


async def test_a_logprob_may_come_with_the_event_after_its_token() -> None:
    def answer(seen: Seen) -> Answer:
        early = wire.generated(seen, IDS[:3], ["v3"] * 3, None)
        early["meta_info"]["output_token_logprobs"].pop()
        return wire.stream(early, wire.generated(seen, IDS, ["v3"] * 5, wire.stopped(2)))

    got, told, _ = await drawn(answer, streamed=True)
    assert completion_of(got).token_ids == IDS
    assert [len(one.token_ids) for one in told] == [2, 5]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
META = {
    "finish_reason": st.sampled_from([wire.stopped(2), wire.stopped(7), wire.cut(8), wire.aborted(), None]) | JSON,
    "prompt_tokens": JSON,
    "completion_tokens": st.integers(0, 5) | JSON,
    "weight_version": st.just("v4") | JSON,
    "weight_versions": st.just([{"version": "v3", "start": 0, "end": 1}]) | JSON,
    "output_token_logprobs": st.lists(st.tuples(st.floats(-9, 0), st.integers(0, 9)) | JSON, max_size=5) | JSON,
}


@st.composite
def answers(draw: st.DrawFn) -> Any:
    """An answer or event that was right but for a few fields, which now hold anything."""
    ids = draw(st.just(IDS) | st.lists(st.sampled_from([7, 8, 50, 2]), max_size=12))
    finish = draw(st.sampled_from([None, wire.cut(len(ids)), wire.stopped(ids[-1] if ids else 2)]))
    sent = Seen("POST", "/generate", {}, b'{"rid": "r", "input_ids": [1, 5, 6]}')
    answer = wire.generated(sent, list(ids), ["v3"] * max(len(ids), 1), finish)
    for name in draw(st.sets(st.sampled_from(sorted(META)), max_size=2)):
        answer["meta_info"][name] = draw(META[name])
    for name in draw(st.sampled_from([(), (), (), ("output_ids",), ("meta_info",), ("error",)])):
        answer[name] = draw(st.lists(st.integers(0, 9) | JSON, max_size=5) | JSON)
    return answer


def consistent(got: Completion) -> bool:
    ends = [span.end for span in got.spans]
    return (
        0 < len(got.token_ids) == len(got.logprobs) == ends[-1] <= REQUEST.max_tokens
        and all(math.isfinite(value) for value in got.logprobs)
        and (got.finish is not FinishReason.STOP or got.token_ids[-1] == 2)
        and 2 not in got.token_ids[:-1]
    )


def reader(spans: bool) -> Reader:
    return Reader("engine a", REQUEST, 100, "life-1", spans)


@settings(deadline=None)
@given(answers(), st.booleans())
def test_any_answer_is_a_completion_or_a_failure(answer: Any, spans: bool) -> None:
    with contextlib.suppress(EngineFailure):
        assert consistent(reader(spans).part(answer).completion)


@settings(deadline=None)
@given(st.lists(answers(), max_size=4), st.booleans())
def test_any_stream_is_a_completion_or_a_failure_and_tells_only_what_is_consistent(
    events: list[Any], spans: bool
) -> None:
    growing = SglangGrowing(reader(spans), "v3")
    with contextlib.suppress(EngineFailure):
        for event in events:
            growing.add(event)
            assert not growing.size or consistent(growing.partial())
        assert consistent(growing.whole().completion)
