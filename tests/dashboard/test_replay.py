"""The searches that docs/replay.md names are ones that Temporal answers, with what the page says they find."""

import asyncio
import re
from pathlib import Path

import atropos
from atropos.contracts.search import SEARCH_ATTRIBUTES
from atropos.contracts.states import RunState

from ..support.world import World

PAGE = (Path(atropos.__file__).parent / "docs" / "replay.md").read_text(encoding="utf-8")
QUERIES = dict(re.findall(r"^\| `(AtroposRun=[^`]+)` \| (.+) \|$", PAGE, re.MULTILINE))
FOUND = {
    "the episodes of a run": 4,
    "the good ones": 4,
    "the others that have a reward": 0,
    "what ended so, in one environment of a mixture": 4,
    "what failed, by fault": 0,
    "what the first weights sampled": 4,
    "ended without a reward": 0,
    "what is in flight": 0,
}
_SHOWN_S = 60.0
"""Temporal lists what has ended a moment later."""


def test_the_page_names_every_attribute() -> None:
    assert re.findall(r"^\| `(Atropos\w+)` \|", PAGE, re.MULTILINE) == list(SEARCH_ATTRIBUTES)


async def test_each_search_finds_what_the_page_says(world: World) -> None:
    assert sorted(QUERIES.values()) == sorted(FOUND)
    async with world.workers():
        run = await world.start(world.document("Answers"))
        assert (await run.result()).state is RunState.COMPLETED
    for query, meaning in QUERIES.items():
        async with asyncio.timeout(_SHOWN_S):
            while (await world.client.count_workflows(query.replace("RUN", run.id))).count != FOUND[meaning]:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
