"""OpenAI's Chat Completions: a conversation as a request, and an answer as a message.

Invariant: what an engine said is told back to it as it said it, so that nothing is lost which only it can read
(arguments spelt its own way, its reasoning where it asks for that); what others said is plain text and images.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from ..contracts.messages import ImagePart, Message, Role, ToolSpec
from ..contracts.reasons import FinishReason
from .calls import spelt_call
from .engines import Answer, AskRequest, Said
from .errors import EngineFailure, malformed, rejected
from .plain import plain_tools

PATH: Final = "/chat/completions"
LIMITS: Final = ("max_tokens", "max_completion_tokens")
"""Names of the limit of an answer: most servers know the first, OpenAI's reasoning models only the second."""
_TOLD_BACK: Final = ("content", "tool_calls", "refusal")
_REASONING: Final = ("reasoning_content", "reasoning", "reasoning_details")
"""Told back only with tool calls: servers that want their reasoning again want it then, others refuse it elsewhere."""
_FINISH: Final = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}


def body(request: AskRequest, model: str, limit: str) -> dict[str, Any]:
    """`limit`: which of `LIMITS` the server knows."""
    out: dict[str, Any] = {
        "model": model,
        "messages": [_message(said) for said in request.conversation],
        limit: request.max_tokens,
    }
    tools = plain_tools(request.tools)
    if tools is not None:
        out["tools"] = tools
    if request.sampling.temperature != 1.0:  # the default everywhere, and all that some models take
        out["temperature"] = request.sampling.temperature
    return out | request.sampling.special


def read(who: str, request: AskRequest, answer: dict[str, Any], raw: bytes) -> Answer:
    """The answer's message. Raises EngineFailure where there is none, or where the provider withheld it."""
    try:
        choice = answer["choices"][0]
        said, reason = choice["message"], choice.get("finish_reason")
        content, reasoning = _text(said.get("content")), said.get("reasoning_content") or said.get("reasoning")
        named = [(call.get("id"), call["function"]) for call in said.get("tool_calls") or ()]
        ids = call_ids([call_id for call_id, _ in named], request.turn)
        calls = tuple(
            spelt_call(call_id, function.get("name"), function.get("arguments") or "")
            for call_id, (_, function) in zip(ids, named, strict=True)
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise malformed(f"{who} answered with something that is no chat completion: {error!r}") from None
    return Answer(
        message=Message(
            role=Role.ASSISTANT,
            content=content or _text(said.get("refusal")),
            reasoning=reasoning if isinstance(reasoning, str) and reasoning else None,
            tool_calls=calls,
        ),
        finish=finish(who, reason, _FINISH),
        usage_prompt=counted(answer.get("usage"), "prompt_tokens"),
        usage_sampled=counted(answer.get("usage"), "completion_tokens"),
        model=model if isinstance(model := answer.get("model"), str) else None,
        raw=raw,
    )


def call_ids(given: Sequence[object], turn: int) -> list[str]:
    """A name for each tool call of a turn: the provider's own unless it has one twice, else `call_{turn}_{index}`."""
    taken: set[str] = set()
    names = []
    for index, own in enumerate(given):
        name = own if isinstance(own, str) and own and own not in taken else f"call_{turn}_{index}"
        taken.add(name)
        names.append(name)
    return names


def finish(who: str, reason: object, known: dict[str, FinishReason]) -> FinishReason:
    """A word of the wire as ours. Raises EngineFailure for an answer that the provider withheld, or an unknown word."""
    if reason == "content_filter":
        raise withheld(who)
    if reason is None:  # some servers leave it out
        return FinishReason.STOP
    if not isinstance(reason, str) or reason not in known:
        raise malformed(f"{who} says that its answer ended for an unknown reason: {reason!r}")
    return known[reason]


def withheld(who: str) -> EngineFailure:
    """No reward is made of what nobody may read, and it would be withheld again."""
    return rejected(f"{who} withheld its answer (content filter)")


def counted(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value < 2**31 else None


def _message(said: Said) -> dict[str, Any]:
    message = said.message
    if message.role is Role.ASSISTANT:
        return _assistant(message, said.answer)
    out: dict[str, Any] = {"role": message.role.value, "content": parts(message, "text", "image_url")}
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None and message.role is Role.USER:
        out["name"] = message.name
    return out


def parts(message: Message, text: str, image: str) -> str | list[dict[str, Any]]:
    """Content as a string, or as parts where there are images. `text`, `image`: what the API calls either part."""
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": image, "image_url": {"url": part.url} if image == "image_url" else part.url}
        if isinstance(part, ImagePart)
        else {"type": text, "text": part.text}
        for part in message.content
    ]


def _assistant(message: Message, answer: bytes | None) -> dict[str, Any]:
    choices = None if answer is None else json.loads(answer).get("choices")
    if not choices:  # the environment said it, or an engine in another dialect
        return _plain_assistant(message)
    said = choices[0]["message"]
    names = (*_TOLD_BACK, *(_REASONING if message.tool_calls else ()))
    out = {"role": "assistant"} | {name: said[name] for name in names if said.get(name) is not None}
    if message.tool_calls:
        out["tool_calls"] = [
            {**call, "id": ours.id} for call, ours in zip(said["tool_calls"], message.tool_calls, strict=True)
        ]
    return out if len(out) > 1 else {**out, "content": ""}


def _plain_assistant(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": parts(message, "text", "image_url")}
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name or "unknown",
                    "arguments": json.dumps(call.arguments) if call.problem is None else call.raw or "",
                },
            }
            for call in message.tool_calls
        ]
    return out


def _text(content: object) -> str:
    """Content as text: a string, or the text of its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def tool_specs(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Tools as the Responses API has them, without an envelope."""
    return [
        {"type": "function", "name": t.name, "description": t.description, "parameters": t.parameters, "strict": False}
        for t in tools
    ]
