"""Writing an export: from the store into files that can be gone on with, or to standard output.

Invariant: a command that is repeated goes on where the last one was stopped, by whatever, and the result is the file
that one undisturbed command would have written; where that cannot be kept, it says so and leaves everything as it is.
"""

import asyncio
import contextlib
import json
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.text import Text

from ..db.errors import StoreError
from ..settings import Settings, load_settings
from . import access
from .errors import CommandError
from .export_files import Complete, Note, Parts, explained, opened_parts, outputs, part_of, publish
from .export_rows import Line, Shape, line

if TYPE_CHECKING:
    from ..db.exports import Chosen, Wanted

_TOLD_EVERY_S: Final = 2.0
_NOTHING: Final = (
    "Nothing fits: no scored episode of a closed group passes these filters (rewards of 0 and below need "
    "--allow-negative-scores, episodes of evaluations --include-evaluations)."
)


@dataclass(frozen=True)
class Request:
    """What a command was asked for."""

    command: str
    runs: list[str] | None
    out: str
    wanted: "Wanted"
    shape: Shape
    parquet: bool
    force: bool

    def asked(self) -> dict[str, Any]:
        """All that decides what the file will be, without what is as it is by default."""
        plain = type(self.wanted)(self.wanted.source)
        given = {
            one.name: getattr(self.wanted, one.name)
            for one in fields(self.wanted)
            if getattr(self.wanted, one.name) != getattr(plain, one.name)
        }
        layout = {one.name: getattr(self.shape, one.name) for one in fields(self.shape)}
        asked = {"command": self.command} | given | layout | {"format": "parquet" if self.parquet else "jsonl"}
        return dict(json.loads(json.dumps(asked, default=str)))


def export(request: Request) -> None:
    """Do it, saying how far it is. Raises CommandError or StoreError; KeyboardInterrupt where it was stopped."""
    if request.out == "-":
        with explained("Standard output"):
            written = asyncio.run(_to_stdout(request, load_settings()))
        say(f"{written} rows")
        return
    out = _target(request)
    if request.parquet:
        from .export_parquet import require

        require()
    outs = outputs(out, request.wanted.test > 0)
    begun: list[Note] = []
    try:
        with explained(str(out)):
            note = asyncio.run(_to_files(request, outs, load_settings(), begun))
    except Complete as complete:
        note = complete.note
        say(f"{out} is complete: {note.total} rows, as of {note.as_of}; --force writes it anew.")
        return
    except (KeyboardInterrupt, StoreError):
        if not begun:
            raise
        say(f"{begun[-1].rows} of {begun[-1].total} rows are in {part_of(out)}; repeat the command to go on.")
        raise
    _tell(note, outs, request)


def say(text: str) -> None:
    Console(stderr=True).print(Text(text), soft_wrap=True)


def _target(request: Request) -> Path:
    if not request.out.strip():
        raise CommandError("--out is empty; name a file, or - for standard output.")
    return Path(request.out)


async def _to_stdout(request: Request, settings: Settings) -> int:
    from ..db.exports import opened_export

    async with access.opened_store(settings, long=True) as store:
        wanted = await _resolved(store, request)
        async with opened_export(store, wanted) as chosen:
            if not chosen.total:
                raise CommandError(_NOTHING)
            told = _Progress(chosen.total)
            async with aclosing(chosen.rows()) as rows:
                async for row in rows:
                    sys.stdout.buffer.write(line(row, request.shape).data)
                    told.one()
            sys.stdout.buffer.flush()
            return chosen.total


async def _to_files(request: Request, outs: list[Path], settings: Settings, begun: list[Note]) -> Note:
    """`begun` gets the last note that was kept."""
    async with access.opened_store(settings, long=True) as store:
        request = replace(request, wanted=await _resolved(store, request))
        with opened_parts(outs, request.asked(), request.force) as parts:
            try:
                if not parts.note.full:
                    await _fill(store, request, parts)
            except BaseException:
                with contextlib.suppress(OSError):
                    if parts.note.begun:
                        parts.save()
                        begun.append(parts.note)
                raise
            begun.append(parts.note)
            publish(parts, _finish(request), request.force)
            return parts.note


def _finish(request: Request) -> Any:
    if not request.parquet:
        return None
    from ..db.exports import Source
    from .export_parquet import to_parquet

    pairs = request.wanted.source is Source.PAIRS
    return lambda part, made, note: to_parquet(part, made, note, request.shape, pairs)


async def _resolved(store: Any, request: Request) -> "Wanted":
    if not request.runs:
        return request.wanted
    named = {(await access.find_run(store, run)).run_id for run in request.runs}
    return replace(request.wanted, runs=tuple(sorted(named)))


async def _fill(store: Any, request: Request, parts: Parts) -> None:
    """Write the rows that are missing."""
    from ..db.exports import opened_export

    note = parts.note
    as_of = datetime.fromisoformat(note.as_of) if note.begun else None
    async with opened_export(store, request.wanted, as_of) as chosen:
        if not note.begun:
            if not chosen.total:
                parts.discard()
                raise CommandError(_NOTHING)
            parts.begin(chosen.as_of.isoformat(), chosen.total)
        else:
            await _check_same(chosen, note, part_of(parts.outs[0]))
            say(f"going on after {note.rows} of {note.total} rows")
        told = _Progress(chosen.total, note.rows)
        async with aclosing(chosen.rows(note.rows)) as rows:
            async for row in rows:
                made = line(row, request.shape)
                parts.write(int(row.test and len(parts.outs) > 1), made.data, row.key, **_counts(made, row.test))
                told.one()


async def _check_same(chosen: "Chosen", note: Note, part: Path) -> None:
    last = await chosen.key_at(note.rows - 1) if note.rows else ()
    if chosen.total != note.total or last is None or list(last) != note.last:
        raise CommandError(
            f"The store has other rows than those that {part} began with ({chosen.total} instead of {note.total}); "
            "remove that file to start anew."
        )


def _counts(made: Line, test: bool) -> dict[str, int]:
    found = {"test": test, "lossy": made.lossy, "surrogates": made.surrogates, "parts": made.parts}
    return {name: 1 for name, there in found.items() if there}


def _tell(note: Note, outs: list[Path], request: Request) -> None:
    test = note.counts.get("test", 0)
    if len(outs) > 1:
        say(f"{note.total - test} rows in {outs[0]}, {test} rows in {outs[1]}")
    else:
        say(f"{note.total} rows in {outs[0]}")
    escaped, lossy = note.counts.get("surrogates", 0), note.counts.get("lossy", 0)
    if escaped and request.parquet:
        lossy += escaped
    elif escaped:
        say(
            f"{escaped} of them have lone surrogates, exactly, as JSON escapes, which `datasets` refuses to read; "
            "--replace-surrogates writes U+FFFD instead."
        )
    if lossy:
        say(f"{lossy} of them are not exact: they have U+FFFD in place of lone surrogates, and are marked `lossy`.")


class _Progress:
    """A line now and then."""

    def __init__(self, total: int, done: int = 0) -> None:
        self._total, self._done, self._said = total, done, time.monotonic()

    def one(self) -> None:
        self._done += 1
        if time.monotonic() - self._said > _TOLD_EVERY_S:
            self._said = time.monotonic()
            say(f"{self._done} of {self._total} rows …")
