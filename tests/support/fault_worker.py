"""A worker in a process of its own that dies at boundaries and is started again at once, as under a supervisor.

`python -m atropos.tests.support.fault_worker --roles … [--boundaries FOLDER --die-around NAMES]`; addresses come from
the environment, as for `atropos-worker`. The supervisor imports everything and forks a worker for each life, so that a
life begins in a moment. It ends when it is told to (SIGTERM, passed on), when a life ends by anything but SIGKILL
or an environment's own `ABRUPT`, or when its parent is gone.

`worker_process` is the other side: start one from a test.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType

import renderers  # noqa: F401 - loaded once here instead of in every life
from atropos.cli.worker import Replaced, serve
from atropos.contracts.queues import WorkerRole
from atropos.settings import child_environment, load_settings

from .boundaries import ABRUPT, Boundaries
from .faults import ConnectAndDie, DieAround

_LOOK_S = 0.02
_STOPS_WITHIN_S = 30.0
MODULE = "atropos.tests.support.fault_worker"
LIVES = 100
"""A worker that needs more is not walking through boundaries any more."""
ENDED_ABRUPTLY = "a life was ended by code of an environment"
"""Said in the log for each."""


def _live(roles: Sequence[WorkerRole], boundaries: Path | None, names: Sequence[str]) -> None:
    """Serve until told to stop, in a forked process; never returns."""
    code = 1
    try:
        settings = load_settings()
        logging.basicConfig(level=settings.log_level, format="%(asctime)s %(process)d %(name)s: %(message)s")
        replaced = Replaced()
        if boundaries is not None:
            folder = Boundaries(boundaries)
            replaced = Replaced(connect_engine=ConnectAndDie(folder), interceptors=[DieAround(folder, names)])
        assert settings.database_url is not None
        asyncio.run(serve(settings, roles, None, settings.database_url.get_secret_value(), replaced))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _supervise(roles: Sequence[WorkerRole], boundaries: Path | None, names: Sequence[str]) -> int:
    """One life after another. Returns the exit code."""
    parent = os.getppid()
    child = 0
    stopping = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        if child:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    for _ in range(LIVES):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _live(roles, boundaries, names)
        code = os.waitstatus_to_exitcode(_wait(child, parent))
        if stopping and code in (0, -signal.SIGTERM, -signal.SIGKILL):
            return 0
        if code == ABRUPT:
            print(ENDED_ABRUPTLY, file=sys.stderr, flush=True)
        elif code != -signal.SIGKILL:
            print(f"a life ended with {code}", file=sys.stderr)
            return 1
    print(f"died {LIVES} times", file=sys.stderr)
    return 1


def _wait(child: int, parent: int) -> int:
    """The child's wait status; the child is killed when our own parent is gone."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if os.getppid() != parent:
            os.kill(child, signal.SIGKILL)
            os._exit(1)
        time.sleep(_LOOK_S)


@asynccontextmanager
async def worker_process(
    roles: Sequence[WorkerRole],
    *,
    temporal: str,
    namespace: str,
    database: str,
    folder: Path,
    die_around: Sequence[str] = (),
    grace_s: float = 1.0,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The worker as a process for the block, stopped by SIGTERM at its end; its log is `folder`/log.

    It dies at the boundaries of `die_around` (made in `folder`/boundaries), if any are named.
    Raises AssertionError with the log where it ended by itself or badly.
    """
    variables = {
        "TEMPORAL_ADDRESS": temporal,
        "TEMPORAL_NAMESPACE": namespace,
        "DATABASE_URL": database,
        "ATROPOS_SHUTDOWN_GRACE_S": str(grace_s),
        "ATROPOS_TOOL_PROCESSES": "1",
        "ATROPOS_HOME": str(folder / "home"),
        "ATROPOS_READY_FILE": str(folder / "ready"),
    }
    arguments = ["--roles", ",".join(roles)]
    if die_around:
        (folder / "boundaries").mkdir(exist_ok=True)
        arguments += ["--boundaries", str(folder / "boundaries"), "--die-around", ",".join(die_around)]
    with (folder / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, *arguments),
            env=child_environment(variables, inherit=True),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            code = await asyncio.wait_for(process.wait(), _STOPS_WITHIN_S)
        except TimeoutError:
            process.kill()
            code = await process.wait()
    assert code == 0, f"the worker ended with {code}:\n{(folder / 'log').read_text()[-4000:]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--roles", required=True, type=lambda text: [WorkerRole(name) for name in text.split(",")])
    parser.add_argument("--boundaries", type=Path)
    parser.add_argument("--die-around", default="", type=lambda text: text.split(","))
    chosen = parser.parse_args()
    sys.exit(_supervise(chosen.roles, chosen.boundaries, chosen.die_around))


if __name__ == "__main__":
    main()
