"""`atropos view`: a run or an episode as pages in a folder, to send, keep or open without a server."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..contracts.base import MOST
from ..settings import load_settings
from . import access
from .errors import CommandError

_TOLD_EVERY = 200


def command(
    what: Annotated[str, typer.Argument(metavar="RUN|EPISODE", help="A run, or run/NAME-xxxx/group/12/episode/3.")],
    html: Annotated[
        str, typer.Option("--html", metavar="FOLDER", help="Folder to write; one written before is replaced.")
    ],
    groups: Annotated[int, typer.Option(min=1, max=MOST, help="Groups of a run, the newest, at most.")] = 100,
) -> None:
    """Write a run or an episode as HTML pages that need no server and no scripts."""
    from ..dashboard.static import ForeignFolder, check_ours, write_episode, write_run
    from .episode import episode_key

    console = Console(stderr=True)
    if not html.strip():
        raise CommandError("--html is empty; name a folder to write.")
    folder = Path(html)

    def told(count: int, of: int) -> None:
        if count % _TOLD_EVERY == 0:
            console.print(Text(f"{count} of {of} episodes …"))

    async def write() -> str:
        async with access.opened_store(load_settings()) as store:
            if "/episode/" in what:
                key = episode_key([what])
                row = await access.find_run(store, key.run_id)
                await write_episode(store, key.model_copy(update={"run_id": row.run_id}), folder)
                return "1 episode"
            row = await access.find_run(store, what)
            written = await write_run(store, row, folder, groups, told)
            return f"{written} episode{'' if written == 1 else 's'}"

    try:
        check_ours(folder)
        written = asyncio.run(write())
    except ForeignFolder as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror or error}{_beside(folder, error)}.") from None
    console.print(Text(f"{written} in {folder}; open {folder / 'index.html'}"), soft_wrap=True)


def _beside(folder: Path, error: OSError) -> str:
    """What else must be writable, where that is what failed."""
    beside = folder.absolute().parent
    if not folder.is_dir() or not isinstance(error.filename, str) or Path(error.filename).parent != beside:
        return ""
    return f" (pages are made beside it, in {beside}, and take its name when they are whole)"
