"""The journal: one line for every token that was sampled, in the order in which it was sampled.

Invariant: a token is in the file before anyone outside the engine can see it. Each engine step is one `write` of whole
lines to a descriptor opened for appending, so a killed process leaves every token it has handed out, and at most tokens
that it had not handed out yet.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path


class Journal:
    """Appends lines `{"request_id", "position", "token_id", "version", "call"}` to a file, or to nothing if None.

    `position` counts the tokens of a completion from 0. `call` names one call of one engine process; it tells apart
    two calls that carried the same request id.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises OSError if the file cannot be opened for appending."""
        self._descriptor = -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, lines: Iterable[str]) -> None:
        """Write whole lines, each ending in a newline. Raises OSError if they cannot all be written."""
        if self._descriptor < 0:
            return
        data = memoryview("".join(lines).encode())
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Line:
    """The lines of one call; what they share is encoded once."""

    def __init__(self, request_id: str, call: str) -> None:
        self._head = '{"request_id":' + json.dumps(request_id) + ',"position":'
        self._tail = ',"call":' + json.dumps(call) + "}\n"

    def of(self, position: int, token_id: int, version_json: str) -> str:
        """`version_json`: the version, already encoded."""
        return f'{self._head}{position},"token_id":{token_id},"version":{version_json}{self._tail}'
