"""OpenAI's Responses API: a conversation as a request, and an answer as a message.

Invariant: nothing is kept on the server (`store: false`), so a conversation is what our rows say. Items that the engine
gave are told back as they came, its encrypted reasoning included, which reasoning models want beside their tool calls.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from ..contracts.messages import Message, Role
from ..contracts.reasons import FinishReason
from .calls import spelt_call
from .chat import call_ids, counted, parts, tool_specs, withheld
from .engines import Answer, AskRequest, Said
from .errors import malformed, unavailable

PATH: Final = "/responses"
LIMITS: Final = ("max_output_tokens",)
INCLUDE: Final = ["reasoning.encrypted_content"]


def body(request: AskRequest, model: str, limit: str) -> dict[str, Any]:
    out: dict[str, Any] = {
        "model": model,
        "input": [item for said in request.conversation for item in _items(said)],
        limit: request.max_tokens,
        "store": False,
        "include": INCLUDE,
    }
    if request.tools:
        out["tools"] = tool_specs(request.tools)
    if request.sampling.temperature != 1.0:
        out["temperature"] = request.sampling.temperature
    return out | request.sampling.special


def read(who: str, request: AskRequest, answer: dict[str, Any], raw: bytes) -> Answer:
    """The answer's message. Raises EngineFailure where there is none, or where the provider withheld it."""
    try:
        items = [item for item in answer["output"] if item["type"] in ("message", "function_call", "reasoning")]
        text = "".join(_texts(items, "message", "content", ("text", "refusal")))
        reasoning = "\n".join(
            [*_texts(items, "reasoning", "summary", ("text",)), *_texts(items, "reasoning", "content", ("text",))]
        )
        called = [item for item in items if item["type"] == "function_call"]
        ids = call_ids([item.get("call_id") for item in called], request.turn)
        calls = tuple(
            spelt_call(call_id, item.get("name"), item.get("arguments") or "")
            for call_id, item in zip(ids, called, strict=True)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise malformed(f"{who} answered with something that is no response: {error!r}") from None
    return Answer(
        message=Message(role=Role.ASSISTANT, content=text, reasoning=reasoning or None, tool_calls=calls),
        finish=_finish(who, answer),
        usage_prompt=counted(answer.get("usage"), "input_tokens"),
        usage_sampled=counted(answer.get("usage"), "output_tokens"),
        model=model if isinstance(model := answer.get("model"), str) else None,
        raw=raw,
    )


def _finish(who: str, answer: dict[str, Any]) -> FinishReason:
    status, details = answer.get("status"), answer.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    if status == "completed":
        return FinishReason.STOP
    if status == "incomplete" and reason == "content_filter":
        raise withheld(who)
    if status == "incomplete":
        return FinishReason.LENGTH
    raise unavailable(f"{who} did not finish its answer (status {status!r})")


def _texts(items: list[Any], kind: str, field: str, names: tuple[str, ...]) -> Iterator[str]:
    for item in items:
        for part in (item.get(field) or ()) if item["type"] == kind else ():
            yield from (part[name] for name in names if isinstance(part.get(name), str))


def _items(said: Said) -> Iterator[dict[str, Any]]:
    message = said.message
    if message.role is Role.TOOL:
        yield {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.text}
    elif message.role is not Role.ASSISTANT:
        yield {"role": message.role.value, "content": parts(message, "input_text", "input_image")}
    else:
        yield from _assistant(message, said.answer)


def _assistant(message: Message, answer: bytes | None) -> Iterator[dict[str, Any]]:
    output = None if answer is None else json.loads(answer).get("output")
    if output:
        calls = iter(message.tool_calls)
        yield from (item if item["type"] != "function_call" else {**item, "call_id": next(calls).id} for item in output)
        return
    # The environment said it, or an engine in another dialect.
    if message.text:
        yield {"role": "assistant", "content": message.text}
    for call in message.tool_calls:
        yield {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name or "unknown",
            "arguments": json.dumps(call.arguments) if call.problem is None else call.raw or "",
        }
