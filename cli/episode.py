"""`atropos episode show`: one attempt of an episode, read from rows.

Invariant: an episode is named by its workflow's id or by RUN GROUP MEMBER [ATTEMPT]; one that does not exist is
answered with what there is instead.
"""

import asyncio
import json
import re
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..contracts.base import MOST
from ..contracts.ids import EpisodeKey
from ..contracts.text import shortened
from ..settings import load_settings
from . import access
from .errors import CommandError

if TYPE_CHECKING:
    from ..db.shown import Shown

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Read episodes: the conversation, its tokens and its reward.",
)


@app.callback()
def group() -> None:
    """Makes `show` a command of its own, beside those to come."""


@app.command()
def show(
    episode: Annotated[
        list[str],
        typer.Argument(metavar="ID", help="run/NAME-xxxx/group/12/episode/3, or RUN GROUP MEMBER [ATTEMPT]."),
    ],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show the tokens, coloured by how likely they were.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show an episode: its conversation, each turn's tokens, and the parts of its reward."""
    from ..db.shown import load_shown
    from .episode_show import facts_of, render_episode

    wanted = episode_key(episode)
    settings = load_settings()

    async def read() -> "Shown":
        async with access.opened_store(settings) as store:
            row = await access.find_run(store, wanted.run_id)
            return await load_shown(store, row, wanted.model_copy(update={"run_id": row.run_id}))

    shown = asyncio.run(read())
    if as_json:
        typer.echo(json.dumps(facts_of(shown, tokens=tokens), indent=2))
        return
    link = access.ui_link(settings, shown.facts.key.workflow_id)
    render_episode(shown, link, Console(), tokens=tokens)


def episode_key(words: list[str]) -> EpisodeKey:
    """The episode a person names; its run may still be abbreviated. Raises CommandError."""
    if len(words) == 1:
        text = words[0].strip().rstrip("/")
        for number in re.findall(r"\d+", text.rpartition("/group/")[2]):
            _refuse_large(number)
        try:
            return EpisodeKey.parse(text)
        except ValueError as error:
            raise CommandError(f"{error}, or RUN GROUP MEMBER.") from None
    run, *numbers = words
    if len(numbers) not in (2, 3) or not all(number.isdecimal() for number in numbers):
        raise CommandError("An episode is named as run/NAME-xxxx/group/12/episode/3, or as RUN GROUP MEMBER [ATTEMPT].")
    for number in numbers:
        _refuse_large(number)
    group_no, member, attempt = (*map(int, numbers), 0)[:3]
    return EpisodeKey(run_id=run, group_no=group_no, member=member, attempt=attempt)


def _refuse_large(digits: str) -> None:
    """Raise CommandError for a number that no row can have: neither Python nor Postgres reads one of any length."""
    if len(digits) > len(str(MOST)) or int(digits) > MOST:
        raise CommandError(
            f"Groups, members and attempts are numbered up to {MOST}; {shortened(digits, 40)} is none of them."
        )
