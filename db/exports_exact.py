"""A conversation in the chat format, from the exact bytes of its parts.

Invariant: it is what the functions `chat_message` and `chat_answers` of the database make of the same parts, but
without their loss: NUL and lone surrogates stay what they were. Lone surrogates are written as JSON escapes.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def conversation(parts: Sequence[bytes]) -> tuple[bytes, bytes, bool]:
    """Prompt and completion as JSON arrays, and whether JSON holds them exactly.

    `parts`: the prompt, then messages of the model (an object each) and answers (an array each), in their order.
    """
    first, *rest = (json.loads(part) for part in parts)
    completion: list[dict[str, Any]] = []
    for part in rest:
        completion += _answer(part) if isinstance(part, list) else [_message(part)]
    prompt = [_message(one) for one in first]
    texts = dumped(prompt), dumped(completion)
    # Two lone surrogates side by side, high and low, read back as one character: JSON has no words for them.
    return (*texts, [json.loads(text) for text in texts] == [prompt, completion])


def dumped(value: Any) -> bytes:
    """UTF-8 JSON that is exact: with escapes where there are lone surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    if _SURROGATE.search(text):
        text = json.dumps(value)
    return text.encode()


def readable(value: Any) -> Any:
    """The same with U+FFFD in place of lone surrogates: what Arrow can hold."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {readable(name): readable(one) for name, one in value.items()}
    return [readable(one) for one in value] if isinstance(value, list) else value


def has_surrogates(value: Any) -> bool:
    return bool(_SURROGATE.search(json.dumps(value, ensure_ascii=False)))


def _answer(part: list[Any]) -> list[dict[str, Any]]:
    call, content, _, replies, _ = part
    if call is None:
        return [_message(reply) for reply in replies]
    message = {"role": "tool", "content": content, "tool_call_id": call.get("id"), "name": call.get("name") or None}
    return [_present(message)]


def _message(stored: dict[str, Any]) -> dict[str, Any]:
    content = stored.get("content")
    calls = stored.get("tool_calls") or ()
    return _present(
        {
            "role": stored.get("role"),
            "content": [_part(part) for part in content] if isinstance(content, list) else content or "",
            "reasoning_content": stored.get("reasoning"),
            "tool_calls": [_call(call) for call in calls] or None,
            "tool_call_id": stored.get("tool_call_id"),
            "name": stored.get("name"),
        }
    )


def _part(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": part["url"]}} if part["type"] == "image" else _present(part)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    raw = call.get("raw")
    arguments = raw if raw is not None else json.dumps(call.get("arguments") or {}, ensure_ascii=False)
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": call.get("name") or "", "arguments": arguments},
    }


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
