"""A hash for each module whose code runs inside workflows: changed code is a decision, not an accident.

Invariant: the hash is of what Python executes. Comments, docstrings and layout do not change it, nor does the version
of Python, since the syntax tree is written out by ourselves and only where it says something.
"""

import ast
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import atropos

ROOT = Path(atropos.__file__).parent
STORED = Path(__file__).with_name("fingerprint.json")
BESIDE = ("contracts/flow.py", "contracts/ids.py")
"""Pure code outside `workflows` by which they decide what to do next and what it is called."""
_SILENT = frozenset({"ctx", "kind", "type_comment", "type_params"})
"""Fields that say nothing, or that not every version of Python has."""


def fingerprint() -> dict[str, str]:
    """Module, as a path from the package's root → hash."""
    modules = sorted(path for path in (ROOT / "workflows").glob("*.py"))
    modules += [ROOT / name for name in BESIDE]
    return {path.relative_to(ROOT).as_posix(): hash_of(path.read_text()) for path in modules}


def hash_of(source: str) -> str:
    """16 hex digits of the code's meaning."""
    return hashlib.sha256("".join(_written(ast.parse(source))).encode()).hexdigest()[:16]


def stored() -> dict[str, str]:
    found: dict[str, str] = json.loads(STORED.read_text())
    return found


def store() -> None:
    STORED.write_text(json.dumps(fingerprint(), indent=2) + "\n")


def _written(node: Any) -> Iterator[str]:
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if name not in _SILENT and value not in (None, []):
                yield f" {name}="
                yield from _written(_code(value) if name == "body" else value)
        yield ")"
    elif isinstance(node, list):
        for one in node:
            yield from _written(one)
            yield ","
    else:
        yield repr(node)


def _code(body: Any) -> Any:
    """A block without strings that stand alone: docstrings, and those under a constant."""
    if not isinstance(body, list):
        return body
    return [
        line
        for line in body
        if not (
            isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
        )
    ]
