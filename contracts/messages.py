"""Messages of a conversation, independent of any provider's JSON.

Invariant: a message is immutable and holds plain data only, so what a scorer sees, what the store keeps and what a
renderer turns into tokens is one and the same object.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Wire


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class TextPart(Wire):
    type: Literal["text"] = "text"
    text: str


class ImagePart(Wire):
    """An image by URL or data URI."""

    type: Literal["image"] = "image"
    url: str


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ToolCall(Wire):
    """A tool call as the model made it.

    `problem` says in words what is wrong with a malformed call (no JSON, no name); such a call is answered with an
    error the model can correct and never runs. `raw` keeps what was sampled when it could not be read.
    """

    id: str
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    problem: str | None = None
    raw: str | None = None


class Message(Wire):
    """One message. `content` is text, or parts when there are images."""

    role: Role
    content: str | tuple[Part, ...] = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    agent: str | None = None
    """Who speaks, in environments with several agents."""

    @property
    def text(self) -> str:
        """The text of the message, parts joined; images leave nothing."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


class ToolSpec(Wire):
    """A tool as the model is told about it. `parameters` is a JSON schema object."""

    name: str
    description: str
    parameters: dict[str, Any]


def system(content: str | tuple[Part, ...]) -> Message:
    return Message(role=Role.SYSTEM, content=content)


def user(content: str | tuple[Part, ...]) -> Message:
    return Message(role=Role.USER, content=content)


def assistant(content: str | tuple[Part, ...], tool_calls: tuple[ToolCall, ...] = ()) -> Message:
    return Message(role=Role.ASSISTANT, content=content, tool_calls=tool_calls)


def tool_result(content: str, call: ToolCall) -> Message:
    return Message(role=Role.TOOL, content=content, tool_call_id=call.id, name=call.name or None)


def preview(text: str, limit: int = 200) -> str:
    """At most `limit` UTF-8 bytes of `text` on one line: what may enter a workflow's history."""
    flat = " ".join(text.split())
    data = flat.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode("utf-8", "ignore")
    return data[: limit - 3].decode("utf-8", "ignore") + "…"
