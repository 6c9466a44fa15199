"""What pages are made of: text stays text, pictures are numbers, addresses are ours."""

import html
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import atropos
import pytest
from atropos.contracts.ids import EpisodeKey, GroupKey
from atropos.dashboard.conversation import shade
from atropos.dashboard.html import FileLinks, ServedLinks, cut, document, fragment, number, over, plural
from atropos.dashboard.sparkline import sparkline
from hypothesis import given
from hypothesis import strategies as st

KEY = EpisodeKey(run_id="run/a b&c", group_no=3, member=1, attempt=2)


class Tags(HTMLParser):
    """What an HTML parser finds: elements, their attributes, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    return tags


@given(st.text(max_size=60) | st.sampled_from(["</bdi><script>", "<!--", "]]>", "&lt;b&gt;", "'\"><b>"]))
def test_a_text_is_never_more_than_text(text: str) -> None:
    plain, given_text = (parsed(fragment("message.html", ServedLinks(), message=one)) for one in ("", text))
    assert given_text.tags == plain.tags


def test_controls_and_characters_that_reorder_become_visible() -> None:
    page = html.unescape(fragment("message.html", ServedLinks(), message="a\x1b[31m\u202eb\u200b\ud800"))
    assert "a␛[31m\\u202eb\\u200b\ufffd" in page


def test_addresses_are_quoted_ids() -> None:
    links = ServedLinks("http://ui/namespaces/default/workflows")
    assert links.run(KEY.run_id) == "/run?id=run%2Fa+b%26c"
    assert links.groups(KEY.run_id, state="failed", before=None) == "/groups?run=run%2Fa+b%26c&state=failed"
    assert links.episode(KEY) == "/episode?id=run%2Fa+b%26c%2Fgroup%2F3%2Fepisode%2F1%2Fattempt%2F2"
    assert links.workflow("a/b?<") == "http://ui/namespaces/default/workflows/a%2Fb%3F%3C"
    assert ServedLinks().workflow("a") is None


def test_files_link_to_what_was_written_and_nothing_else() -> None:
    links = FileLinks(frozenset({3}), frozenset({KEY}), depth=1)
    assert links.group(KEY.group) == "../groups/3.html"
    assert links.episode(KEY) == "../episodes/3-1-2.html"
    assert (links.group(GroupKey(run_id="r", group_no=4)), links.episode(KEY.group.episode(0))) == (None, None)


def test_a_document_keeps_the_page_in_its_frame() -> None:
    page = document("<title>", fragment("message.html", ServedLinks(), message="x"))
    assert "<title>&lt;title&gt;</title>" in page
    assert ("script", ()) not in parsed(page).tags


def test_zero_and_no_reward_differ() -> None:
    assert (number(0.0), number(None), number(1 / 3), number(None, "unscored")) == ("0", "-", "0.3333", "unscored")


def test_what_is_cut_is_counted() -> None:
    assert (cut("abcdef", 4), over("abcdef", 4), over("abc", 4)) == ("abcd", 2, 0)
    assert (plural(1, "turn"), plural(12345, "turn")) == ("1 turn", "12\u2009345 turns")


@given(st.lists(st.none() | st.floats(), max_size=50))
def test_a_line_of_any_numbers_is_a_picture_within_its_frame(values: list[float | None]) -> None:
    picture = str(sparkline(values))
    assert "nan" not in picture.partition("aria")[0]
    if not picture:
        return
    points = picture.split('points="')[1].split('"')[0].split()
    for point in points:
        across, down = map(float, point.split(","))
        assert 0 <= across <= 120
        assert 0 <= down <= 24


@pytest.mark.parametrize(("logprob", "expected"), [(0.0, 0), (-0.5, 1), (-1.0, 2), (-9.0, 3), (0.1, 0)])
def test_a_token_is_shaded_by_its_probability(logprob: float, expected: int) -> None:
    assert shade(logprob) == expected


def test_a_wheel_carries_every_file_that_pages_are_made_from() -> None:
    root = Path(atropos.__file__).parent
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = root / "dashboard"
    carried = {path for pattern in listed["atropos.dashboard"] for path in folder.glob(pattern)}
    found = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert found == carried
    assert folder / "templates" / "episode.html" in found
