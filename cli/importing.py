"""`atropos import`: groups and chats from JSON lines, into a run of their own.

Invariant: unless bad lines are to be skipped, every line of every file is read and judged before the first is written.
What is written is decided by each line's bytes alone, so whatever interrupted an import, the same command finishes it.
Files are read line by line: memory holds a few of them, however long the file is.
"""

import asyncio
import gzip
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from ..contracts.text import one_line
from ..settings import load_settings
from . import access
from .errors import CommandError

if TYPE_CHECKING:
    from ..db.importing import Source
    from ..db.importing_lines import Decode

_SHOWN: Final = 20
"""Bad lines named; of more only the number is said."""
_TOLD_EVERY_S: Final = 5.0
_LINES: Final = 64
_BYTES: Final = 8 * 1024 * 1024
"""Of lines that one transaction writes: a few, so that little is held and others wait little for the run's row."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A line that was refused."""

    file: str
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{one_line(self.file)}:{self.number}: {one_line(self.reason)}."


@dataclass(slots=True)
class Tally:
    """What came of the lines so far."""

    read: int = 0
    added: int = 0
    refused: int = 0
    bad: list[Bad] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    """Episodes that were added, by `Tokens`."""

    @property
    def known(self) -> int:
        return self.read - self.added - self.refused

    def refuse(self, bad: Bad) -> None:
        self.refused += 1
        if len(self.bad) < _SHOWN:
            self.bad.append(bad)


def command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON lines, also gzipped (.gz).")],
    run: Annotated[
        str | None, typer.Option("--run", help="The run to import into; default: run/import-NAME of the first file.")
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option("--environment", help="What its environment is called; default: the first file's name."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="MODEL", help="Reads tokens of lines without messages, and shows them."),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out and import the others.")] = False,
) -> None:
    """Import groups written by the original Atropos, chats, or pairs of answers."""
    stem = _name_of(files[0])
    run_id = f"run/import-{stem}" if run is None else f"run/{run.removeprefix('run/')}"
    for file in files:
        if not file.is_file():
            raise CommandError(f"There is no file {one_line(str(file))}.")
    decode = None if tokenizer is None else _decoder(tokenizer)
    if not skip_bad:
        _refuse_bad(_judged(files, decode))
    tally = asyncio.run(_imported(files, run_id, environment, stem, tokenizer, decode, skip_bad))
    typer.echo(run_id)
    for sentence in _summary(tally):
        _say(sentence)


def _name_of(file: Path) -> str:
    """The file's name as a name of ours."""
    name = file.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("._-")[:60] or "file"


def _decoder(tokenizer: str) -> "Decode":
    from ..contracts.runfile import ModelConfig
    from ..inference.tokens import load_renderer

    renderer = load_renderer(ModelConfig(path=tokenizer))
    return lambda ids: renderer.decode(list(ids))


def _lines(file: Path, longest: int) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of each line that is not blank; of one that is too long, as much as shows that."""
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as opened:
            number = 0
            while raw := opened.readline(longest + 2):
                number += 1
                text = raw.strip()
                while raw and not raw.endswith(b"\n"):
                    raw = opened.readline(_BYTES)
                if text:
                    yield number, text
    except (OSError, EOFError) as error:
        raise CommandError(f"{one_line(str(file))} cannot be read: {error}.") from None


def _parsed(file: Path, decode: "Decode | None", tally: Tally) -> "Iterator[Source]":
    """The good lines of a file; the others are noted."""
    from ..db.importing import Source
    from ..db.importing_lines import LONGEST, parse_line
    from ..db.importing_messages import BadLine

    for number, raw in _lines(file, LONGEST):
        tally.read += 1
        try:
            line = parse_line(raw, decode)
        except BadLine as error:
            tally.refuse(Bad(file.name, number, str(error)))
        else:
            yield Source(file.name, number, line)


def _judged(files: list[Path], decode: "Decode | None") -> Tally:
    tally, progress = Tally(), _Progress("checked")
    for file in files:
        for _ in _parsed(file, decode, tally):
            progress.tell(file, tally)
    return tally


def _refuse_bad(tally: Tally) -> None:
    if not tally.refused:
        return
    for bad in tally.bad:
        _say(str(bad))
    if tally.refused > len(tally.bad):
        _say(f"and {tally.refused - len(tally.bad)} more")
    raise CommandError(
        f"{tally.refused} of {tally.read} lines cannot be imported, so nothing was; correct them, or leave them out "
        "with --skip-bad."
    )


async def _imported(
    files: list[Path],
    run_id: str,
    environment: str | None,
    standard: str,
    tokenizer: str | None,
    decode: "Decode | None",
    skip_bad: bool,
) -> Tally:
    from ..db.importing import add_lines, note_import, open_import

    tally, progress = Tally(), _Progress("read")
    async with access.opened_store(load_settings(), long=True) as store:
        label = await open_import(store, run_id, environment, standard=standard, tokenizer=tokenizer or "unknown")
        for file in files:
            before = (tally.added, tally.known, tally.refused)
            for chunk in _chunks(_parsed(file, decode, tally)):
                if tally.refused and not skip_bad:
                    break
                for source in await add_lines(store, run_id, label, chunk):
                    tally.added += 1
                    tally.tokens.update(member.tokens for member in source.line.members)
                progress.tell(file, tally)
            if tally.refused and not skip_bad:
                raise CommandError(f"{one_line(str(file))} changed while it was imported: {tally.bad[0]}")
            changed = (tally.added - before[0], tally.known - before[1], tally.refused - before[2])
            await note_import(store, run_id, file.name, *changed)
    return tally


def _chunks(sources: "Iterator[Source]") -> "Iterator[list[Source]]":
    chunk: list[Source] = []
    size = 0
    for source in sources:
        chunk.append(source)
        size += len(source.line.raw)
        if len(chunk) >= _LINES or size >= _BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Progress:
    """Says now and then how far it is."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._told = time.monotonic()

    def tell(self, file: Path, tally: Tally) -> None:
        if time.monotonic() - self._told < _TOLD_EVERY_S:
            return
        self._told = time.monotonic()
        added = f", {tally.added} groups added" if tally.added else ""
        refused = f", {tally.refused} bad" if tally.refused else ""
        _say(f"{file.name}: {tally.read} lines {self._verb}{added}{refused}")


def _summary(tally: Tally) -> Iterator[str]:
    for bad in tally.bad:
        yield str(bad)
    if tally.refused > len(tally.bad):
        yield f"and {tally.refused - len(tally.bad)} more"
    parts = [f"{tally.added} groups imported"]
    parts += [f"{tally.known} lines were there already"] if tally.known else []
    parts += [f"{tally.refused} bad lines left out"] if tally.refused else []
    yield f"{'; '.join(parts)}."
    whole = sum(tally.tokens.values())
    if tally.tokens["kept"] or tally.tokens["no_logprobs"] or tally.tokens["no_match"]:
        yield f"Token ids were kept of {tally.tokens['kept']} of {whole} episodes."
    if tally.tokens["no_logprobs"]:
        yield f"{tally.tokens['no_logprobs']} have ids without log-probabilities: their text and bytes were kept."
    if tally.tokens["no_match"]:
        yield f"Of {tally.tokens['no_match']} the masks fit no messages: their text and bytes were kept."


def _say(text: str) -> None:
    Console(stderr=True).print(Text(text), soft_wrap=True)
