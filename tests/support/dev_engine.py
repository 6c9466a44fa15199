"""A small dev engine as a process that a test may kill, and start again where it was."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atropos.tests.inference.engine.conftest import Running, engine_process


@contextmanager
def dev_engine(model: Path, journal: Path, port: int = 0) -> Iterator[Running]:
    small = ["--port", str(port), "--max-model-len", "512", "--max-num-seqs", "4", "--kv-cache-mb", "16"]
    with engine_process(model, journal, *small, "--threads", "1") as running:
        yield running


def free_port() -> int:
    """One that an engine can have, and have again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
