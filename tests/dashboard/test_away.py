"""A store that goes away while a page is open."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

import pytest
from playwright.async_api import Browser

from .browser import visit
from .conftest import Serve


class Door:
    """A way to Postgres that can be shut, with everyone who has come through it thrown out."""

    def __init__(self, database: str) -> None:
        parts = urlsplit(database)
        self._host, self._port = parts.hostname or "", parts.port or 5432
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._own = free.getsockname()[1]
        names = f"{parts.username}:{parts.password}@" if parts.password else f"{parts.username}@"
        self.url = urlunsplit(parts._replace(netloc=f"{names}127.0.0.1:{self._own}"))
        self._inside: set[asyncio.StreamWriter] = set()
        self._passable = asyncio.Event()
        self._passable.set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._through, "127.0.0.1", self._own)

    async def shut(self) -> None:
        self._server.close()
        for writer in self._inside:
            writer.transport.abort()
        self._inside.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing through meanwhile, as a server does that hangs: nobody is told."""
        self._passable.clear()
        try:
            yield
        finally:
            self._passable.set()

    async def _through(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond, there = await asyncio.open_connection(self._host, self._port)
        self._inside |= {writer, there}
        await asyncio.gather(self._carry(reader, there), self._carry(beyond, writer))
        self._inside -= {writer, there}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                await self._passable.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()


@pytest.fixture
async def door(database_url: str) -> AsyncIterator[Door]:
    made = Door(database_url)
    await made.open()
    yield made
    await made.shut()


async def test_a_store_that_is_away_is_said_and_asked_again(door: Door, serve: Serve, browser: Browser) -> None:
    async with (
        serve(DATABASE_URL=door.url) as dashboard,
        visit(browser, f"{dashboard.url}/runs") as visitor,
    ):
        await visitor.shows("There are no runs yet")
        await door.shut()
        await visitor.shows("cannot be reached", "It is tried again.")
        assert str(urlsplit(door.url).password) not in (await visitor.found())["text"]
        await door.open()
        await visitor.shows("There are no runs yet")
        assert visitor.errors == []


async def test_a_store_that_hangs_is_said_and_the_page_goes_on_when_it_answers(
    door: Door, serve: Serve, browser: Browser
) -> None:
    async with (
        serve(DATABASE_URL=door.url) as dashboard,
        visit(browser, f"{dashboard.url}/runs") as before,
    ):
        await before.shows("There are no runs yet")
        with door.held():
            async with visit(browser, f"{dashboard.url}/run?id=none") as meanwhile:
                for one in (before, meanwhile):
                    await one.shows("The store has not answered for")
        async with visit(browser, f"{dashboard.url}/run?id=none") as after:
            await after.shows("There is no run called none")
            await before.page.get_by_text("The store has not answered for").wait_for(state="detached")
            assert (before.errors, after.errors) == ([], [])
