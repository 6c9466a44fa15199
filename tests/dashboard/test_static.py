"""Pages in a folder: nothing beside themselves, no scripts, nothing lost that others put there."""

import errno
import re
from pathlib import Path

import pytest
from atropos.cli.main import app
from atropos.contracts.ids import EpisodeKey
from atropos.dashboard.html import FileLinks
from atropos.dashboard.reading import read_episode
from atropos.dashboard.static import MARK, ForeignFolder, check_ours, replaced, write_run
from atropos.db.episodes import save_turn
from atropos.db.runs import get_run
from atropos.db.store import Store
from playwright.async_api import Browser
from typer.testing import CliRunner

from ..db.samples import closed, started, training_run, turn
from .browser import visit
from .hostile import SCRIPT


def view(database_url: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setenv("DATABASE_URL", database_url)
    result = CliRunner().invoke(app, ["view", *arguments])
    return result.exit_code, result.stderr


def test_a_run_becomes_pages_that_need_nothing_else(
    hostile: EpisodeKey, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    code, told = view(database_url, monkeypatch, hostile.run_id, "--html", str(out))
    assert (code, told.split(" in ")[0]) == (0, "2 episodes")
    pages = sorted(str(page.relative_to(out)) for page in out.rglob("*.html"))
    assert pages == ["episodes/0-0-0.html", "episodes/0-1-0.html", "groups/0.html", "index.html"]
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "default-src 'none'" in text
        assert f"<script>{SCRIPT}" not in text
        assert not {"src=", "url(", "@import", "<link", "<script"} & set(text.replace("&lt;", " ").split())
    assert view(database_url, monkeypatch, hostile.run_id, "--html", str(out))[0] == 0, "it may replace its own"


async def test_nothing_runs_on_a_page_and_colours_need_no_scripts(
    hostile: EpisodeKey, store: Store, tmp_path: Path, browser: Browser
) -> None:
    out = tmp_path / "out"
    run = await get_run(store, hostile.run_id)
    assert run is not None
    assert await write_run(store, run, out, 10, lambda count, of: None) == 2
    for page in out.rglob("*.html"):
        # Without the policy in its head, so that it is the escaping that is looked at.
        bare = page.with_name(f"bare-{page.name}")
        bare.write_text(page.read_text(encoding="utf-8").replace("default-src 'none'", "img-src 'none'"), "utf-8")
        async with visit(browser, bare.as_uri()) as visitor:
            found = await visitor.found()
            assert (found["owned"], found["wrong"], visitor.dialogs) == (None, [], []), page
            assert f"<script>{SCRIPT}</script>" in found["text"], page
        bare.unlink()
    async with visit(browser, (out / "index.html").as_uri(), scripts=False) as visitor:
        await visitor.page.get_by_role("link", name="0.5").first.click()
        await visitor.page.wait_for_url("**/episodes/0-0-0.html")
        tokens = visitor.page.locator(".tokens").first
        assert not await tokens.is_visible()
        await visitor.page.get_by_label("by mask").check()
        assert await tokens.is_visible()
        assert await visitor.page.locator(".legend.mask").is_visible()
        assert not await visitor.page.locator(".legend.version").is_visible()
        assert all(url.startswith("file:") for url in visitor.asked)


def test_an_episode_becomes_one_page(
    hostile: EpisodeKey, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert view(database_url, monkeypatch, hostile.workflow_id, "--html", str(out))[0] == 0
    assert sorted(path.name for path in out.iterdir()) == [MARK, "index.html"]
    missing = f"{hostile.group.workflow_id}/episode/7"
    code, told = view(database_url, monkeypatch, missing, "--html", str(out))
    assert code == 1
    assert "group 0 has 2 episodes, started: 0, 1" in told
    assert "Reward" in (out / "index.html").read_text(encoding="utf-8"), "what was there stays"


async def test_a_large_run_is_cut_to_its_newest_groups_and_says_so(store: Store, tmp_path: Path) -> None:
    run_id = await training_run(store)
    for _ in range(3):
        await closed(store, run_id)
    run = await get_run(store, run_id)
    assert run is not None
    assert await write_run(store, run, tmp_path / "out", 2, lambda count, of: None) == 4
    assert sorted(page.name for page in (tmp_path / "out" / "groups").iterdir()) == ["1.html", "2.html"]
    assert "the newest 2 groups" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


async def test_of_very_many_tokens_a_page_shows_the_first_and_counts_the_rest(store: Store) -> None:
    key = await started(store)
    for number in range(45):
        await save_turn(store, key, turn(number, 500))
    page = (await read_episode(store, FileLinks(frozenset(), frozenset()), key)).html
    shown = len(re.findall(r'<span class="p\d m\d v\d" title=', page))
    left_out = [
        int(count.replace("\u2009", "")) for count in re.findall(r"… ([\d\u2009]+) more tokens, not shown", page)
    ]
    assert (shown, left_out) == (20_000, [500] * 5)
    assert page.count("<h3>turn ") == 45


@pytest.mark.parametrize("foreign", ["notes.txt", "index.html", "groups/mine.txt", "more/page.html", "page.html/x"])
def test_a_folder_of_others_is_not_overwritten(tmp_path: Path, foreign: str) -> None:
    out = tmp_path / "out"
    path = out / foreign
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    if foreign != "index.html":
        (out / MARK).write_text("")
    with pytest.raises(ForeignFolder, match="name another folder"):
        check_ours(out)
    assert path.read_text() == "mine"


def test_a_folder_that_cannot_be_finished_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replaced(out) as fresh:
        (fresh / "index.html").write_text("first")
    with pytest.raises(ZeroDivisionError), replaced(out) as fresh:
        (fresh / "index.html").write_text(str(1 // 0))
    assert (out / "index.html").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_two_that_write_to_one_folder_at_once_the_second_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for first in ("new", "again"):  # where nothing was, and where pages of ours were
        with pytest.raises(ForeignFolder, match="was written by another `atropos view` meanwhile; name another"):
            twice(out, first)
        assert (out / "index.html").read_text() == first
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def twice(out: Path, first: str) -> None:
    with replaced(out) as late:
        (late / "index.html").write_text("late")
        with replaced(out) as early:
            (early / "index.html").write_text(first)


def test_a_folder_that_was_taken_away_meanwhile_is_not_put_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replaced(out) as fresh:
        (fresh / "index.html").write_text("first")
    with pytest.raises(ForeignFolder, match="meanwhile"), replaced(out) as fresh:
        out.rename(tmp_path / "mine")
    assert not out.exists()
    assert (tmp_path / "mine" / "index.html").read_text() == "first"


def test_a_folder_without_a_name_is_refused(
    hostile: EpisodeKey, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert view(database_url, monkeypatch, hostile.run_id, "--html", "") == (
        1,
        "atropos: --html is empty; name a folder to write.\n",
    )


def test_a_folder_whose_surroundings_cannot_be_written_is_refused_with_the_reason(
    hostile: EpisodeKey, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / ".out.abcd"))

    monkeypatch.setattr("tempfile.mkdtemp", denied)  # a test that runs as root may write everywhere
    assert view(database_url, monkeypatch, hostile.workflow_id, "--html", str(out)) == (
        1,
        f"atropos: {out} cannot be written: Permission denied (pages are made beside it, in {tmp_path}, and take its "
        "name when they are whole).\n",
    )
    assert list(out.iterdir()) == []
