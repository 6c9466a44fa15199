"""What each page reads, and its HTML: one function a page, from the store and the address to text.

Invariant: a page reads what is on it, in a few statements of `db`; an id that names nothing is answered with a
sentence. Nothing here knows Panel, so files and tests use it as the dashboard does.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..contracts.base import MOST
from ..contracts.ids import EpisodeKey, GroupKey
from ..contracts.records import EpisodeFacts
from ..contracts.states import GroupState, is_live
from ..contracts.text import printable
from ..db.curves import RunCurves, rates
from ..db.engines import engines_of
from ..db.episodes import refresh_episode
from ..db.errors import Unknown
from ..db.evaluations import list_evaluations
from ..db.groups import load_group
from ..db.overview import RunFigures, group_answers, group_lines, run_figures, run_heads
from ..db.runs import RunRow, get_run, unknown_run
from ..db.shown import Shown, check_episode, load_shown
from ..db.store import Store
from ..inference.words import decoder
from .conversation import answer_of, conversation_of
from .html import Links, ServedLinks, counted, fragment

RUNS_A_PAGE: Final = 50
GROUPS_A_PAGE: Final = 25
Query = Mapping[str, str]
"""The arguments of an address; of repeated ones the first."""


@dataclass(frozen=True)
class Read:
    """A page as it is now. `live`: it may change."""

    html: str
    live: bool


@dataclass
class RunsPage:
    """The list of runs. Figures of runs that have ended are read once."""

    store: Store
    links: ServedLinks
    _ended: dict[str, RunFigures] = field(default_factory=dict)

    async def read(self, query: Query) -> Read:
        page = _number(query.get("page")) or 0
        heads = await run_heads(self.store, RUNS_A_PAGE + 1, page * RUNS_A_PAGE)
        shown = heads[:RUNS_A_PAGE]
        unknown = [head.run_id for head in shown if head.run_id not in self._ended]
        figures = self._ended | await run_figures(self.store, unknown)
        self._ended |= {head.run_id: figures[head.run_id] for head in shown if not is_live(head.state)}
        html = fragment(
            "runs.html",
            self.links,
            runs=[(head, figures[head.run_id]) for head in shown],
            newer=f"/runs?page={page - 1}" if page else None,
            older=f"/runs?page={page + 1}" if len(heads) > RUNS_A_PAGE else None,
        )
        return Read(html, live=True)


@dataclass
class RunPage:
    """One run: its facts as HTML, and its curves for charts."""

    store: Store
    links: ServedLinks
    curves: RunCurves | None = None

    async def read(self, query: Query) -> Read:
        run = await find(self.store, query.get("id", ""))
        if self.curves is None:
            self.curves = RunCurves(run.run_id, run.config.trains)
        await self.curves.update(self.store)
        places = self.curves.places.values()
        trained = self.curves.over_time()
        scored = sum(one.scored for one in trained)
        lately = rates(trained or self.curves.over_time("eval"))
        html = fragment(
            "run.html",
            self.links,
            run=run,
            engines=await engines_of(self.store, run.run_id),
            evaluations=await list_evaluations(self.store, run.run_id),
            failures=counted(self.curves.failures()),
            steps=self.curves.trained,
            episodes=sum(one.episodes for one in places),
            tokens=sum(one.tokens for one in places),
            scored=scored,
            mean=sum(one.reward for one in trained) / scored if scored else None,
            rate=lately[-1][1] if lately and is_live(run.state) else None,
        )
        return Read(html, is_live(run.state))


@dataclass
class EpisodePage:
    """An episode. While it runs, what may have been added is asked for; the page is made again where something was."""

    store: Store
    links: Links
    _facts: EpisodeFacts | None = None
    _page: Read | None = None

    async def read(self, query: Query) -> Read:
        if self._facts is not None and self._page is not None:
            fresh = await refresh_episode(self.store, self._facts)
            if fresh is not None and _grown(fresh) == _grown(self._facts):
                return self._page
        key = episode_key(query)
        shown = await load_shown(self.store, await find(self.store, key.run_id), key)
        self._facts, self._page = shown.facts, await _episode(shown, self.links, with_switch=False)
        return self._page


def _grown(facts: EpisodeFacts) -> tuple[object, ...]:
    """By what an episode that was added to differs from itself."""
    return len(facts.turns), len(facts.calls), facts.status, facts.reward


async def read_groups(store: Store, links: ServedLinks, query: Query) -> Read:
    """A page of a run's groups, by environment and state where that is asked for."""
    run = await find(store, query.get("run", ""))
    wanted = printable(query.get("environment", ""))
    environment = next((label for label in run.weights if printable(label) == wanted), None)
    state = next((state for state in GroupState if state == query.get("state")), None)
    before = _number(query.get("before"))
    lines = await group_lines(store, run.run_id, GROUPS_A_PAGE + 1, environment=environment, state=state, before=before)
    shown = lines[:GROUPS_A_PAGE]
    html = fragment(
        "groups.html",
        links,
        run=run,
        lines=shown,
        environment=environment,
        chosen=state,
        states=list(GroupState),
        newest=None if before is None else links.groups(run.run_id, environment=environment, state=state),
        older=links.groups(run.run_id, environment=environment, state=state, before=shown[-1].key.group_no)
        if len(lines) > len(shown)
        else None,
    )
    return Read(html, is_live(run.state) and before is None)


