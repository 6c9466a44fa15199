"""Programs are told that an address names nothing: 404, with the page that says so in words."""

import asyncio
from urllib.parse import quote, urlsplit

import httpx
import pytest
from atropos.contracts.ids import EpisodeKey
from atropos.dashboard.answers import answering, is_named
from atropos.db.store import Store
from bokeh.server.urls import per_app_patterns
from playwright.async_api import Browser
from sqlalchemy.ext.asyncio import create_async_engine

from ..db.samples import new_run, started
from .browser import visit
from .conftest import Dashboard, Serve

TOKEN = "correct horse battery"


def asked(address: str, id_: str) -> str:
    return f"/{address}?{'run' if address in ('groups', 'group') else 'id'}={quote(id_, safe='')}"


async def test_what_is_not_there_is_answered_with_404_and_what_is_there_with_200(
    store: Store, dashboard: Dashboard
) -> None:
    run, empty = await new_run(store), await new_run(store)
    key = await started(store, run)
    group = f"&no={key.group_no}"
    there = [
        "/runs", "/runs?page=99", "/health", asked("run", run), asked("run", run.removeprefix("run/")),
        asked("groups", run), asked("groups", run) + "&state=none&before=x", asked("groups", empty),
        asked("group", run) + group, asked("episode", key.workflow_id), asked("run", run) + "&id=another",
    ]  # fmt: skip
    missing = [
        "/run", "/groups", "/group", "/episode", "/nothing", asked("run", "none"), asked("run", "\0\ud7ff"),
        "/run?id=%00%ff", asked("groups", "none"), asked("group", run), asked("group", run) + "&no=9999999999",
        asked("group", run) + f"&no={key.group_no + 1}", asked("group", "none") + group, asked("episode", "none"),
        asked("episode", key.group.episode(1).workflow_id), asked("episode", key.group.episode(0, 1).workflow_id),
        asked("episode", EpisodeKey(run_id="run/none", group_no=0, member=0).workflow_id),
        asked("group", "\0") + group, asked("episode", f"{run}\0/group/0/episode/0"),
        asked("episode", f"{run}/group/99999999999/episode/0"), asked("run", "x" * 4000), asked("episode", run),
    ]  # fmt: skip
    async with httpx.AsyncClient(base_url=dashboard.url, timeout=60) as client:
        answers = {address: (await client.get(address)).status_code for address in (*there, *missing)}
    assert answers == dict.fromkeys(there, 200) | dict.fromkeys(missing, 404)


async def test_a_page_of_nothing_says_so_and_becomes_the_page_of_what_appears(
    store: Store, dashboard: Dashboard, browser: Browser
) -> None:
    run = await new_run(store)
    key = EpisodeKey(run_id=run, group_no=0, member=0)
    async with visit(browser, f"{dashboard.url}/run?id=none") as visitor:
        await visitor.shows("There is no run called none")
    async with visit(browser, dashboard.url + asked("episode", key.workflow_id)) as visitor:
        await visitor.shows(f"There is no group {key.group.workflow_id}")
        assert await started(store, run) == key
        await visitor.shows("1 + 1?")
        assert (visitor.errors, visitor.dialogs) == ([], [])


async def test_who_has_no_token_is_not_told_what_there_is(store: Store, serve: Serve) -> None:
    run = await new_run(store)
    async with (
        serve(ATROPOS_DASHBOARD_TOKEN=TOKEN) as dashboard,
        httpx.AsyncClient(base_url=dashboard.url, timeout=60) as client,
    ):
        for id_ in (run, "none"):
            answer = await client.get(asked("run", id_))
            assert (answer.status_code, urlsplit(answer.headers["Location"]).path) == (302, "./login")
        known = {"Authorization": f"Bearer {TOKEN}"}
        answers = [(await client.get(asked("run", id_), headers=known)).status_code for id_ in (run, "none")]
        assert answers == [200, 404]


async def test_a_store_that_does_not_answer_makes_nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atropos.dashboard.answers._PATIENCE_S", 0.05)

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(swallow, "127.0.0.1", 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        store = Store(create_async_engine(f"postgresql+psycopg://nobody@127.0.0.1:{port}/none"))
        assert await is_named(store, "/run", {"id": [b"any"]})
        assert not await is_named(store, "/run", {})
        await store.close()


async def test_only_servers_of_the_block_answer_so(store: Store) -> None:
    before = list(per_app_patterns)
    with answering(store):
        changed = [route for (route, one), (_, other) in zip(before, per_app_patterns, strict=True) if one is not other]
    assert changed == ["/?"]
    assert per_app_patterns == before
