"""The dashboard in a real browser: pages open, follow a run as it goes on, and run nothing that others wrote."""

import asyncio
from urllib.parse import quote

import httpx
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.states import RunState
from atropos.db.overview import run_figures
from atropos.db.store import Store
from playwright.async_api import Browser

from ..support.world import World
from .browser import visit
from .conftest import Dashboard, Serve
from .hostile import HOSTILE

TOKEN = "correct horse battery"


async def test_pages_follow_a_run_while_its_episodes_arrive(
    world: World, store: Store, dashboard: Dashboard, browser: Browser
) -> None:
    world.engine.hold(1)
    async with world.workers():
        run = await world.start(world.document("Answers"))
        await asyncio.wait_for(world.engine.waiting.wait(), 60)
        key = EpisodeKey(run_id=run.id, group_no=0, member=0)
        at = quote(run.id, safe="")
        async with (
            await browser.new_context() as person,
            visit(person, f"{dashboard.url}/runs") as runs,
            visit(person, f"{dashboard.url}/run?id={at}") as one,
            visit(person, f"{dashboard.url}/groups?run={at}") as groups,
            visit(person, f"{dashboard.url}/group?run={at}&no=0") as group,
            visit(person, f"{dashboard.url}/episode?id={quote(key.workflow_id, safe='')}") as episode,
        ):
            await runs.shows(run.id, "running")
            await one.shows("No episode has failed.", "0 ended episodes")
            await one.page.locator("canvas").first.wait_for()
            await groups.shows("Answers", "running")
            await group.shows("episode 0", "Say something.")
            await episode.shows("Say something.", "turn 0", "You said turn 0.")
            assert "turn 2" not in (await episode.found())["text"]

            world.engine.release()
            assert (await run.result()).state is RunState.COMPLETED
            await runs.shows("completed")
            await one.shows("4 ended episodes", "completed")
            await groups.shows("sealed", "0.75")
            await group.shows("turn 2", "done")
            await episode.shows("You said turn 2.", "Reward: 0.75", "its replay in Temporal's UI")
            for visitor in (runs, one, groups, group, episode):
                assert visitor.hosts() == {dashboard.url.removeprefix("http://")}, "a page asks nobody else"
                assert (visitor.errors, visitor.dialogs) == ([], [])

            await groups.page.get_by_role("link", name="0.75").first.click()
            await groups.page.wait_for_url("**/episode?id=*")
    assert (await run_figures(store, [run.id]))[run.id].episodes == 4


async def test_tokens_are_coloured_by_choice_without_a_reload(
    hostile: EpisodeKey, dashboard: Dashboard, browser: Browser
) -> None:
    async with visit(browser, f"{dashboard.url}/episode?id={quote(hostile.workflow_id, safe='')}") as visitor:
        await visitor.shows("turn 1")
        token = visitor.page.locator(".tokens .m0").first
        assert not await token.is_visible()
        opened = len(visitor.asked)
        seen = set()
        for name in ("tokens by logprob", "by mask", "by version"):
            await visitor.page.get_by_role("button", name=name).click()
            await token.wait_for(state="visible")
            await asyncio.sleep(0.3)
            seen.add(await token.evaluate("one => getComputedStyle(one).backgroundColor + one.className"))
        assert len(seen) == 3
        await visitor.page.get_by_role("button", name="messages").click()
        await token.wait_for(state="hidden")
        assert len(visitor.asked) == opened


async def test_no_text_of_others_becomes_more_than_text(
    hostile: EpisodeKey, dashboard: Dashboard, browser: Browser
) -> None:
    run, group, episode = (quote(text, safe="") for text in (hostile.run_id, "0", hostile.workflow_id))
    other = quote(hostile.group.episode(1).workflow_id, safe="")
    pages = {
        "/runs": ["running", "HOSTILE"],
        f"/run?id={run}": ["Failures by kind", "Evaluations"],
        f"/groups?run={run}": ["failed", "invalid"],
        f"/groups?run={run}&environment={quote(HOSTILE, safe='')}&state=failed": ["invalid"],
        f"/group?run={run}&no={group}": ["episode 1", "more characters, not shown"],
        f"/episode?id={episode}": ["turn 1", "assistant"],
        f"/episode?id={other}": ["turn 1", "Failed: environment"],
        f"/run?id={quote(HOSTILE, safe='')}x": ["There is no run called"],
        f"/episode?id={quote(HOSTILE, safe='')}": ["is no episode id"],
        f"/groups?run={run}&before={quote(HOSTILE, safe='')}&state={quote(HOSTILE, safe='')}": ["invalid"],
    }
    async with visit(browser, f"{dashboard.url}/health") as visitor:
        for address, texts in pages.items():
            await visitor.page.goto(dashboard.url + address)
            await visitor.shows(*texts)
            found = await visitor.found()
            assert found["owned"] is None, address
            assert (found["wrong"], visitor.dialogs, visitor.errors) == ([], [], []), address
            assert "<script>window.owned=1</script>" in found["text"], address
            assert not set(found["text"]) & set("\x1b\x07\u202e\u200b\ufeff\x00"), address


async def test_a_token_may_be_any_text_and_what_is_entered_instead_is_refused_quietly(serve: Serve) -> None:
    token = "pässwörter, \u4e2d\u6587"
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    async with (
        serve(ATROPOS_DASHBOARD_TOKEN=token) as dashboard,
        httpx.AsyncClient(base_url=dashboard.url, timeout=60) as client,
    ):
        for body in (b"", b"token=", b"token=%ff%fe", b"token=%00", b"token=" + b"x" * 10_000, b"token=p", b"other=1"):
            answer = await client.post("/login", content=body, headers=form)
            assert (answer.status_code, answer.headers.get("Set-Cookie")) == (403, None), body[:20]
        for sent in (b"Bearer " + b"x" * 10_000, b"Bearer \xff\xfe", b"Bearer", b""):
            assert (await client.get("/runs", headers={b"Authorization": sent})).status_code == 302
        right = await client.get("/runs", headers={b"Authorization": f"Bearer {token}".encode()})
        entered = await client.post("/login", data={"token": f" {token}\n"})
        assert (right.status_code, entered.status_code, (await client.get("/runs")).status_code) == (200, 302, 200)


async def test_a_token_keeps_out_whoever_does_not_have_it(serve: Serve, browser: Browser) -> None:
    async with serve("--address", "0.0.0.0", ATROPOS_DASHBOARD_TOKEN=TOKEN) as dashboard:
        async with httpx.AsyncClient(base_url=dashboard.url, timeout=60) as client:
            for address in ("/runs", "/run?id=x", "/groups", "/group", "/episode", "/runs/metadata"):
                answer = await client.get(address)
                assert answer.status_code in (302, 403), address
                assert "session" not in answer.text, address
            wrong = await client.get("/runs", headers={"Authorization": "Bearer wrong"})
            right = await client.get("/runs", headers={"Authorization": f"Bearer {TOKEN}"})
            assert (wrong.status_code, right.status_code) == (302, 200)
        async with visit(browser, f"{dashboard.url}/runs") as visitor:
            await visitor.page.get_by_label("token").fill("wrong")
            await visitor.page.get_by_role("button", name="enter").click()
            await visitor.shows("That is not the token.")
            await visitor.page.get_by_label("token").fill(TOKEN)
            await visitor.page.get_by_role("button", name="enter").click()
            await visitor.shows("Runs", "episodes")
