"""Servers that take messages: what is sent, what is read, and how their quirks and refusals are taken."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from atropos.contracts.engines import EngineApi, EngineKind, HostedOptions
from atropos.contracts.messages import (
    ImagePart,
    Message,
    Role,
    TextPart,
    ToolCall,
    ToolSpec,
    system,
    tool_result,
    user,
)
from atropos.contracts.reasons import FinishReason
from atropos.contracts.sampling import Sampling
from atropos.inference.engines import Answer as Answered
from atropos.inference.engines import AskRequest, ContextOverflow, EngineAddress, Said
from atropos.inference.errors import EngineFailure, EngineFailureKind
from atropos.inference.hosted import HostedEngine
from hypothesis import given
from hypothesis import strategies as st

from .servers import Answer, Seen, Server, serving

SUM = ToolSpec(name="sum", description="Adds.", parameters={"type": "object", "properties": {}})
QUESTION = (Said(system("Be brief.")), Said(user("1+1?")))
CHAT, RESPONSES = EngineApi.CHAT, EngineApi.RESPONSES
PATHS = {CHAT: "/v1/chat/completions", RESPONSES: "/v1/responses"}


def request(*said: Said, sampling: Sampling | None = None, turn: int = 0) -> AskRequest:
    return AskRequest("r", said or QUESTION, (SUM,), sampling or Sampling(), 32, turn, "policy")


def chat(message: dict[str, Any], finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    """As the Chat Completions API documents it."""
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "m-1", "choices": [choice], "usage": usage} | more


def response(*output: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    """As the Responses API documents it."""
    usage = {"input_tokens": 11, "output_tokens": 7, "total_tokens": 18}
    return {"id": "resp_1", "status": status, "model": "m-1", "output": list(output), "usage": usage} | more


def text_item(text: str) -> dict[str, Any]:
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def called(name: str, arguments: str, call_id: str | None) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def called_item(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": call_id, "name": name, "arguments": arguments}


def hosted(url: str, api: EngineApi = CHAT, **options: Any) -> HostedEngine:
    address = EngineAddress("e", EngineKind.OPENAI, url, 4, "k3y", HostedOptions(api=api, **options))
    return HostedEngine(address)


async def ask(
    answers: list[Any], asked: AskRequest | None = None, api: EngineApi = CHAT, **options: Any
) -> tuple[Answered, Server]:
    left = [answer if isinstance(answer, Answer) else Answer(body=answer) for answer in answers]
    async with serving(lambda _: left.pop(0)) as server:
        engine = hosted(server.url, api, **options)
        try:
            return await engine.ask(asked or request()), server
        finally:
            await engine.close()


async def test_a_chat_is_asked_for_once_and_read_with_its_bytes() -> None:
    body = chat({"content": "2", "reasoning_content": "one and one"})
    answer, server = await ask([body], reasoning := request(), body={"reasoning_effort": "low"}, model="gpt-x")
    assert reasoning.conversation == QUESTION
    seen = server.seen[0]
    assert (seen.path, seen.headers["authorization"]) == (PATHS[CHAT], "Bearer k3y")
    assert seen.json == {
        "model": "gpt-x",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        "max_tokens": 32,
        "tools": [
            {"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": SUM.parameters}}
        ],
        "reasoning_effort": "low",
    }
    assert (answer.message.text, answer.message.reasoning, answer.finish) == ("2", "one and one", FinishReason.STOP)
    assert (answer.usage_prompt, answer.usage_sampled, answer.model) == (11, 7, "m-1")
    assert json.loads(answer.raw) == body


async def test_a_response_is_asked_for_once_and_kept_nowhere() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "one and one"}]}
    answer, server = await ask([response(thought, text_item("2"))], api=RESPONSES)
    sent = server.seen[0].json
    assert (server.seen[0].path, sent["store"], sent["include"]) == (
        PATHS[RESPONSES], False, ["reasoning.encrypted_content"],
    )  # fmt: skip
    assert sent["input"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert sent["tools"] == [
        {"type": "function", "name": "sum", "description": "Adds.", "parameters": SUM.parameters, "strict": False}
    ]
    assert (sent["max_output_tokens"], sent["model"], "n" in sent) == (32, "policy", False)
    assert (answer.message.text, answer.message.reasoning) == ("2", "one and one")
    assert (answer.usage_prompt, answer.usage_sampled) == (11, 7)


async def test_what_a_chat_model_said_is_told_back_as_it_said_it() -> None:
    spelt = '{"a": 1,  "b":1}'
    first, _ = await ask([chat({"reasoning_content": "add", "tool_calls": [called("sum", spelt, "c1")]}, "tool_calls")])
    call = first.message.tool_calls[0]
    assert call == ToolCall(id="c1", name="sum", arguments={"a": 1, "b": 1})
    said = Said(first.message, first.raw)
    _, server = await ask([chat({"content": "2"})], request(*QUESTION, said, Said(tool_result("2", call)), turn=1))
    assert server.seen[0].json["messages"][2:] == [
        {"role": "assistant", "tool_calls": [called("sum", spelt, "c1")], "reasoning_content": "add"},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


async def test_items_of_a_response_are_told_back_with_their_encrypted_reasoning() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    first, _ = await ask([response(thought, called_item("sum", '{"a":1}', "c1"))], api=RESPONSES)
    said = (*QUESTION, Said(first.message, first.raw), Said(tool_result("2", first.message.tool_calls[0])))
    _, server = await ask([response(text_item("2"))], request(*said, turn=1), RESPONSES)
    assert server.seen[0].json["input"][2:] == [
        thought,
        called_item("sum", '{"a":1}', "c1"),
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]


@pytest.mark.parametrize("api", [CHAT, RESPONSES])
async def test_what_others_said_travels_with_calls_and_images(api: EngineApi) -> None:
    call = ToolCall(id="c9", name="sum", arguments={"a": 1})
    picture = Message(role=Role.USER, content=(TextPart(text="This?"), ImagePart(url="data:image/png;base64,AA==")))
    spoken = Said(Message(role=Role.ASSISTANT, content="Let me see.", tool_calls=(call,)))
    body = chat({"content": "2"}) if api is CHAT else response(text_item("2"))
    _, server = await ask([body], request(Said(picture), spoken), api)
    sent = server.seen[0].json
    if api is CHAT:
        assert sent["messages"][0]["content"] == [
            {"type": "text", "text": "This?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        ]
        assert sent["messages"][1]["tool_calls"] == [called("sum", '{"a": 1}', "c9")]
    else:
        assert sent["input"][0]["content"] == [
            {"type": "input_text", "text": "This?"},
            {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
        ]
        assert sent["input"][2] == {"type": "function_call", "call_id": "c9", "name": "sum", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("{not json", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"a": NaN}', "a number that JSON does not have"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
@pytest.mark.parametrize("api", [CHAT, RESPONSES])
async def test_a_malformed_call_is_an_error_the_model_can_correct(api: EngineApi, arguments: str, problem: str) -> None:
    def body() -> dict[str, Any]:
        if api is CHAT:
            return chat({"tool_calls": [called("sum", arguments, "c1")]}, "tool_calls")
        return response(called_item("sum", arguments, "c1"))

    answer, _ = await ask([body()], api=api)
    call = answer.message.tool_calls[0]
    assert problem in (call.problem or "")
    assert call.raw == arguments
    said = (*QUESTION, Said(answer.message, answer.raw), Said(tool_result(call.problem or "", call)))
    _, server = await ask([chat({"content": "2"}) if api is CHAT else response(text_item("2"))], request(*said), api)
    assert json.dumps(arguments) in server.seen[0].body.decode()


async def test_calls_without_a_name_of_their_own_get_ours_and_keep_it() -> None:
    calls = [called("sum", "{}", None), called("sum", "", "x"), called("sum", "{}", "x")]
    answer, _ = await ask([chat({"tool_calls": calls}, "tool_calls")], request(turn=3))
    assert [call.id for call in answer.message.tool_calls] == ["call_3_0", "x", "call_3_2"]
    _, server = await ask([chat({"content": "2"})], request(*QUESTION, Said(answer.message, answer.raw)))
    assert [call["id"] for call in server.seen[0].json["messages"][2]["tool_calls"]] == ["call_3_0", "x", "call_3_2"]


async def test_a_server_that_wants_the_limit_called_otherwise_is_asked_so_from_then_on() -> None:
    refusal = {
        "error": {
            "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
            "'max_completion_tokens' instead.",
            "type": "invalid_request_error",
            "code": "unsupported_parameter",
        }
    }

    def answer(seen: Seen) -> Answer:
        return Answer(400, refusal) if "max_tokens" in seen.json else Answer(body=chat({"content": "2"}))

    async with serving(answer) as server:
        engine = hosted(server.url)
        answers = await asyncio.gather(*(engine.ask(request()) for _ in range(8)))
        asked = len(server.seen)
        await engine.ask(request())
        await engine.close()
    assert [one.message.text for one in answers] == ["2"] * 8
    assert len(server.seen) == asked + 1
    assert server.seen[-1].json["max_completion_tokens"] == 32


async def test_a_model_without_encrypted_reasoning_is_asked_without() -> None:
    refusal = {"error": {"message": "Encrypted content is not supported with this model.", "param": "include"}}
    answer, server = await ask([Answer(400, refusal), response(text_item("2"))], api=RESPONSES)
    assert answer.message.text == "2"
    assert "include" not in server.seen[1].json


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."),
        (400, '{"error": {"code": "context_length_exceeded"}}'),
        (400, "prompt is too long: 210000 tokens > 200000 maximum"),
        (413, "Your input exceeds the context window of this model."),
    ],
)
async def test_a_conversation_that_does_not_fit_is_no_failure(status: int, message: str) -> None:
    with pytest.raises(ContextOverflow):
        await ask([Answer(status, {"error": {"message": message}})])


@pytest.mark.parametrize(
    ("answer", "kind", "retryable"),
    [
        (Answer(401, {"error": {"message": "Incorrect API key provided"}}), EngineFailureKind.REJECTED, False),
        (Answer(429, {"error": {"code": "rate_limit_exceeded"}}), EngineFailureKind.OVERLOADED, True),
        (Answer(500, b"oops"), EngineFailureKind.UNAVAILABLE, True),
        (Answer(200, b"<html>gateway</html>"), EngineFailureKind.MALFORMED, True),
        (Answer(200, {"error": {"code": 429, "message": "slow down"}}), EngineFailureKind.OVERLOADED, True),
        (Answer(200, {"error": {"message": "upstream"}}), EngineFailureKind.UNAVAILABLE, True),
        (Answer(200, {"choices": []}), EngineFailureKind.MALFORMED, True),
        (Answer(200, chat({"content": "x"}, "bored")), EngineFailureKind.MALFORMED, True),
        (Answer(200, chat({"content": ""}, "content_filter")), EngineFailureKind.REJECTED, False),
        (Answer(200, chat({"content": "2"}), declared=10_000), EngineFailureKind.UNAVAILABLE, True),
        (Answer(raw=b""), EngineFailureKind.UNAVAILABLE, True),
    ],
)
async def test_failures_are_told_apart_and_never_become_an_answer(
    answer: Answer, kind: EngineFailureKind, retryable: bool
) -> None:
    with pytest.raises(EngineFailure) as caught:
        await ask([answer])
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
    assert "k3y" not in caught.value.message


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (response(text_item("2"), status="failed", error={"code": "server_error"}), EngineFailureKind.UNAVAILABLE),
        (
            response(status="incomplete", incomplete_details={"reason": "content_filter"}),
            EngineFailureKind.REJECTED,
        ),
        ({"status": "completed"}, EngineFailureKind.MALFORMED),
    ],
)
async def test_responses_that_failed_are_told_apart(body: dict[str, Any], kind: EngineFailureKind) -> None:
    with pytest.raises(EngineFailure) as caught:
        await ask([body], api=RESPONSES)
    assert caught.value.kind is kind


async def test_a_cut_answer_says_so_and_missing_counts_stay_unknown() -> None:
    cut, _ = await ask([chat({"content": "tw"}, "length", usage=None)])
    assert (cut.finish, cut.usage_prompt, cut.usage_sampled) == (FinishReason.LENGTH, None, None)
    cut, _ = await ask(
        [response(text_item("tw"), status="incomplete", incomplete_details={"reason": "max_output_tokens"})],
        api=RESPONSES,
    )
    assert cut.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("", "/v1/models"),
        ("/v1", "/v1/models"),
        ("/api/v1/", "/api/v1/models"),
        ("/v1beta/openai", "/v1beta/openai/models"),
    ],
)
async def test_health_is_the_free_list_of_models(url: str, path: str) -> None:
    async with serving(lambda _: Answer(body={"data": []})) as server:
        engine = hosted(server.url + url)
        await engine.health()
        await engine.close()
    assert [(seen.method, seen.path) for seen in server.seen] == [("GET", path)]


@pytest.mark.parametrize(("status", "up"), [(404, True), (405, True), (401, False), (503, False)])
async def test_a_server_without_a_list_is_up_and_one_that_refuses_the_key_is_not(status: int, up: bool) -> None:
    async with serving(lambda _: Answer(status)) as server:
        engine = hosted(server.url)
        try:
            await engine.health()
            assert up
        except EngineFailure:
            assert not up
        finally:
            await engine.close()


@pytest.mark.parametrize(
    ("api", "sampling"),
    [(CHAT, Sampling(top_k=5)), (CHAT, Sampling(min_p=0.1)), (RESPONSES, Sampling(stop=("x",)))],
)
async def test_sampling_the_api_does_not_have_is_refused_before_anything_is_sent(
    api: EngineApi, sampling: Sampling
) -> None:
    engine = hosted("http://127.0.0.1:9", api)
    with pytest.raises(EngineFailure) as caught:
        await engine.ask(request(sampling=sampling))
    assert (caught.value.kind, caught.value.retryable) == (EngineFailureKind.REJECTED, False)


async def test_sampling_the_api_has_is_sent() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, presence_penalty=0.5, logit_bias={"7": -100.0}, stop=("x",))
    _, server = await ask([chat({"content": "2"})], request(sampling=sampling))
    sent = server.seen[0].json
    assert {name: sent[name] for name in ("temperature", "top_p", "presence_penalty", "logit_bias", "stop")} == {
        "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {"7": -100.0}, "stop": ["x"],
    }  # fmt: skip


JSON: Callable[[], st.SearchStrategy[Any]] = lambda: st.recursive(  # noqa: E731
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(body=JSON(), message=JSON(), call=JSON(), api=st.sampled_from([CHAT, RESPONSES]))
def test_whatever_a_server_answers_is_an_answer_or_a_failure(
    body: Any, message: Any, call: Any, api: EngineApi
) -> None:
    """Never another exception, which would be retried for ever without a word."""
    from atropos.inference import chat as chats
    from atropos.inference import responses

    read = chats.read if api is CHAT else responses.read
    shapes: list[dict[str, Any]] = [
        {"choices": body, "output": body},
        {"choices": [{"message": message}], "output": [message], "status": "completed"},
        {
            "choices": [{"message": {"content": message, "tool_calls": [call]}}],
            "output": [{"type": "function_call", "arguments": call}],
            "status": "completed",
        },
        {
            "choices": [{"message": {"tool_calls": [{"function": {"name": message, "arguments": call}}]}}],
            "output": [{"type": "message", "content": call}],
            "status": "completed",
        },
    ]
    for shape in shapes:
        try:
            answer = read("e", request(), shape, b"{}")
        except EngineFailure:
            continue
        assert answer.message.role is Role.ASSISTANT
