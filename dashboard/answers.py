"""How the server answers before a page is shown: 404 where the address names nothing.

Invariant: the page is the same either way, and says in words what is missing; the status is for programs and caches.
Whoever has not entered the token is told nothing about what exists. While the store does not answer nobody is told
that something is missing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from bokeh.server.urls import per_app_patterns
from panel.io.server import DocHandler

from ..db.errors import StoreError, Unknown
from ..db.store import Store
from .reading import check_named, first_values

logger = logging.getLogger(__name__)

_PATIENCE_S: Final = 5.0
"""A store that takes longer says so on the page."""
_NOT_FOUND: Final = 404


@contextmanager
def answering(store: Store) -> Iterator[None]:
    """Servers that are made in this block answer 404 for what is not in the store.

    Panel has no such hook: the handler of its pages is exchanged in the list from which a server takes its routes.
    """

    class Named(DocHandler):  # type: ignore[misc]
        async def prepare(self) -> None:
            await super().prepare()
            if self.current_user is not None and not await is_named(store, self.request.path, self.request.arguments):
                self.set_status(_NOT_FOUND)

    before = list(per_app_patterns)
    exchanged: list[Callable[..., Any]] = [Named if handler is DocHandler else handler for _, handler in before]
    per_app_patterns[:] = [(route, handler) for (route, _), handler in zip(before, exchanged, strict=True)]
    try:
        yield
    finally:
        per_app_patterns[:] = before


async def is_named(store: Store, path: str, arguments: dict[str, list[bytes]]) -> bool:
    """Whether there is what a page is asked for; true as well where that cannot be said now."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await check_named(store, path.rstrip("/"), first_values(arguments))
    except Unknown:
        return False
    except (StoreError, TimeoutError) as error:
        logger.debug("not known whether %s names something: %s", path, error)
    return True
