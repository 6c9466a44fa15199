"""Run files from disk to plain data: YAML or JSON, with `--set` and `--engine` applied.

Invariant: what leaves here is plain JSON data (text keys, finite numbers, no aliases that grow), or the file is refused
with its name and, where it cannot be read, line and column. Whether fields exist and fit is the run file's own
business (`contracts.runfile`), which a change by `--set` goes through like the file itself.

YAML is read by the rules of YAML 1.2: only `true` and `false` are truth values, `1e-6` is a number, a date is text.
"""

import json
import math
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from ..contracts.runfile import RunFileError

MAX_BYTES: Final = 2**20
"""Temporal refuses inputs above 2 MiB; a run file that a person wrote has a few KiB."""
_MAX_VALUES: Final = 100_000
"""Values in all, aliases written out: a few lines of YAML can name billions."""
_UNUSABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""What Postgres cannot hold and UTF-8 cannot spell."""


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of version 1.2, without repeated keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in getattr(node, "value", ()):
            name = getattr(key, "value", None)
            if isinstance(name, str) and name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is given twice", key.start_mark)
            if isinstance(name, str):
                seen.add(name)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"|~|null|Null|NULL", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def read_run_file(path: Path, changes: Sequence[str] = (), engines: Sequence[str] = ()) -> Any:
    """The document in `path` (`-`: standard input) after `--set` and `--engine`. Raises RunFileError."""
    name = "standard input" if str(path) == "-" else str(path)
    text = _text(path, name)
    document = plain(_json(text, name) if _is_json(path, text) else _yaml(text, name), name)
    if document is None:
        raise RunFileError([f"{name} is empty; a run file needs at least a name, a model, engines and environments"])
    document = with_engines(document, engines)
    for change in changes:
        document = with_change(document, change)
    return document


def with_change(document: Any, change: str) -> Any:
    """`document` with `a.b.0.c=value` applied; the value is read as YAML. Raises RunFileError."""
    path, separator, text = change.partition("=")
    parts = path.strip().split(".")
    if not separator or not all(parts):
        raise RunFileError([f"--set {change}: write it as path=value, for instance sampling.temperature=0.7"])
    value = plain(_yaml(text, f"--set {path.strip()}"), f"--set {path.strip()}")
    return _replaced(document, parts, value, [])


def with_engines(document: Any, urls: Sequence[str]) -> Any:
    """`document` with its engines at these addresses; each keeps the settings of the one it replaces."""
    if not urls:
        return document
    if not isinstance(document, Mapping):
        return document
    known = document.get("engines")
    given = [engine for engine in known if isinstance(engine, Mapping)] if isinstance(known, list) else []
    made = [{**(given[min(index, len(given) - 1)] if given else {}), "url": url} for index, url in enumerate(urls)]
    return {**document, "engines": made}


def plain(value: Any, name: str) -> Any:
    """`value` if it is plain JSON data. Raises RunFileError naming the place that is not."""
    budget = [_MAX_VALUES]
    try:
        return _plain(value, name, [], budget)
    except RecursionError:
        raise RunFileError([f"{name}: it is nested too deeply"]) from None


def _plain(value: Any, name: str, path: list[str], budget: list[int]) -> Any:
    budget[0] -= 1
    if budget[0] < 0:
        raise RunFileError([f"{name}: it has more than {_MAX_VALUES} values, aliases written out"])
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or _UNUSABLE.search(key):
                raise RunFileError([f"{_at(name, path)} the key {key!r} is no plain text; put it in quotes"])
        return {key: _plain(item, name, [*path, key], budget) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, name, [*path, str(index)], budget) for index, item in enumerate(value)]
    if isinstance(value, str) and _UNUSABLE.search(value):
        raise RunFileError([f"{_at(name, path)} the text has a NUL or half a character (a lone surrogate)"])
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        raise RunFileError([f"{_at(name, path)} {value} is no number that a run can use"])
    raise RunFileError([f"{_at(name, path)} a value of type {type(value).__name__} does not belong in a run file"])


def _at(name: str, path: list[str]) -> str:
    return f"{name}: {'.'.join(path)}:" if path else f"{name}:"


def _replaced(node: Any, parts: list[str], value: Any, walked: list[str]) -> Any:
    """A copy of `node` with the value at `parts` replaced; missing mappings on the way are made."""
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if isinstance(node, list):
        if not head.isdecimal() or int(head) >= len(node):
            here = ".".join(walked)
            held = f"items 0 to {len(node) - 1}" if node else "no items"
            raise RunFileError([f"--set: {here} is a list with {held}; {head!r} is none of them"])
        copy = list(node)
        copy[int(head)] = _replaced(node[int(head)], rest, value, [*walked, head])
        return copy
    if node is not None and not isinstance(node, Mapping):
        raise RunFileError([f"--set: {'.'.join(walked) or 'the run file'} is {node!r} and has no field {head!r}"])
    fields = dict(node or {})
    fields[head] = _replaced(fields.get(head), rest, value, [*walked, head])
    return fields


def _text(path: Path, name: str) -> str:
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            if not stat.S_ISREG(path.stat().st_mode) and path.is_dir():
                raise RunFileError([f"{name} is a folder; name a run file"])
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise RunFileError([f"there is no file {name}"]) from None
    except OSError as error:
        raise RunFileError([f"{name} cannot be read: {(error.strerror or str(error)).lower()}"]) from None
    if len(data) > MAX_BYTES:
        raise RunFileError([f"{name} is larger than {MAX_BYTES // 1024} KiB; that is no run file"])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RunFileError([f"{name}, line {line}: it is no UTF-8 text"]) from None
    if "\0" in text:
        raise RunFileError(
            [f"{name}, line {text[: text.index(chr(0))].count(chr(10)) + 1}: it is no text (a NUL byte)"]
        )
    return text


def _is_json(path: Path, text: str) -> bool:
    return path.suffix == ".json" or (str(path) == "-" and text.lstrip().startswith("{"))


def _json(text: str, name: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
    except json.JSONDecodeError as error:
        what = f"{error.msg[:1].lower()}{error.msg[1:]}"
        raise RunFileError([f"{name}, line {error.lineno}, column {error.colno}: it is no JSON ({what})"]) from None
    except RecursionError:
        raise RunFileError([f"{name}: it is nested too deeply"]) from None
    except ValueError as error:
        raise RunFileError([f"{name}: it is no JSON ({error})"]) from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice")
        found[key] = value
    return found


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


def _yaml(text: str, name: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise RunFileError([f"{name}{where}: it is no YAML ({error.problem or error.context})"]) from None
    except yaml.reader.ReaderError as error:
        at = error.position if isinstance(error.position, int) else 0
        line = text[:at].count("\n") + 1
        raise RunFileError([f"{name}, line {line}: it is no YAML (a character that YAML does not allow)"]) from None
    except RecursionError:
        raise RunFileError([f"{name}: it is nested too deeply"]) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RunFileError([f"{name}: it is no YAML (a value does not fit the tag it is given)"]) from None
