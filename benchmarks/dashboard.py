"""How long the dashboard's pages take to open over many episodes, from asking for the address to the figures on it.

Run: python -m atropos.benchmarks.dashboard [--episodes 100000] [--rounds 5]. Needs the extra `test` and
/usr/bin/chromium; starts and stops a Postgres of its own. Prints one JSON line last: milliseconds, the median of the
rounds, for each page the whole opening in a browser (`first`: with an empty cache; `later`: not) and its reading alone
(`read`, and `again` in the same session).
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import running_stack
from atropos.contracts.ids import EpisodeKey
from atropos.dashboard.html import ServedLinks
from atropos.dashboard.reading import EpisodePage, Query, Read, RunPage, RunsPage, read_group, read_groups
from atropos.db.store import Store, open_store
from atropos.tests.dashboard.browser import chromium, visit
from atropos.tests.support.many import many_episodes

RUN = "run/many"
PORT = 5017


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="atropos-bench-", dir="/tmp"))
    home.chmod(0o755)
    try:
        with running_stack(home, StackOptions(temporal=False, workers=False)) as stack:
            assert stack.database_url is not None
            figures = asyncio.run(
                measure(stack.database_url.get_secret_value(), home, options.episodes, options.rounds)
            )
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(json.dumps({"episodes": options.episodes, "ms": figures}))


async def measure(database: str, home: Path, episodes: int, rounds: int) -> dict[str, dict[str, float]]:
    store = await open_store(database)
    try:
        began = time.perf_counter()
        await many_episodes(store, database, RUN, episodes)
        print(f"{episodes} episodes written in {time.perf_counter() - began:.1f} s", file=sys.stderr)
        key = EpisodeKey(run_id=RUN, group_no=episodes // 16, member=3)
        read = await reading(store, key, rounds)
        opened = await opening(database, home, key, episodes, rounds)
    finally:
        await store.close()
    return {page: opened[page] | read[page] for page in opened}


async def reading(store: Store, key: EpisodeKey, rounds: int) -> dict[str, dict[str, float]]:
    """A page's queries and its HTML, without server and browser."""
    links = ServedLinks()
    pages: dict[str, Callable[[], tuple[Callable[[Query], Awaitable[Read]], Query]]] = {
        "runs": lambda: (RunsPage(store, links).read, {}),
        "run": lambda: (RunPage(store, links).read, {"id": RUN}),
        "groups": lambda: (lambda query: read_groups(store, links, query), {"run": RUN}),
        "group": lambda: (lambda query: read_group(store, links, key.group), {}),
        "episode": lambda: (EpisodePage(store, links).read, {"id": key.workflow_id}),
    }
    out = {}
    for name, make in pages.items():
        times: list[tuple[float, float]] = []
        for _ in range(rounds):
            read, query = make()
            times.append((await timed(read(query)), await timed(read(query))))
        first, again = zip(*times, strict=True)
        out[name] = {"read": statistics.median(first), "again": statistics.median(again)}
    return out


async def opening(
    database: str, home: Path, key: EpisodeKey, episodes: int, rounds: int
) -> dict[str, dict[str, float]]:
    """In a browser, until the page shows what it is about: with nothing kept, and when it has the scripts already."""
    at = quote(RUN, safe="")
    pages = {
        "runs": ("/runs", RUN),
        "run": (f"/run?id={at}", "ended episodes"),
        "groups": (f"/groups?run={at}", str(episodes // 8 - 1)),
        "group": (f"/group?run={at}&no={key.group_no}", "It is "),
        "episode": (f"/episode?id={quote(key.workflow_id, safe='')}", "It is "),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "atropos.cli.main", "dashboard", "--port", str(PORT),
        env=os.environ | {"DATABASE_URL": database, "ATROPOS_HOME": str(home)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await process.stdout.readline()
        out = {}
        async with chromium() as browser:
            for name, (address, text) in pages.items():
                first, later = [], []
                for _ in range(rounds + 1):
                    began = time.perf_counter()
                    async with visit(browser, f"http://127.0.0.1:{PORT}{address}") as visitor:
                        await visitor.shows(text)
                        first.append(1000 * (time.perf_counter() - began))
                        began = time.perf_counter()
                        await visitor.page.goto(f"http://127.0.0.1:{PORT}{address}")
                        await visitor.shows(text)
                        later.append(1000 * (time.perf_counter() - began))
                out[name] = {
                    "first": round(statistics.median(first[1:]), 1),
                    "later": round(statistics.median(later[1:]), 1),
                }
        return out
    finally:
        process.terminate()
        await process.wait()


async def timed(work: Awaitable[Read]) -> float:
    began = time.perf_counter()
    await work
    return round(1000 * (time.perf_counter() - began), 1)


if __name__ == "__main__":
    main()
