"""The dashboard's pages as Panel shows them.

Invariant: a page is the HTML that `reading` made, shown in a pane that runs no scripts, and read again every two
seconds while it may change; what has not changed is not sent. A store that is away is said, and asked again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import panel as pn

from ..db.errors import StoreError, StoreUnreachable
from ..db.store import Store
from .html import ServedLinks, fragment, style
from .plots import RunPlots
from .reading import EpisodePage, Query, Read, RunPage, RunsPage, first_values, group_key, read_group, read_groups

logger = logging.getLogger(__name__)

EVERY_MS: Final = 2000
COLOURS: Final = {
    "messages": "by-none",
    "tokens by logprob": "by-logprob",
    "by mask": "by-mask",
    "by version": "by-version",
}
_AGAIN: Final = "It is tried again."
_ABSENT: Final = f"The page cannot be read right now; see the log of the dashboard. {_AGAIN}"
_SLOW_S: Final = 4.0
"""After which a reading that goes on is told of, each time it passes."""


class Html(pn.pane.HTML):  # type: ignore[misc]
    """HTML of our own, in which scripts are not run even if there were any."""

    def _get_properties(self, doc: Any) -> dict[str, Any]:
        return {**super()._get_properties(doc), "run_scripts": False}


class Pages:
    """Makes a page for each session that asks for one."""

    def __init__(self, store: Store, links: ServedLinks) -> None:
        self._store, self._links = store, links

    def routes(self) -> dict[str, Callable[[], Any]]:
        """Address → what makes the page."""
        return {
            "/runs": self.runs,
            "/run": self.run,
            "/groups": self.groups,
            "/group": self.group,
            "/episode": self.episode,
        }

    def runs(self) -> Any:
        return self._page(RunsPage(self._store, self._links).read)

    def run(self) -> Any:
        page = RunPage(self._store, self._links)
        charts = pn.GridBox(ncols=2, sizing_mode="stretch_width")
        plots: list[RunPlots] = []

        def draw() -> None:
            if page.curves is None:
                return
            if not plots:
                plots.append(RunPlots(page.curves.trains))
                charts.objects = [pn.pane.Bokeh(one, sizing_mode="stretch_width") for one in plots[0].figures]
            plots[0].show(page.curves)

        return self._page(page.read, charts, after=draw)

    def groups(self) -> Any:
        return self._page(lambda query: read_groups(self._store, self._links, query))

    def group(self) -> Any:
        return self._page(lambda query: read_group(self._store, self._links, group_key(query)))

    def episode(self) -> Any:
        switch = pn.widgets.RadioButtonGroup(options=COLOURS, value="by-none", button_type="light")
        return self._page(EpisodePage(self._store, self._links).read, switch=switch)

    def _page(
        self,
        read: Callable[[Query], Awaitable[Read]],
        *below: Any,
        after: Callable[[], None] | None = None,
        switch: Any = None,
    ) -> Any:
        query = arguments()
        pane = Html("", stylesheets=[style()], sizing_mode="stretch_width")
        if switch is not None:
            pane.css_classes = [switch.value]
            switch.param.watch(lambda event: pane.param.update(css_classes=[event.new]), "value")

        late = Html("", stylesheets=[style()], sizing_mode="stretch_width", margin=0)
        busy = asyncio.Lock()
        document = pn.state.curdoc

        async def refresh() -> None:
            if busy.locked():  # the first reading may take longer than the pause after it
                return
            async with busy:
                await show()

        async def show() -> None:
            def tell(seconds: float) -> None:
                late.object = fragment("late.html", self._links, seconds=round(seconds))

            found = await told_while(self._read(read, query), tell)
            late.object = ""
            if pane.object != found.html:
                pane.object = found.html
            if after is not None and pn.state.curdoc is not None:
                pn.state.curdoc.add_next_tick_callback(after)  # a chart's data changes under the document's lock only
            if not found.live:
                again.stop()

        again = pn.state.add_periodic_callback(refresh, period=EVERY_MS)
        # What an onload callback changes is sent when it ends, which may be never: the first reading is like the next.
        pn.state.onload(lambda: document.add_next_tick_callback(refresh))
        above = [] if switch is None else [switch]
        return pn.Column(*above, late, pane, *below, sizing_mode="stretch_width", margin=(5, 20))

    async def _read(self, read: Callable[[Query], Awaitable[Read]], query: Query) -> Read:
        """The page, or what to say instead of it until the next try."""
        try:
            return await read(query)
        except StoreUnreachable as error:
            return Read(fragment("message.html", self._links, message=f"{error} {_AGAIN}"), live=True)
        except StoreError as error:
            return Read(fragment("message.html", self._links, message=str(error)), live=True)
        except Exception:
            logger.exception("a page cannot be read")
            return Read(fragment("message.html", self._links, message=_ABSENT), live=True)


async def told_while(reading: Coroutine[Any, Any, Read], tell: Callable[[float], None]) -> Read:
    """What `reading` returns; meanwhile `tell` how many seconds it takes. A store that hangs raises nothing."""
    began = time.monotonic()
    task = asyncio.create_task(reading)
    try:
        while not (await asyncio.wait({task}, timeout=_SLOW_S))[0]:
            tell(time.monotonic() - began)
        return task.result()
    finally:
        task.cancel()


def arguments() -> Query:
    """The arguments of the address that the session was opened with."""
    return first_values(pn.state.session_args or {})
