"""Messages become tokens and tokens become messages; what is malformed stays visible."""

import json
from pathlib import Path

import pytest
from atropos.inference.engine.chat import Chat, load_chat
from atropos.inference.engine.wire import ApiError
from atropos.tests.inference.conformance import TOOL


@pytest.fixture(scope="module")
def chat(weights: tuple[Path, Path]) -> Chat:
    loaded = load_chat(weights[0])
    assert loaded is not None
    return loaded


def test_a_conversation_ends_where_the_assistant_begins(chat: Chat) -> None:
    prompt = chat.render([{"role": "user", "content": "hi"}], None)
    text = chat.tokenizer.decode(prompt)
    assert "<|im_start|>user\nhi<|im_end|>" in text
    assert "<|im_start|>assistant" in text


def test_a_tool_call_is_parsed_from_ids(chat: Chat) -> None:
    prompt = chat.render([{"role": "user", "content": "What is 1 + 2?"}], [TOOL])
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call><|im_end|>'
    message = chat.parse(prompt, chat.encode(call), [TOOL])
    (parsed,) = message["tool_calls"]
    assert parsed["function"]["name"] == "calculator"
    assert json.loads(parsed["function"]["arguments"]) == {"expression": "1+2"}
    assert message["content"] is None


def test_a_malformed_call_stays_in_the_text(chat: Chat) -> None:
    prompt = chat.render([{"role": "user", "content": "What is 1 + 2?"}], [TOOL])
    message = chat.parse(prompt, chat.encode('<tool_call>\n{"name": \n</tool_call><|im_end|>'), [TOOL])
    assert message["tool_calls"] == []
    assert '{"name":' in message["content"]


def test_a_conversation_without_rendering_is_refused(chat: Chat) -> None:
    with pytest.raises(ApiError) as refused:
        chat.render([{"content": "who says this?"}], None)
    assert refused.value.status == 400


def test_a_folder_without_tokenizer_serves_tokens_only(tmp_path: Path) -> None:
    assert load_chat(tmp_path) is None
