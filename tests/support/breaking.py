"""A way to a server on which it dies in the middle of an answer, as one does that is killed while it sends."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

_ANSWER = 100
"""Bytes from which a chunk is an answer: frames that only keep an HTTP/2 connection going are smaller."""
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection, as the kernel does for a process that was killed."""


@dataclass
class BreakingWay:
    """Passes everything on, but each of the next `deaths` answers only in part, and resets its connection."""

    server: str
    address: str = ""
    deaths: int = 0

    async def serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        host, _, port = self.server.rpartition(":")
        server, on = await asyncio.open_connection(host, int(port))
        asking = asyncio.create_task(self._pass(client, on, cut=False))
        try:
            await self._pass(server, back, cut=True)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            for writer in (on, back):
                writer.close()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, cut: bool) -> None:
        with suppress(ConnectionError):
            while chunk := await source.read(2**16):
                dies = cut and self.deaths > 0 and len(chunk) >= _ANSWER
                target.write(chunk[: len(chunk) // 2] if dies else chunk)
                await target.drain()
                if dies:
                    self.deaths -= 1
                    target.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                    target.transport.abort()
                    return


@asynccontextmanager
async def breaking_way(server: str) -> AsyncIterator[BreakingWay]:
    """A way to `server` (`host:port`) on a free loopback port, for the block."""
    way = BreakingWay(server)
    listener = await asyncio.start_server(way.serve, "127.0.0.1", 0)
    way.address = "{}:{}".format(*listener.sockets[0].getsockname())
    try:
        yield way
    finally:
        listener.close()
