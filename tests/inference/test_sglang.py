"""The SGLang client against recorded answers, whole and broken."""

import math
from typing import Any

import pytest
from atropos.contracts.engines import CAPABILITIES, EngineKind, why_untrainable_engine
from atropos.contracts.reasons import FinishReason
from atropos.contracts.sampling import Sampling
from atropos.inference import sglang
from atropos.inference.connect import connect_engine
from atropos.inference.engines import Completion, EngineAddress, LabelSpan, SampleRequest
from atropos.inference.errors import EngineFailureKind
from atropos.inference.sglang import SglangEngine
from atropos.tests.inference import sglang_wire as wire
from atropos.tests.inference.servers import Answer, Seen, serving
from atropos.tests.inference.sglang_wire import IDS, REQUEST, WHOLE, completion_of, drawn, engine_at, failure_of, whole

K = EngineFailureKind


@pytest.fixture(autouse=True)
def _told_of_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "PROGRESS_S", 0.0)


async def test_tokens_go_in_and_come_out_with_the_weights_that_sampled_each() -> None:
    async with serving(wire.engine(whole)) as server:
        engine = engine_at(server.url + "/v1", api_key="s3cret")
        got = await engine.sample(REQUEST)
        assert got == WHOLE
        assert (await engine.weight_info()).incarnation == got.incarnation
        await engine.close()
    sent = next(seen for seen in server.seen if seen.path == "/generate")
    assert sent.headers["authorization"] == "Bearer s3cret"
    assert sent.json == {
        "rid": "r-1/part/0/",
        "input_ids": [1, 5, 6],
        "stream": False,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 8,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "n": 1,
            "stop_token_ids": [2],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": 11,
        },
    }


async def test_what_an_evaluation_asks_for_replaces_what_is_neutral() -> None:
    request = SampleRequest("r", [1], Sampling(top_p=0.9, top_k=5, logit_bias={"7": 1.0}), 8, (2,))
    _, _, (sent,) = await drawn(whole, request)
    parameters = sent["sampling_params"]
    assert (parameters["top_p"], parameters["top_k"], parameters["logit_bias"]) == (0.9, 5, {"7": 1.0})


async def test_a_server_that_says_one_name_for_an_answer_is_believed_only_where_it_is_too_old_to_say_more() -> None:
    def one_name(seen: Seen) -> Answer:
        return Answer(body=wire.generated(seen, IDS, ["v4"] * 5, wire.stopped(2), version=wire.OLD))

    got, _, _ = await drawn(one_name, info=wire.server_info(wire.OLD))
    assert completion_of(got).spans == (LabelSpan("v4", 0, 5),)
    got, _, _ = await drawn(one_name)
    assert "left out or misspelt" in failure_of(got).message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"output_token_logprobs": [[-1.0, 7, None]] * 4}, "4 logprobs for 5 tokens"),
        ({"output_token_logprobs": [[-1.0, i, None] for i in (7, 8, 9, 7, 3)]}, "another token"),
        ({"output_token_logprobs": [[math.nan, i, None] for i in IDS]}, "not a finite number"),
        ({"output_token_logprobs": [[None, i, None] for i in IDS]}, "not a finite number"),
        ({"output_token_logprobs": [[0.4, i, None] for i in IDS]}, "above 0"),
        ({"output_token_logprobs": None}, "left out or misspelt"),
        ({"output_token_logprobs": [[]] * 5}, "left out or misspelt"),
        ({"finish_reason": wire.stopped(9)}, "stopped at token 9, and its last token is 2"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "a reason we do not know"),
        ({"finish_reason": {"type": "tired"}}, "a reason we do not know"),
        ({"finish_reason": None}, "left out or misspelt"),
        ({"prompt_tokens": 4}, "read 4 prompt tokens where 3 were sent"),
        ({"completion_tokens": 4}, "counts 4 sampled tokens"),
        ({"weight_versions": []}, "cover 0 of 5"),
        ({"weight_versions": [{"version": "v3", "start": 0, "end": 4}]}, "cover 4 of 5"),
        ({"weight_versions": [{"version": 3, "start": 0, "end": 5}]}, "not a label"),
        ({"weight_versions": None}, "left out or misspelt"),
    ],
)
async def test_an_answer_that_contradicts_itself_is_refused(changes: dict[str, Any], says: str) -> None:
    got, _, _ = await drawn(lambda seen: whole(seen, **changes))
    assert (failure_of(got).kind, failure_of(got).retryable) == (K.MALFORMED, True)
    assert says in failure_of(got).message


