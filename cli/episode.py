"""`atropos episode show`: one attempt of an episode, read from rows.

Invariant: an episode is named by its workflow's id or by RUN GROUP MEMBER [ATTEMPT]; one that does not exist is
answered with what there is instead.
"""

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..contracts.ids import EpisodeKey
from ..settings import load_settings
from . import access
from .errors import CommandError

if TYPE_CHECKING:
    from ..db.groups import GroupFacts
    from ..db.runs import RunRow
    from ..db.store import Store
    from .episode_show import Shown

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
        try:
            return EpisodeKey.parse(words[0].strip().rstrip("/"))
        except ValueError as error:
            raise CommandError(f"{error}, or RUN GROUP MEMBER.") from None
    run, *numbers = words
    if len(numbers) not in (2, 3) or not all(number.isdecimal() for number in numbers):
        raise CommandError("An episode is named as run/NAME-xxxx/group/12/episode/3, or as RUN GROUP MEMBER [ATTEMPT].")
    group_no, member, attempt = (*map(int, numbers), 0)[:3]
    return EpisodeKey(run_id=run, group_no=group_no, member=member, attempt=attempt)


async def load_shown(store: "Store", row: "RunRow", key: EpisodeKey) -> "Shown":
    """Everything that is shown of an episode. Raises CommandError saying what there is instead, or Unknown."""
    from ..db.episodes import episode_scores, load_episode
    from ..db.groups import load_group
    from .episode_show import Shown

    group = await load_group(store, key.group)
    facts = await load_episode(store, key)
    if facts is None:
        raise CommandError(f"There is no episode {key.workflow_id}: {_what_there_is(group)}.")
    return Shown(row, facts, tuple(await episode_scores(store, key)), await _reason(store, key))


async def _reason(store: "Store", key: EpisodeKey) -> str | None:
    """What went wrong in this attempt, in words."""
    from sqlalchemy import select

    from ..db.models import EpisodeRow

    at = {"run_id": key.run_id, "group_no": key.group_no, "member": key.member, "attempt": key.attempt}
    async with store.begin() as connection:
        reason: str | None = await connection.scalar(select(EpisodeRow.reason).filter_by(**at))
    return reason


def _what_there_is(group: "GroupFacts") -> str:
    started = {member.key.member: member.key.attempt for member in group.members}
    where = f"group {group.group.key.group_no} has {group.group.size} episodes"
    if not started:
        return f"{where}, none of which has started"
    retried = [f"{member} (attempts 0 to {attempt})" for member, attempt in started.items() if attempt]
    several = f", retried: {', '.join(retried)}" if retried else ""
    return f"{where}, started: {', '.join(map(str, started))}{several}"