async def read_group(store: Store, links: Links, key: GroupKey) -> Read:
    """The answers of a group side by side."""
    facts, answers = await load_group(store, key), await group_answers(store, key)
    first = next(iter(answers.values()), None)
    members = [
        (
            member,
            answer_of(answer.last) if (answer := answers[member.key.member]).last is not None else (),
            answer.turns,
        )
        for member in facts.members
    ]
    html = fragment(
        "group.html",
        links,
        group=facts.group,
        mean=facts.mean_reward,
        reason=facts.reason,
        prompt=[] if first is None else [said for message in first.prompt for said in answer_of(message)],
        members=members,
    )
    return Read(html, facts.closed_at is None)


async def read_episode(store: Store, links: Links, key: EpisodeKey) -> Read:
    """An episode with its tokens, for a file: the page brings its own switch of colours."""
    shown = await load_shown(store, await find(store, key.run_id), key)
    return await _episode(shown, links, with_switch=True)


async def _episode(shown: Shown, links: Links, *, with_switch: bool) -> Read:
    def made() -> str:
        return fragment(
            "episode.html",
            links,
            shown=shown,
            talk=conversation_of(shown, decoder(shown.run.config.model)),
            task=json.dumps(shown.facts.task_data, indent=2, ensure_ascii=False, default=str),
            with_switch=with_switch,
        )

    return Read(await asyncio.to_thread(made), shown.facts.stop is None)


def first_values(arguments: Mapping[str, Sequence[bytes]]) -> Query:
    """Arguments as a server hands them over."""
    return {name: values[0].decode("utf-8", "replace") for name, values in arguments.items() if values}


async def check_named(store: Store, address: str, query: Query) -> None:
    """Look whether there is what a page is asked for, without reading it. Raises Unknown."""
    match address:
        case "/run":
            await find(store, query.get("id", ""))
        case "/groups":
            await find(store, query.get("run", ""))
        case "/group":
            await load_group(store, group_key(query))
        case "/episode":
            key = episode_key(query)
            await find(store, key.run_id)
            await check_episode(store, key)


async def find(store: Store, text: str) -> RunRow:
    """The run of an address. Raises Unknown."""
    for run_id in (text, f"run/{text}"):
        found = await get_run(store, run_id) if text and "\0" not in text else None
        if found is not None:
            return found
    raise unknown_run(text)


def group_key(query: Query) -> GroupKey:
    """The group of an address. Raises Unknown."""
    number = _number(query.get("no"))
    if number is None:
        raise Unknown("A group's page is addressed as /group?run=RUN&no=NUMBER.")
    run_id = query.get("run", "")
    if not run_id or "\0" in run_id:
        raise unknown_run(run_id)
    return GroupKey(run_id=run_id, group_no=number)


def episode_key(query: Query) -> EpisodeKey:
    """The episode of an address. Raises Unknown."""
    try:
        key = EpisodeKey.parse(query.get("id", ""))
    except ValueError as error:
        raise Unknown(f"{error}.") from None
    if max(key.group_no, key.member, key.attempt) > MOST:
        raise Unknown(f"There is no episode {key.workflow_id}.")
    return key


def _number(text: str | None) -> int | None:
    """A whole number that a column can hold."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 10:
        return None
    return min(int(text), MOST)