@pytest.mark.parametrize("ids", [[7, 2], []])
async def test_an_end_token_left_out_of_the_tokens_is_refused(ids: list[int]) -> None:
    def trimmed(seen: Seen) -> Answer:
        answer = wire.generated(seen, ids, ["v3"] * 2, wire.stopped(2))
        answer["output_ids"] = ids[:-1]
        return Answer(body=answer)

    got, _, _ = await drawn(trimmed)
    assert failure_of(got).kind is K.MALFORMED


@pytest.mark.parametrize(
    ("answer", "kind", "retryable"),
    [
        (Answer(400, wire.REFUSED), K.REJECTED, False),
        (Answer(400, wire.REPEATED), K.UNAVAILABLE, True),
        (Answer(401, wire.UNAUTHORIZED), K.REJECTED, False),
        (Answer(429, b""), K.OVERLOADED, True),
        (Answer(500, b"Internal Server Error"), K.UNAVAILABLE, True),
        (Answer(503, wire.BUSY), K.OVERLOADED, True),
        (wire.stream({"error": {"message": "Duplicate request ID detected: r", "code": 400}}), K.UNAVAILABLE, True),
        (wire.stream({"error": wire.REFUSED["error"] | {"code": 400, "retryable": False}}), K.REJECTED, False),
        (wire.stream(wire.REFUSED), K.REJECTED, False),
        (wire.stream({"error": wire.BUSY}), K.OVERLOADED, True),
        (wire.stream(), K.UNAVAILABLE, True),
        (wire.stream(done=False), K.UNAVAILABLE, True),
        (wire.stream([1]), K.MALFORMED, True),
        (wire.stream({"meta_info": {}}), K.MALFORMED, True),
        (Answer(200, b"{half"), K.MALFORMED, True),
    ],
)
async def test_an_error_is_a_failure_of_its_kind(answer: Answer, kind: EngineFailureKind, retryable: bool) -> None:
    streamed = answer.headers != {}
    got, _, _ = await drawn(lambda _: answer, streamed=streamed)
    assert (failure_of(got).kind, failure_of(got).retryable) == (kind, retryable)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (wire.aborted(), K.UNAVAILABLE),
        (wire.aborted(503, "The request queue is full."), K.OVERLOADED),
        (wire.aborted(500, "Disconnected"), K.UNAVAILABLE),
        (wire.aborted(400, "Input length (600 tokens) exceeds the maximum allowed length"), K.REJECTED),
    ],
)
async def test_an_aborted_request_gives_no_completion(
    reason: dict[str, Any], kind: EngineFailureKind, streamed: bool
) -> None:
    def answer(seen: Seen) -> Answer:
        body = wire.generated(seen, IDS[:2], ["v3"] * 2, reason)
        return wire.stream(body) if streamed else Answer(body=body)

    got, told, _ = await drawn(answer, streamed=streamed)
    assert failure_of(got).kind is kind
    assert [one.token_ids for one in told] == ([IDS[:2]] if streamed else [])


async def test_an_answer_that_the_limit_cut_is_cut_unless_its_last_token_ends_it() -> None:
    request = SampleRequest("r", [1, 5, 6], Sampling(), 2, (2,))
    got, _, _ = await drawn(lambda seen: Answer(body=wire.generated(seen, [7, 8], ["v3"] * 2, wire.cut(2))), request)
    assert completion_of(got).finish is FinishReason.LENGTH
    got, _, _ = await drawn(lambda seen: Answer(body=wire.generated(seen, [7, 2], ["v3"] * 2, wire.cut(2))), request)
    assert completion_of(got).finish is FinishReason.STOP


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_end_token_that_is_none_of_ours_is_sampled_past(streamed: bool) -> None:
    parts = iter([([7, 50], ["v3", "v3"], 50), ([8, 50], ["v3", "v4"], 50), ([9, 2], ["v4", "v4"], 2)])

    def answer(seen: Seen) -> Answer:
        ids, labels, end = next(parts)
        body = wire.generated(seen, ids, labels, wire.stopped(end))
        return wire.stream(body) if streamed else Answer(body=body)

    got, told, sent = await drawn(answer, streamed=streamed)
    assert got == Completion(
        [7, 50, 8, 50, 9, 2],
        [-token / 8 for token in (7, 50, 8, 50, 9, 2)],
        FinishReason.STOP,
        (LabelSpan("v3", 0, 3), LabelSpan("v4", 3, 6)),
        WHOLE.incarnation,
        3,
    )
    assert [one["rid"] for one in sent] == ["r-1/part/0/", "r-1/part/1/", "r-1/part/2/"]
    assert [one["input_ids"] for one in sent] == [[1, 5, 6], [1, 5, 6, 7, 50], [1, 5, 6, 7, 50, 8, 50]]
    assert [one["sampling_params"]["max_new_tokens"] for one in sent] == [8, 6, 4]
    assert all(one.token_ids == got.token_ids[: len(one.token_ids)] for one in told)


