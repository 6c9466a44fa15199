"""A worker in a process of its own that dies at boundaries and is started again at once, as under a supervisor.

`python -m atropos.tests.support.fault_worker --roles … [--boundaries FOLDER --die-around NAMES] [--armed FOLDER]
[--stuck-s SECONDS]`; addresses come from the environment, as for `atropos-worker`. It ends when it is told to (SIGTERM,
passed on), when a life ends by anything but SIGKILL or an environment's own `ABRUPT`, or when its parent is gone. Where
a life may end itself because it is stuck, however it ends is followed by another.

`worker_process` is the other side: start one from a test.
"""

import argparse
import asyncio
import dataclasses
import logging
import os
import sys
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import renderers  # noqa: F401 - loaded once here instead of in every life
from atropos.cli.worker import Replaced, serve
from atropos.contracts.queues import WorkerRole
from atropos.settings import child_environment, load_settings

from .boundaries import Boundaries
from .faults import ConnectAndDie, DieAround
from .lives import supervise, supervised

MODULE = "atropos.tests.support.fault_worker"


def _live(roles: Sequence[WorkerRole], boundaries: Path | None, names: Sequence[str], replaced: Replaced) -> None:
    """Serve until told to stop, in a forked process; never returns."""
    code = 1
    try:
        settings = load_settings()
        logging.basicConfig(level=settings.log_level, format="%(asctime)s %(process)d %(name)s: %(message)s")
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


@asynccontextmanager
async def worker_process(
    roles: Sequence[WorkerRole],
    *,
    temporal: str,
    namespace: str,
    database: str,
    folder: Path,
    die_around: Sequence[str] = (),
    armed: Path | None = None,
    stuck_s: float | None = None,
    grace_s: float = 1.0,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The worker as a process for the block, stopped by SIGTERM at its end; its log is `folder`/log.

    `stuck_s`: a life whose loop is held for so long ends itself, and any death is followed by another life. It dies at
    the boundaries of `die_around` (made in `folder`/boundaries), if any are named, and at the points of
    training that are armed in the folder `armed`.
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
    if armed is not None:
        arguments += ["--armed", str(armed)]
    if stuck_s is not None:
        arguments += ["--stuck-s", str(stuck_s)]
    env = child_environment(variables, inherit=True)
    async with supervised(MODULE, arguments, folder / "log", env) as process:
        yield process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--roles", required=True, type=lambda text: [WorkerRole(name) for name in text.split(",")])
    parser.add_argument("--boundaries", type=Path)
    parser.add_argument("--die-around", default="", type=lambda text: text.split(","))
    parser.add_argument("--armed", type=Path, help="folder of points of training that tests arm")
    parser.add_argument("--stuck-s", type=float, help="end a life whose loop is held for so long")
    chosen = parser.parse_args()
    replaced = Replaced() if chosen.armed is None else _training_faults(chosen.armed)
    if chosen.stuck_s is not None:
        replaced = dataclasses.replace(replaced, stuck_s=chosen.stuck_s)
    life = partial(_live, chosen.roles, chosen.boundaries, chosen.die_around, replaced)
    sys.exit(supervise({"worker": life}, tolerant=chosen.stuck_s is not None))


def _training_faults(folder: Path) -> Replaced:
    """Loads torch and the model's code, too, once for all lives."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from .training_faults import armed

    return armed(folder)


if __name__ == "__main__":
    main()
