"""A tab that is closed while a page is being sent is no error; everything else that goes wrong is told as before."""

import asyncio
import gc
import logging
import socket
import struct
from collections.abc import Iterator

import pytest
from atropos.dashboard.server import TELL_OF_TABS, TOLD_OF_TABS, is_no_closed_tab
from bokeh.document import Document
from bokeh.server.views.ws import WSHandler
from panel.io.document import _WRITE_FUTURES, _run_write_futures
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application
from tornado.websocket import WebSocketClosedError, WebSocketHandler

_HELLO = (
    b"GET /ws HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_NO_GOODBYE = struct.pack("ii", 1, 0)


class Sends(WebSocketHandler):
    """Sends without looking at what came of it, as the dashboard's libraries do."""

    def open(self, *args: str, **kwargs: str) -> None:
        for _ in range(32):  # more than the buffers of a connection take
            self.write_message(bytes(2**20), binary=True)


async def close_a_tab() -> None:
    """A browser that goes away in the middle of what it is sent."""
    [listening] = bind_sockets(0, "127.0.0.1")
    server = HTTPServer(Application([("/ws", Sends)]))
    server.add_sockets([listening])
    try:
        reader, writer = await asyncio.open_connection(*listening.getsockname(), limit=2**10)
        writer.write(_HELLO)
        assert b"101" in await reader.readline()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_GOODBYE)
        writer.transport.abort()
        for _ in range(20):
            await asyncio.sleep(0.01)
            gc.collect()
    finally:
        server.stop()
        await server.close_all_connections()


async def fail_unseen() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    task = asyncio.create_task(fails())
    await asyncio.sleep(0.01)
    del task
    gc.collect()


@pytest.fixture
def filtered() -> Iterator[None]:
    for name in (*TOLD_OF_TABS, *TELL_OF_TABS):
        logging.getLogger(name).addFilter(is_no_closed_tab)
    yield
    for name in (*TOLD_OF_TABS, *TELL_OF_TABS):
        logging.getLogger(name).removeFilter(is_no_closed_tab)


def told(caplog: pytest.LogCaptureFixture) -> set[type[BaseException] | None]:
    return {record.exc_info[0] for record in caplog.records if record.exc_info}


async def test_a_closed_tab_would_be_told_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    await close_a_tab()
    assert told(caplog) == {WebSocketClosedError}


@pytest.mark.usefixtures("filtered")
async def test_a_closed_tab_is_no_error_and_other_errors_are_told(caplog: pytest.LogCaptureFixture) -> None:
    await close_a_tab()
    await fail_unseen()
    assert told(caplog) == {ZeroDivisionError}


class ToNobody:
    """A message whose tab is gone."""

    async def send(self, connection: object) -> None:
        raise WebSocketClosedError


async def say_that_a_tab_is_gone() -> None:
    """Both libraries, each in its own words."""
    await WSHandler.send_message(object(), ToNobody())
    page = Document()
    _WRITE_FUTURES[page] = [asyncio.ensure_future(ToNobody().send(None))]
    await _run_write_futures(page)


async def test_a_closed_tab_would_be_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    await say_that_a_tab_is_gone()
    assert [record.name for record in caplog.records] == list(TELL_OF_TABS)


@pytest.mark.usefixtures("filtered")
async def test_a_closed_tab_is_not_warned_about_and_other_warnings_stay(caplog: pytest.LogCaptureFixture) -> None:
    await say_that_a_tab_is_gone()
    for name in TELL_OF_TABS:
        logging.getLogger(name).warning("Failed sending message due to following error: %s", "another")
    logging.getLogger("another").warning("Failed sending message as connection was closed")
    assert [record.name for record in caplog.records] == [*TELL_OF_TABS, "another"]
