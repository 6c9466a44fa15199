"""Tool calls as models write them: what may be passed on, and what is wrong with the rest, in words.

Invariant: a call without a `problem` has a name and arguments that every part of the house can store and hand to a
tool; any other keeps what was written (`raw`) and is answered with an error that the model can correct.
"""

import json
from typing import Any, Final

from ..contracts.messages import ToolCall

_DEEPEST: Final = 64
"""Nesting of a tool call's arguments that is still passed on; Postgres and pydantic both give up somewhere deeper."""


def checked_call(call_id: str, name: object, arguments: object, raw: str, problem: str | None = None) -> ToolCall:
    """The call, with a problem where there is one. `problem`: one that its reader has found already."""
    known = name if isinstance(name, str) and _is_unicode(name) else ""
    problem = problem or _problem(name, arguments)
    if problem is not None:
        return ToolCall(id=call_id, name=known, problem=problem, raw=raw)
    return ToolCall(id=call_id, name=known, arguments=arguments if isinstance(arguments, dict) else {})


def spelt_call(call_id: str, name: object, arguments: object) -> ToolCall:
    """A call whose arguments are JSON in a string, as OpenAI's API has them; empty ones are none."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    parsed: Any = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return checked_call(call_id, name, None, raw, "The tool call's arguments are not valid JSON.")
    return checked_call(call_id, name, parsed, raw)


def _problem(name: object, arguments: object) -> str | None:
    if not isinstance(name, str) or not name or not _is_unicode(name):
        return "The tool call's name is not text."
    if arguments is not None and not isinstance(arguments, dict):
        return "The tool call's arguments are not a JSON object."
    try:
        if _depth(arguments) > _DEEPEST:
            return "The tool call's arguments are nested too deeply."
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return "The tool call's arguments contain half a character (a lone surrogate)."
    except ValueError:
        return "The tool call's arguments contain a number that JSON does not have (NaN, infinity or too long)."
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _depth(value: object) -> int:
    """Nesting of lists and objects, without recursion."""
    deepest, level = 0, [value]
    while level and deepest <= _DEEPEST:
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        deepest += 1
    return deepest
