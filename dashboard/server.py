"""Serving the dashboard: the web server, who may see it, and whether it is well.

Invariant: nobody but the owner of a token reads a page where the server can be reached from elsewhere; without a token
it listens on loopback only, and a page of another site cannot open its data channel (websocket origins).
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import signal
from collections.abc import Callable
from typing import Any, Final

import panel as pn
from bokeh.server.auth_provider import AuthProvider
from tornado.ioloop import IOLoop
from tornado.web import RedirectHandler, RequestHandler
from tornado.websocket import WebSocketClosedError

from ..db.store import Store
from .answers import answering
from .html import ServedLinks, document, fragment
from .pages import Pages

TITLES: Final = {
    "/runs": "Atropos: runs",
    "/run": "Atropos: run",
    "/groups": "Atropos: groups",
    "/group": "Atropos: group",
    "/episode": "Atropos: episode",
}
_COOKIE: Final = "atropos-dashboard"
_HOLDER: Final = "holder of the token"
TOLD_OF_TABS: Final = ("asyncio", "tornado.application", "tornado.general", "bokeh.server.protocol_handler")
"""Loggers that are told of a message that could not be sent: to whoever looks after a task, a callback or a session."""
TELL_OF_TABS: Final = ("bokeh.server.views.ws", "panel.io.document")
"""Loggers that say it in words of their own."""
_CLOSED: Final = "Failed sending message as connection was closed"
_PATIENCE_S: Final = 1.0
"""After a wrong token."""


def is_loopback(address: str) -> bool:
    """Whether only programs of this machine can reach what listens there."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


async def serve(
    store: Store,
    links: ServedLinks,
    *,
    address: str,
    port: int,
    token: str | None = None,
    started: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. `started` is told the port. Raises OSError where it is taken."""
    pn.extension()
    for name in (*TOLD_OF_TABS, *TELL_OF_TABS):
        logging.getLogger(name).addFilter(is_no_closed_tab)
    server = _server(store, links, address, port, token)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    server.start()
    try:
        if started is not None:
            started(server.port)
        await stopped.wait()
    finally:
        server.stop()


def is_no_closed_tab(record: logging.LogRecord) -> bool:
    """Whether it is worth a line: a person who closes a tab while a page is being sent is no error of anybody's."""
    if record.exc_info is not None and isinstance(record.exc_info[1], WebSocketClosedError):
        return False
    return not (record.name in TELL_OF_TABS and record.msg == _CLOSED)


def _server(store: Store, links: ServedLinks, address: str, port: int, token: str | None) -> Any:
    if token is None and not is_loopback(address):
        raise ValueError("a dashboard that others can reach needs a token")
    own = [f"{name}:{port}" for name in ("localhost", "127.0.0.1", f"[{address}]" if ":" in address else address)]
    with answering(store):
        return pn.io.server.get_server(
            Pages(store, links).routes(),
            address=address,
            port=port,
            loop=IOLoop.current(),
            title=TITLES,
            # With a token the cookie is not sent from pages of other sites; without one only our own names may connect.
            websocket_origin=own if token is None else ["*"],
            extra_patterns=[(r"/health", Health), (r"/", RedirectHandler, {"url": "/runs", "permanent": False})],
            **({} if token is None else {"auth_provider": TokenHolders(token)}),
        )


class Health(RequestHandler):
    """Answers whoever asks whether the server is there; says nothing about runs."""

    def get(self) -> None:
        self.write("ok")


class TokenHolders(AuthProvider):  # type: ignore[misc]
    """Lets in who has entered the token, or sends it as a bearer token."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._ticket = hashlib.sha256(f"atropos dashboard {token}".encode()).hexdigest()
        super().__init__()

    @property
    def get_user(self) -> Callable[[Any], str | None]:
        def user(handler: Any) -> str | None:
            held = handler.get_cookie(_COOKIE) or ""
            sent = handler.request.headers.get("Authorization", "").removeprefix("Bearer ")
            sent = sent.encode("latin-1", "replace").decode("utf-8", "replace")  # as it was before Tornado decoded it
            known = same(held, self._ticket) or same(sent, self._token)
            return _HOLDER if known else None

        return user

    @property
    def login_url(self) -> str:
        return "/login"

    @property
    def login_handler(self) -> type[RequestHandler]:
        token, ticket = self._token, self._ticket

        class Login(RequestHandler):
            def get(self) -> None:
                self.write(_login_page(refused=False))

            async def post(self) -> None:
                # Not `get_body_argument`, which writes what it cannot decode to the log.
                entered = self.request.body_arguments.get("token", [b""])[-1].decode("utf-8", "replace")
                if not same(entered.strip(), token.strip()):
                    await asyncio.sleep(_PATIENCE_S)
                    self.set_status(403)
                    self.write(_login_page(refused=True))
                    return
                self.set_cookie(_COOKIE, ticket, httponly=True, samesite="Strict", path="/")
                self.redirect("/runs")

        return Login


def same(one: str, other: str) -> bool:
    """Equality that takes as long for a near miss as for a far one."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


def _login_page(*, refused: bool) -> str:
    return document("Atropos", fragment("login.html", ServedLinks(), refused=refused))
