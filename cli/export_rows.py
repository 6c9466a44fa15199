"""What a row of an export looks like, as a line of JSON: the layouts that TRL, Axolotl and `datasets` read.

Invariant: texts pass from the store to the file as the bytes they came in. They are parsed only where the layout
changes what is inside a message, and then only in rows that have it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..db.exports import ExportRow

Message = dict[str, Any]


class ExampleLayout(StrEnum):
    """Columns of supervised examples."""

    MESSAGES = "messages"
    """The whole conversation: TRL's language modelling, Axolotl's `chat_template`."""
    PROMPT_COMPLETION = "prompt-completion"
    """What the environment began with, and all that followed."""


class PairLayout(StrEnum):
    """Columns of preference pairs."""

    EXPLICIT = "explicit"
    """`prompt`, and what `chosen` and `rejected` said after it: TRL's explicit prompt."""
    IMPLICIT = "implicit"
    """`chosen` and `rejected`, each a whole conversation: TRL's implicit prompt."""
    AXOLOTL = "axolotl"
    """`messages`, and one message each as `chosen` and `rejected`: Axolotl's `chat_template.default` for DPO."""


class Arguments(StrEnum):
    """Arguments of tool calls."""

    STRING = "string"
    """JSON in a string, as OpenAI's API has it."""
    OBJECT = "object"
    """The object itself, as most chat templates want it."""


class Images(StrEnum):
    """Images in messages."""

    INLINE = "inline"
    """Parts with the address, as OpenAI's API has it."""
    COLUMN = "column"
    """Parts that only mark the place, and a column with the addresses, as TRL has it."""


@dataclass(frozen=True)
class Shape:
    """Everything that decides how a row looks."""

    layout: ExampleLayout | PairLayout
    arguments: Arguments = Arguments.STRING
    images: Images = Images.INLINE
    replace_surrogates: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A row as it is written."""

    data: bytes
    lossy: bool
    surrogates: bool
    """It has escapes of lone surrogates, which Arrow refuses."""
    parts: bool
    """Some message's content is a list of parts."""


_REWARDS: Final = ((b"reward",), (b"chosen_reward", b"rejected_reward"))
_PARTS: Final = (b'"content": [', b'"content":[')


def line(row: "ExportRow", shape: Shape) -> Line:
    """The row as one line of JSON, with its newline."""
    columns, lossy, surrogates = _columns(row, shape), row.lossy, False
    if row.rebuilt:
        from ..db.exports_exact import dumped, has_surrogates, readable

        for name, text in columns.items():
            value = json.loads(text)
            if not has_surrogates(value):
                continue
            surrogates = not shape.replace_surrogates
            if shape.replace_surrogates:
                columns[name], lossy = dumped(readable(value)), True
    parts = any(mark in text for text in columns.values() for mark in _PARTS)
    names = _REWARDS[len(row.rewards) - 1]
    fields = [b'"%b": %b' % (name.encode(), text) for name, text in columns.items()]
    fields += [b'"%b": %b' % (name, text) for name, text in zip(names, row.rewards, strict=True)]
    lineage = b'%b, "lossy": %b}' % (row.lineage[:-1], b"true" if lossy else b"false")
    return Line(b'{%b, "lineage": %b}\n' % (b", ".join(fields), lineage), lossy, surrogates, parts)


def _columns(row: "ExportRow", shape: Shape) -> dict[str, bytes]:
    prompt, completions, images = row.prompt, list(row.completions), None
    if shape.arguments is Arguments.OBJECT:
        prompt = _changed(prompt, b'"tool_calls"', _with_objects)
        completions = [_changed(text, b'"tool_calls"', _with_objects) for text in completions]
    if shape.images is Images.COLUMN:
        found: list[str] = []
        prompt = _changed(prompt, b'"image_url"', lambda message: _without_images(message, found))
        completions = [
            _changed(text, b'"image_url"', lambda message: _without_images(message, found)) for text in completions
        ]
        images = json.dumps(found, ensure_ascii=False).encode()
    columns = _laid_out(prompt, completions, shape.layout)
    return columns if images is None else columns | {"images": images}


def _laid_out(prompt: bytes, completions: list[bytes], layout: ExampleLayout | PairLayout) -> dict[str, bytes]:
    match layout:
        case ExampleLayout.MESSAGES:
            return {"messages": _joined(prompt, completions[0])}
        case ExampleLayout.PROMPT_COMPLETION:
            return {"prompt": prompt, "completion": completions[0]}
        case PairLayout.EXPLICIT:
            return {"prompt": prompt, "chosen": completions[0], "rejected": completions[1]}
        case PairLayout.IMPLICIT:
            return {"chosen": _joined(prompt, completions[0]), "rejected": _joined(prompt, completions[1])}
        case PairLayout.AXOLOTL:
            chosen, rejected = (text[1:-1].strip() for text in completions)  # arrays of one message
            return {"messages": prompt, "chosen": chosen, "rejected": rejected}


def _joined(first: bytes, then: bytes) -> bytes:
    """Two JSON arrays as one."""
    head, tail = first.strip()[1:-1].strip(), then.strip()[1:-1].strip()
    return b"[%b]" % (b", ".join(one for one in (head, tail) if one))


def _changed(text: bytes, mark: bytes, change: Callable[[Message], Message]) -> bytes:
    """The messages, each changed, where there may be something to change."""
    if mark not in text:
        return text
    from ..db.exports_exact import dumped

    return dumped([change(message) for message in json.loads(text)])


def _with_objects(message: Message) -> Message:
    calls = message.get("tool_calls")
    return message if not calls else message | {"tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Message) -> Message:
    """A call whose arguments were no object keeps them as text."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _without_images(message: Message, found: list[str]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if part["type"] == "image_url":
            found.append(part["image_url"]["url"])
            part = {"type": "image"}
        parts.append(part)
    return message | {"content": parts}
