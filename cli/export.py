"""`atropos sft-gen` and `atropos dpo-gen`: what runs have said, as JSON lines that TRL and `datasets` load.

Invariant: these only add a file format to the views `sft_examples` and `dpo_pairs`. A file appears whole or not at all,
and one that is there is not overwritten unasked.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from ..contracts.base import MOST
from ..settings import load_settings
from . import access
from .errors import CommandError

if TYPE_CHECKING:
    from ..db.exports import Wanted
    from ..db.store import Store

_TOLD_EVERY: Final = 1000

Rows = AsyncGenerator[dict[str, Any]]
Shape = Callable[[dict[str, Any]], dict[str, Any]]

Runs = Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs; all of the store unless given.")]
Out = Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="File to write, or - for standard output.")]
OfEnvironment = Annotated[str | None, typer.Option("--environment", help="Only of this environment.")]
Least = Annotated[float | None, typer.Option("--min-reward", help="Rewards from here on.")]
Negative = Annotated[bool, typer.Option("--allow-negative-scores", help="Rewards of 0 and below, too.")]
Limit = Annotated[int | None, typer.Option(min=1, max=MOST, help="Rows at most.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file.")]


def sft_gen(
    runs: Runs = None,
    out: Out = "sft.jsonl",
    environment: OfEnvironment = None,
    min_reward: Least = None,
    negative: Negative = False,
    top: Annotated[
        int | None, typer.Option("--top", min=1, max=MOST, help="The best of each group, at most so many.")
    ] = None,
    difference: Annotated[
        float,
        typer.Option("--min-difference", min=0, help="Between the highest and lowest reward of a group, at least."),
    ] = 0.0,
    split: Annotated[
        bool, typer.Option("--prompt-completion", help="Two columns, prompt and completion, instead of messages.")
    ] = False,
    limit: Limit = None,
    force: Force = False,
) -> None:
    """Write scored training episodes, each with its whole conversation, for supervised fine-tuning."""
    from ..db.exports import Wanted, sft_examples

    wanted = Wanted(None, environment, min_reward, negative, difference, top, limit)
    columns = ("prompt", "completion") if split else ("messages",)
    dropped = {"messages", "prompt", "completion"}
    _export(runs, out, force, wanted, sft_examples, lambda row: _shaped(row, (*columns, "reward"), dropped))


def dpo_gen(
    runs: Runs = None,
    out: Out = "dpo.jsonl",
    environment: OfEnvironment = None,
    min_reward: Least = None,
    negative: Negative = False,
    pairs: Annotated[
        int | None, typer.Option("--pairs", min=1, max=MOST, help="Pairs of each group at most, farthest apart first.")
    ] = 1,
    difference: Annotated[
        float, typer.Option("--min-difference", min=0, help="Between the two rewards of a pair, at least.")
    ] = 0.0,
    limit: Limit = None,
    force: Force = False,
) -> None:
    """Write pairs of answers to the same prompt, the better one as chosen, for preference optimisation."""
    from ..db.exports import Wanted, dpo_pairs

    wanted = Wanted(None, environment, min_reward, negative, difference, pairs, limit)
    columns = ("prompt", "chosen", "rejected", "chosen_reward", "rejected_reward")
    _export(runs, out, force, wanted, dpo_pairs, lambda row: _shaped(row, columns, set()))


def _shaped(row: dict[str, Any], columns: tuple[str, ...], dropped: set[str]) -> dict[str, Any]:
    """The columns that trainers read, and where the row came from beside them."""
    lineage = {name: value for name, value in row.items() if name not in columns and name not in dropped}
    return {name: row[name] for name in columns} | {"lineage": lineage}


def _export(
    runs: list[str] | None,
    out: str,
    force: bool,
    wanted: "Wanted",
    read: "Callable[[Store, Wanted], Rows]",
    shape: Shape,
) -> None:
    settings = load_settings()

    async def write(file: IO[str]) -> int:
        async with access.opened_store(settings) as store:
            named = None if not runs else tuple([(await access.find_run(store, run)).run_id for run in runs])
            written = 0
            # Closed here, while the connection it reads from is there, also where a write fails.
            async with aclosing(read(store, replace(wanted, runs=named))) as rows:
                async for row in rows:
                    file.write(json.dumps(shape(row), ensure_ascii=False) + "\n")
                    written += 1
                    if written % _TOLD_EVERY == 0:
                        _say(f"{written} rows …")
            return written

    with _target(out, force) as file:
        written = asyncio.run(write(file))
        if not written:
            raise CommandError(
                "Nothing fits: no scored training episode passes these filters (rewards of 0 and below need "
                "--allow-negative-scores)."
            )
    _say(f"{written} rows in {out}" if out != "-" else f"{written} rows")


@contextmanager
def _target(name: str, force: bool) -> Iterator[IO[str]]:
    """The file to write to, which takes its name only once the block is over. Raises CommandError."""
    if name == "-":
        with _explained("Standard output"):
            yield sys.stdout
            sys.stdout.flush()
        return
    if not name.strip():
        raise CommandError("--out is empty; name a file, or - for standard output.")
    out = Path(name)
    if out.is_dir():
        raise CommandError(f"{out} is a folder; --out names a file in it, or - for standard output.")
    if out.exists() and not out.is_file():
        raise CommandError(f"{out} is no file that could be replaced; name another --out.")
    if out.exists() and not force:
        raise _there(out)
    with _explained(str(out)):
        handle, made = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        temporary = Path(made)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                yield file
            temporary.chmod(0o644)
            if force:
                temporary.replace(out)
            else:
                out.hardlink_to(temporary)  # unlike a rename it fails where somebody was faster
        except FileExistsError:
            raise _there(out) from None
        finally:
            temporary.unlink(missing_ok=True)


def _there(out: Path) -> CommandError:
    return CommandError(f"{out} is there already; name another --out, or overwrite it with --force.")


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{what} cannot be written: {error.strerror}.") from None


def _say(text: str) -> None:
    Console(stderr=True).print(Text(text), soft_wrap=True)