async def test_an_end_token_that_is_none_of_ours_and_the_last_that_was_asked_for_cuts() -> None:
    request = SampleRequest("r", [1, 5, 6], Sampling(), 2, (2,))
    got, _, sent = await drawn(
        lambda seen: Answer(body=wire.generated(seen, [7, 50], ["v3"] * 2, wire.stopped(50))), request
    )
    assert (completion_of(got).finish, len(sent)) == (FinishReason.LENGTH, 1)


async def test_a_server_that_changes_how_everything_is_sampled_is_refused_by_name() -> None:
    got, _, sent = await drawn(whole, info=wire.server_info(preferred_sampling_params={"top_p": 0.95}))
    assert (failure_of(got).kind, sent) == (K.REJECTED, [])
    assert "--preferred-sampling-params" in failure_of(got).message


async def test_no_request_id_is_the_beginning_of_another() -> None:
    sent = [
        sglang.request_body(SampleRequest(f"r-{n}", [1], Sampling(), 2, ()), m, stream=False)["rid"]
        for n in range(12)
        for m in range(12)
    ]
    assert not any(a != b and a.startswith(b) for a in sent for b in sent)


async def test_health_costs_nothing_and_the_limit_is_what_a_prompt_may_have() -> None:
    async with serving(wire.engine(whole)) as server:
        engine = connect_engine(EngineAddress("a", EngineKind.SGLANG, server.url))
        assert isinstance(engine, SglangEngine)
        await engine.health()
        assert await engine.context_limit() == 505
        assert await engine.label() == "v3"
        await engine.close()
    assert {seen.path for seen in server.seen} == {"/model_info", "/server_info"}


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (wire.server_info(), wire.server_info(), True),
        (wire.server_info(), wire.server_info(seed=7), False),
        (wire.server_info(), wire.server_info(startup_time={"load_weight": 2.3}), False),
        (wire.server_info(wire.OLD), wire.server_info(wire.OLD, seed=7), False),
    ],
)
async def test_another_life_of_a_server_is_told_from_this_one(
    first: dict[str, Any], second: dict[str, Any], same: bool
) -> None:
    lives = []
    for info in (first, second):
        async with serving(wire.engine(whole, info=info)) as server:
            engine = engine_at(server.url)
            lives.append((await engine.weight_info()).incarnation)
            await engine.close()
    assert (lives[0] == lives[1]) is same


@pytest.mark.parametrize(
    ("version", "keeps"),
    [
        ("0.5.23", True),
        ("0.5.24.dev3+g1a2b", True),
        ("0.6.0rc1", True),
        ("0.5.22", False),
        ("0.0.0", False),
        (None, False),
    ],
)
def test_calls_are_kept_over_a_load_only_by_servers_known_to_do_it_well(version: str | None, keeps: bool) -> None:
    assert sglang.keeps_calls({"version": version}) is keeps


def test_it_can_be_trained_on() -> None:
    assert why_untrainable_engine(EngineKind.SGLANG) is None
    assert CAPABILITIES[EngineKind.SGLANG].publishes


@pytest.mark.parametrize(
    ("metrics", "waiting"),
    [
        (Answer(200, b'# TYPE sglang:num_queue_reqs gauge\nsglang:num_queue_reqs{model_name="policy"} 3.0\n'), 3),
        (Answer(404, {"detail": "Not Found"}), None),
    ],
)
async def test_it_says_how_many_wait_where_it_was_started_to(metrics: Answer, waiting: int | None) -> None:
    async with serving(lambda _: metrics) as server:
        engine = engine_at(server.url)
        assert await engine.waiting() == waiting
        await engine.close()
