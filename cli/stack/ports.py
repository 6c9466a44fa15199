"""Free TCP ports that stay free.

Invariant: chosen ports lie below the range from which the kernel draws source ports. Inside it, a client's
connection could take the port of a server that is just being restarted, or a client retrying a dead server could
be connected to itself.
"""

import random
import socket
from collections.abc import Set
from pathlib import Path

from .errors import StackError

_FIRST = 20_000
_USUAL_EPHEMERAL_START = 32_768
HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def choose_port(preferred: int | None, taken: set[int], reserved: Set[int] = frozenset()) -> int:
    """A free port: `preferred` if it is free, else a random one outside the ephemeral range; added to `taken`.

    Never one of `reserved`, which somebody else is to have.
    """
    candidates = random.sample(range(_FIRST, _ephemeral_start()), k=200)
    if preferred is not None:
        candidates.insert(0, preferred)
    for port in candidates:
        if port not in taken and port not in reserved and is_free(port):
            taken.add(port)
            return port
    raise StackError(f"No free TCP port was found on {HOST}; stop some servers and try again.")


def explicit_port(port: int, part: str, taken: set[int]) -> int:
    """The port that was asked for, or a `StackError` where something else listens on it."""
    if port in taken or not is_free(port):
        raise StackError(f"Port {port}, asked for as {part}, is already in use; name another one or leave it out.")
    taken.add(port)
    return port


def _ephemeral_start() -> int:
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        low = _USUAL_EPHEMERAL_START
    return low if low > _FIRST + 1_000 else _USUAL_EPHEMERAL_START
