"""Pages over a hundred thousand episodes: they open, hold little, and read on cheaply."""

from urllib.parse import quote

import pytest
from atropos.contracts.ids import EpisodeKey
from atropos.dashboard.html import ServedLinks
from atropos.dashboard.reading import RunPage, RunsPage, read_episode, read_group, read_groups
from atropos.db.store import Store
from playwright.async_api import Browser

from ..support.many import many_episodes
from .browser import visit
from .conftest import Dashboard

RUN = "run/many"
KEY = EpisodeKey(run_id=RUN, group_no=6000, member=3)


@pytest.mark.slow
async def test_pages_over_very_many_episodes_open_and_stay_small(
    store: Store, database_url: str, dashboard: Dashboard, browser: Browser
) -> None:
    await many_episodes(store, database_url, RUN, 100_000)
    links = ServedLinks()
    page = RunPage(store, links)
    pages = [
        await RunsPage(store, links).read({}),
        await page.read({"id": RUN}),
        await read_groups(store, links, {"run": RUN}),
        await read_group(store, links, KEY.group),
        await read_episode(store, links, KEY),
    ]
    assert all(len(page.html) < 100_000 for page in pages)
    assert page.curves is not None
    assert sum(one.episodes for one in page.curves.places.values()) == 100_000
    assert page.curves.failures() == {"engine": 2000}
    at = quote(RUN, safe="")
    for address, text in {
        "/runs": RUN,
        f"/run?id={at}": "100\u2009000 ended episodes",
        f"/groups?run={at}&state=sealed": "12499",
        f"/group?run={at}&no=6000": "It is 6003",
        f"/episode?id={quote(KEY.workflow_id, safe='')}": "It is 6003",
    }.items():
        async with visit(browser, dashboard.url + address) as visitor:
            await visitor.shows(text)
