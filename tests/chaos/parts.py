"""Everything of the fault bench that works on runs: an engine and workers, as processes that pass armed points.

`python -m atropos.tests.chaos.parts --points FOLDER --model FOLDER --engine-port PORT`; addresses come from the
environment, as for `atropos-worker`. Roles are divided as in the dev stack. The pid file of each life is in the folder
of points. Before the next life of a process the seconds in the file `NAME.rest` there pass, if there is one.

A death is noticed within three seconds also over training, so that a cell takes seconds.
"""

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import renderers  # noqa: F401 - loaded once here instead of in every life
import transformers.models.llama.modeling_llama  # noqa: F401
from atropos.cli.worker import Replaced, serve
from atropos.contracts import activities_training
from atropos.contracts.queues import WorkerRole
from atropos.settings import load_settings
from starlette.requests import Request
from starlette.responses import Response

from ..support.armed import Armed
from ..support.faults import ConnectAndDie, DieAround
from ..support.lives import supervise
from ..support.scripted import served, tool_call
from ..support.training_faults import armed
from ..support.weights import WeightedEngine

MODULE: Final = "atropos.tests.chaos.parts"
WORKERS: Final = {
    "workflows": (WorkerRole.WORKFLOWS,),
    "activities": (WorkerRole.MODEL, WorkerRole.TOOLS, WorkerRole.CONTROL),
    "trainer": (WorkerRole.TRAINER,),
}
ENGINE: Final = "engine"


def says(prompt: str, turn: int) -> str:
    """An inline tool, a scheduled one, the answer."""
    return (tool_call("look", at=turn), tool_call("reach", at=turn), "nothing")[min(turn, 2)]


@dataclass
class EngineOfPoints(WeightedEngine):
    """May die while it samples or loads."""

    points: Armed = field(kw_only=True)

    async def _generate(self, request: Request) -> Response:
        self.points.reach("generating")
        return await super()._generate(request)

    async def _reload(self, request: Request) -> Response:
        self.points.reach("reloading")
        return await super()._reload(request)


async def engine(points: Armed, model: Path, port: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    made = EngineOfPoints(model, says, points=points, delay_s=0.05, incarnation=secrets.token_hex(4))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        async with served(made, listener):
            await stop.wait()


async def worker(points: Armed, roles: tuple[WorkerRole, ...]) -> None:
    settings = load_settings()
    logging.basicConfig(level="WARNING", format="%(asctime)s %(process)d %(name)s: %(message)s")
    replaced = Replaced(
        connect_engine=ConnectAndDie(points, numbered=False),
        control_engine=armed(points.folder).control_engine,
        interceptors=[DieAround(points, numbered=False)],
    )
    assert settings.database_url is not None
    await serve(settings, roles, None, settings.database_url.get_secret_value(), replaced)


def live(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """One life, in a forked process; never returns."""
    code = 1
    try:
        asyncio.run(body())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def quick_to_notice() -> None:
    for name in ("PREPARE_TRAINING", "LEASE_BATCH", "TRAIN_STEP", "PUBLISH"):
        known = getattr(activities_training, name)
        setattr(activities_training, name, replace(known, heartbeat=timedelta(seconds=3)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", required=True, type=Path)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--engine-port", required=True, type=int)
    given = parser.parse_args()
    points = Armed(given.points)
    quick_to_notice()

    def rest_s(name: str) -> float:
        file = points.folder / f"{name}.rest"
        return float(file.read_text()) if file.exists() else 0.2

    lives = {name: partial(live, partial(worker, points, roles)) for name, roles in WORKERS.items()}
    lives[ENGINE] = partial(live, partial(engine, points, given.model, given.engine_port))
    sys.exit(supervise(lives, named=points, tolerant=True, rest_s=rest_s))


if __name__ == "__main__":
    main()
