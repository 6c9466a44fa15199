"""Make the pictures of the documentation: a real run on a stack of its own, and its pages in a browser.

Run: python -m atropos.benchmarks.pictures [--steps 20] [--model DIR]. Needs the extra `test` and /usr/bin/chromium;
writes docs/pictures/*.png. Without --model the tiny policy is made first, which takes a minute or two.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from atropos.cli.dev import link_model
from atropos.cli.progress import tiny_policy
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import RunningStack, running_stack
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.states import EpisodeState
from atropos.db.overview import GroupLine, group_lines
from atropos.db.store import open_store
from atropos.tests.dashboard.browser import chromium
from playwright.async_api import Browser, Page, ViewportSize

ROOT = Path(__file__).parent.parent
SIZE: ViewportSize = {"width": 1200, "height": 760}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    options = parser.parse_args()
    out = options.out.absolute()
    model = None if options.model is None else options.model.absolute()
    folder = Path(tempfile.mkdtemp(prefix="atropos-pictures-", dir="/tmp"))
    folder.chmod(0o755)
    os.chdir(folder)  # so that what is shown is called as it is in the documentation
    home = folder / ".atropos"
    try:
        model = model or tiny_policy(home, 0)
        link_model(home, model)
        with running_stack(home, StackOptions(engine_model=model, dashboard=True)) as stack:
            changes = [f"trainer.steps={options.steps}", "batch.groups=8", "eval.every=5"]
            start(stack, home, "run.yaml", ["budget.groups=12"])
            run_id = start(stack, home, "train.yaml", changes)
            out.mkdir(exist_ok=True)
            asyncio.run(take(stack, run_id, out))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(stack: RunningStack, home: Path, file: str, changes: list[str]) -> str:
    """Run an example to its end; the run's id."""
    sets = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "atropos.cli.main", "run", "start", "-f", str(ROOT / "examples" / file), "--wait"]
    environment = os.environ | {"ATROPOS_HOME": str(home)}
    done = subprocess.run(
        [*command, "--engine", str(stack.engine_url), *sets],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.split()[0]


async def take(stack: RunningStack, run_id: str, out: Path) -> None:
    assert stack.database_url is not None
    store = await open_store(stack.database_url.get_secret_value())
    try:
        lines = await group_lines(store, run_id, 200)
    finally:
        await store.close()
    group = next(line for line in lines if telling(line))
    episode = group.episode(next(member for member in group.members if member.reward))
    at = quote(run_id, safe="")
    dashboard = next(part.address for part in stack.state.parts if part.name == "dashboard")
    site = str(dashboard).removesuffix("/runs")
    async with chromium() as browser:
        for name, address, text in (
            ("runs", "/runs", run_id),
            ("run", f"/run?id={at}", "ended episodes"),
            ("groups", f"/groups?run={at}&state=trained", "trained"),
            ("group", f"/group?run={at}&no={group.key.group_no}", "episode 0"),
            ("episode", f"/episode?id={quote(episode.workflow_id, safe='')}", "turn 1"),
        ):
            page = await browser.new_page(viewport=SIZE)
            await page.goto(site + address)
            await page.get_by_text(text).first.wait_for(state="attached")
            if name == "episode":
                await page.get_by_role("button", name="tokens by logprob").click()
            await asyncio.sleep(2.5)
            await shot(page, out / f"{name}.png", full=name == "run")
        await temporal(browser, stack, episode, out)
    print(json.dumps({path.name: path.stat().st_size for path in sorted(out.glob("*.png"))}))


def telling(line: GroupLine) -> bool:
    """A training group in which some succeeded and some did not."""
    rewards = {member.reward for member in line.members if member.state is EpisodeState.DONE}
    return line.kind == "train" and len(rewards) > 1


async def temporal(browser: Browser, stack: RunningStack, episode: EpisodeKey, out: Path) -> None:
    """The episode's page in Temporal's UI, and a search."""
    page = await browser.new_page(viewport={"width": 1200, "height": 1500})
    workflows = f"{stack.temporal_ui}/namespaces/default/workflows"
    await page.goto(f"{workflows}/{quote(episode.workflow_id, safe='')}")
    await page.get_by_text("EpisodeWorkflow").first.wait_for(state="attached")
    await asyncio.sleep(4)
    await shot(page, out / "temporal-episode.png")
    await page.set_viewport_size(SIZE)
    query = f'AtroposRun="{episode.run_id}" AND AtroposReward >= 1 AND WorkflowType="EpisodeWorkflow"'
    await page.goto(f"{workflows}?query={quote(query)}")
    await page.get_by_text("EpisodeWorkflow").first.wait_for(state="attached")
    await asyncio.sleep(4)
    await shot(page, out / "temporal-search.png")


async def shot(page: Page, path: Path, *, full: bool = False) -> None:
    await page.screenshot(path=path, full_page=full)


if __name__ == "__main__":
    main()
