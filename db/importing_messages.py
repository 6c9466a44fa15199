"""Messages as other programs write them, turned into ours, and a conversation taken apart into turns.

Invariant: what was said comes out again as it was: in the same order, with the same text, tool calls and images. What
no message of ours can hold makes its line unreadable (`BadLine`, a sentence), never a different message. Of a tool call
whose arguments cannot be read the text is kept, as of one that was sampled here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..contracts.messages import ImagePart, Message, Part, Role, TextPart, ToolCall
from ..contracts.reasons import StopReason
from ..contracts.records import STEP_INDEX, CallRecord
from ..contracts.text import one_line, shortened

_ROLES: Final = {role.value: role for role in Role} | {"developer": Role.SYSTEM, "function": Role.TOOL}
_DEEPEST: Final = 100
"""Nesting of a tool call's arguments; the database and pydantic both give up somewhere deeper."""


class BadLine(ValueError):
    """A line that cannot be imported; the message is a sentence's end: what is wrong, and why that is refused."""


@dataclass(frozen=True, slots=True)
class Said:
    """An assistant's message and what answered it."""

    message: Message
    calls: tuple[CallRecord, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What it began with, each message of the policy, and how it ended as far as the file tells."""

    prompt: tuple[Message, ...]
    said: tuple[Said, ...]
    stop: StopReason


def shown(value: object) -> str:
    """A value for a sentence."""
    return shortened(one_line(repr(value)), 60)


def messages_of(value: object, where: str) -> list[Message]:
    """A list of messages in the format of OpenAI's chat API, or in ours. Raises BadLine."""
    if not isinstance(value, list):
        raise BadLine(f"{where} is {shown(value)}, not a list of messages")
    return [_message(one, f"{where}[{index}]") for index, one in enumerate(value)]


def taken_apart(messages: Sequence[Message], spoken: int | None = None) -> Conversation:
    """Prompt, turns and ending. `spoken`: how many of the last assistant messages are the policy's own; default: all.

    Raises BadLine where no assistant speaks.
    """
    speaking = [index for index, one in enumerate(messages) if one.role is Role.ASSISTANT]
    if not speaking:
        raise BadLine("no assistant speaks in it: nothing was said that could be learned from")
    mine = speaking if spoken is None or not 1 <= spoken <= len(speaking) else speaking[-spoken:]
    return joined(messages[: mine[0]], messages[mine[0] :])


def joined(prompt: Sequence[Message], completion: Sequence[Message]) -> Conversation:
    """The same where it is known what the prompt was. Raises BadLine where the completion begins with somebody else."""
    if not completion or completion[0].role is not Role.ASSISTANT:
        raise BadLine("its completion does not begin with a message of the assistant")
    starts = [index for index, one in enumerate(completion) if one.role is Role.ASSISTANT]
    said: list[Said] = []
    for turn, (first, after) in enumerate(zip(starts, [*starts[1:], len(completion)], strict=True)):
        last = after == len(completion)
        said.append(_said(turn, completion[first], completion[first + 1 : after], last=last))
    final = said[-1]
    if not final.calls:
        return Conversation(tuple(prompt), tuple(said), StopReason.ANSWERED)
    return Conversation(tuple(prompt), tuple(said), StopReason.DONE if final.calls[-1].done else StopReason.TRUNCATED)


def _said(turn: int, message: Message, answers: Sequence[Message], *, last: bool) -> Said:
    """Results of tools lie with their calls as long as they come in the calls' order; all else answers as a step."""
    calls: list[CallRecord] = []
    unanswered = list(enumerate(message.tool_calls))
    rest = list(answers)
    while rest and rest[0].role is Role.TOOL and isinstance(rest[0].content, str):
        found = next((at for at, (_, call) in enumerate(unanswered) if _answers(rest[0], call)), None)
        if found is None:
            break
        index, call = unanswered[found]
        del unanswered[: found + 1]
        calls.append(CallRecord(turn=turn, index=index, call=call, content=rest.pop(0).text))
    ends = last and (bool(answers) or bool(message.tool_calls))
    if rest or ends:
        over = bool(rest)
        calls.append(
            CallRecord(
                turn=turn,
                index=STEP_INDEX,
                call=None,
                content="",
                replies=tuple(rest),
                done=ends and over,
                truncated=ends and not over,
            )
        )
    return Said(message, tuple(calls))


def _answers(result: Message, call: ToolCall) -> bool:
    return result.tool_call_id == call.id and result.name in (None, call.name)


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise BadLine(f"{where} is {shown(value)}, not a message with role and content")
    role = _ROLES.get(value.get("role", "")) if isinstance(value.get("role"), str) else None
    if role is None:
        raise BadLine(f"{where} has the role {shown(value.get('role'))}; it must be one of {', '.join(Role)}")
    calls = value.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise BadLine(f"{where}.tool_calls is {shown(calls)}, not a list")
    return Message(
        role=role,
        content=_content(value.get("content"), f"{where}.content"),
        reasoning=_text(value.get("reasoning_content", value.get("reasoning")), f"{where}.reasoning_content"),
        tool_calls=tuple(_call(one, f"{where}.tool_calls[{index}]") for index, one in enumerate(calls)),
        tool_call_id=_text(value.get("tool_call_id"), f"{where}.tool_call_id"),
        name=_text(value.get("name"), f"{where}.name"),
        agent=_text(value.get("agent"), f"{where}.agent"),
    )


def _text(value: object, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise BadLine(f"{where} is {shown(value)}, not text")


def _content(value: object, where: str) -> str | tuple[Part, ...]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadLine(f"{where} is {shown(value)}, neither text nor a list of parts")
    return tuple(_part(one, f"{where}[{index}]") for index, one in enumerate(value))


def _part(value: object, where: str) -> Part:
    if isinstance(value, Mapping):
        text, image, url = value.get("text"), value.get("image_url"), value.get("url", value.get("image"))
        if value.get("type") == "text" and isinstance(text, str):
            return TextPart(text=text)
        address = image.get("url") if isinstance(image, Mapping) else image if image is not None else url
        if value.get("type") in ("image_url", "image") and isinstance(address, str):
            return ImagePart(url=address)
    raise BadLine(f"{where} is {shown(value)}; a part is a text, or an image by its URL")


def _call(value: object, where: str) -> ToolCall:
    if not isinstance(value, Mapping):
        raise BadLine(f"{where} is {shown(value)}, not a tool call")
    function = value.get("function", value)
    if not isinstance(function, Mapping):
        raise BadLine(f"{where}.function is {shown(function)}, not a name with arguments")
    name = _text(function.get("name"), f"{where}.name") or ""
    call_id = _text(value.get("id"), f"{where}.id") or ""
    given = function.get("arguments")
    raw = given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)
    try:
        arguments = json.loads(raw)
        problem = None if name else "The tool call names no tool."
        if not isinstance(arguments, dict):
            problem = "The tool call's arguments are not a JSON object."
        elif _depth(arguments) > _DEEPEST:
            problem = "The tool call's arguments are nested too deeply."
        else:
            json.dumps(arguments, allow_nan=False)
    except RecursionError:
        problem = "The tool call's arguments are nested too deeply."
    except ValueError:
        problem = "The tool call's arguments are not valid JSON."
    if problem is not None:
        return ToolCall(id=call_id, name=name, problem=problem, raw=raw)
    return ToolCall(id=call_id, name=name, arguments=arguments)


def _depth(value: Any) -> int:
    deepest, waiting = 0, [(value, 1)]
    while waiting and deepest <= _DEEPEST:
        one, depth = waiting.pop()
        deepest = max(deepest, depth)
        children = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        waiting.extend((child, depth + 1) for child in children if isinstance(child, dict | list))
    return deepest
