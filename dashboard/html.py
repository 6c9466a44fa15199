"""Pages as HTML: pure functions from facts to text.

Invariant: whatever was sampled, answered, raised or named by others reaches a page as text. Every string that a
template prints has its control and format characters made visible and is escaped, at one place (`_finalize` and
autoescape); an address is only ever made by `Links`, out of quoted ids, so no text of others becomes one. Pages of the
dashboard and of files come from the same templates.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..contracts.ids import EpisodeKey, GroupKey
from ..contracts.text import printable
from .sparkline import sparkline

MOST_TEXT: Final = 20_000
"""Characters of one text that a page shows."""


class Links(Protocol):
    """Addresses of pages; None: there is no such page here."""

    def runs(self) -> str | None: ...
    def run(self, run_id: str) -> str | None: ...
    def groups(self, run_id: str) -> str | None: ...
    def group(self, key: GroupKey) -> str | None: ...
    def episode(self, key: EpisodeKey) -> str | None: ...
    def workflow(self, workflow_id: str) -> str | None: ...


class ServedLinks:
    """Addresses below the dashboard's own. `workflows`: below it are their pages in Temporal's UI, if known."""

    def __init__(self, workflows: str | None = None) -> None:
        self._workflows = workflows

    def runs(self) -> str:
        return "/runs"

    def run(self, run_id: str) -> str:
        return f"/run?{urlencode({'id': run_id})}"

    def groups(self, run_id: str, **chosen: str | int | None) -> str:
        given = {name: value for name, value in chosen.items() if value not in (None, "")}
        return f"/groups?{urlencode({'run': run_id, **given})}"

    def group(self, key: GroupKey) -> str:
        return f"/group?{urlencode({'run': key.run_id, 'no': key.group_no})}"

    def episode(self, key: EpisodeKey) -> str:
        return f"/episode?{urlencode({'id': key.workflow_id})}"

    def workflow(self, workflow_id: str) -> str | None:
        return None if self._workflows is None else f"{self._workflows}/{quote(workflow_id, safe='')}"


class FileLinks:
    """Addresses inside a folder, seen from `depth` folders below it; only of what was written."""

    def __init__(self, groups: frozenset[int], episodes: frozenset[EpisodeKey], depth: int = 0) -> None:
        self._groups, self._episodes, self._up = groups, episodes, "../" * depth

    def runs(self) -> None:
        return None

    def run(self, run_id: str) -> str:
        return f"{self._up}index.html"

    def groups(self, run_id: str) -> str:
        return f"{self._up}index.html"

    def group(self, key: GroupKey) -> str | None:
        return f"{self._up}{group_file(key)}" if key.group_no in self._groups else None

    def episode(self, key: EpisodeKey) -> str | None:
        return f"{self._up}{episode_file(key)}" if key in self._episodes else None

    def workflow(self, workflow_id: str) -> None:
        return None


def group_file(key: GroupKey) -> str:
    return f"groups/{key.group_no}.html"


def episode_file(key: EpisodeKey) -> str:
    return f"episodes/{key.group_no}-{key.member}-{key.attempt}.html"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters |= {"cut": cut, "over": over, "number": number, "moment": moment, "plural": plural}
    environment.globals |= {"sparkline": sparkline}
    return environment


def _finalize(value: Any) -> Any:
    if isinstance(value, Markup) or not isinstance(value, str):
        return "" if value is None else value
    return printable(value)


def fragment(template: str, links: Links, **facts: Any) -> str:
    """A page without its frame."""
    return _environment().get_template(template).render(links=links, now=datetime.now(UTC), **facts)


def document(title: str, body: str) -> str:
    """A page that needs nothing beside itself. `body`: what `fragment` made."""
    return _environment().get_template("document.html").render(title=title, style=Markup(style()), body=Markup(body))


@cache
def style() -> str:
    """The style sheet of all pages."""
    return (files(__package__) / "templates" / "page.css").read_text(encoding="utf-8")


def cut(text: str, limit: int = MOST_TEXT) -> str:
    return text[:limit]


def over(text: str, limit: int = MOST_TEXT) -> int:
    """Characters that `cut` leaves out."""
    return max(0, len(text) - limit)


def number(value: float | None, unknown: str = "-") -> str:
    """A reward or another measured number; 0, unscored and invalid stay three things."""
    return unknown if value is None else f"{value:.4g}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}".replace(",", "\u2009")


def moment(value: datetime | None) -> str:
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def counted(counts: Mapping[str, int]) -> Sequence[tuple[str, int]]:
    """For a table, the most frequent first."""
    return sorted(((str(name), count) for name, count in counts.items()), key=lambda item: (-item[1], item[0]))
