"""Messages as the plain data the `renderers` library takes, and text that must not pass for a token.

Invariant: nothing is lost on the way: reasoning, calls and names travel, a malformed call stays visible as the text it
was, and what cannot travel (an image) is refused.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..contracts.messages import ImagePart, Message, ToolSpec


class TokensError(ValueError):
    """A model folder, chat format or message that cannot be turned into tokens; one sentence for people."""


def plain_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]] | None:
    """OpenAI's envelope, which is what models were trained to see in their system prompt."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]


def plain_message(message: Message) -> dict[str, Any]:
    if not isinstance(message.content, str) and any(isinstance(part, ImagePart) for part in message.content):
        raise TokensError("a message has an image; this engine takes text only")
    text = message.text
    out: dict[str, Any] = {"role": message.role.value}
    calls = [call for call in message.tool_calls if call.problem is None]
    # A malformed call has no structure to render again; what the model wrote stays visible to it as text.
    broken = [call.raw for call in message.tool_calls if call.problem is not None and call.raw]
    out["content"] = "\n".join([part for part in (text, *broken) if part])
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if calls:
        out["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def spellings(texts: Iterable[str]) -> "re.Pattern[str]":
    """Any of these texts, longest first; nothing where there are none."""
    found = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found)) or r"(?!)")


def broken_up(found: "re.Match[str]") -> str:
    """The spelling with an invisible character after its first, so that it is no token any more."""
    return f"{found[0][0]}\u200b{found[0][1:]}"


def without_surrogates(text: str) -> str:
    """Lone surrogates, which no tokenizer takes, as U+FFFD. Rows keep the text as it was."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
