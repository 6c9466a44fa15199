"""What the engine says that it sampled: its journal, read as it grows.

Invariant: only whole lines are read, each once, and a token counts for its (episode, turn, position) whichever try or
engine process sampled it. So what was sampled twice shows, whoever lost it in between.
"""

import json
import re
from pathlib import Path
from typing import Final

Place = tuple[int, int, int, int]
"""Group, member, attempt, turn: one model call of a run, however often it was tried."""

_REQUEST: Final = re.compile(r"/group/(\d+)/episode/(\d+)(?:/attempt/(\d+))?/turn/(\d+)/try/\d+$")


class Journal:
    """The calls of one run in the journal at `path`, from where it ended when this was made."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id
        self._offset = path.stat().st_size if path.exists() else 0
        self._calls: dict[Place, dict[str, int]] = {}

    def read(self) -> None:
        """Take in what was written since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            request, call, position = str(entry["request_id"]), str(entry["call"]), int(entry["position"])
        except (ValueError, KeyError, TypeError):
            return  # the last line of a killed engine may be half of one
        found = _REQUEST.search(request)
        if found is None or request[: found.start()] != self._run_id:
            return
        place = (int(found[1]), int(found[2]), int(found[3] or 0), int(found[4]))
        calls = self._calls.setdefault(place, {})
        calls[call] = max(calls.get(call, 0), position + 1)

    def places(self, without: set[Place]) -> list[Place]:
        """Every call that a token was sampled for, but those."""
        return [place for place in self._calls if place not in without]

    def tokens(self, place: Place) -> int:
        """Tokens of the call's newest try."""
        calls = self._calls.get(place)
        return next(reversed(calls.values())) if calls else 0

    def tries(self, place: Place) -> int:
        """How often it was begun and got as far as a token."""
        return len(self._calls.get(place, ()))

    def resampled(self) -> int:
        """Tokens that were sampled although one of their (episode, turn, position) had been: each time counts."""
        return sum(sum(calls.values()) - max(calls.values()) for calls in self._calls.values())
