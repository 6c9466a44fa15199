"""A worker whose model calls take a while longer: the engine is the real one, and the wait costs no CPU."""

import argparse
import asyncio
import os
import sys

from atropos.cli.worker import Replaced, serve
from atropos.contracts.queues import WorkerRole
from atropos.inference.engines import Completion, EngineAddress, Progress, SampleRequest, TokenEngine
from atropos.inference.vllm import VllmEngine
from atropos.settings import load_settings


class SleepingEngine(VllmEngine):
    """A real engine, each completion `model_s` seconds later."""

    def __init__(self, address: EngineAddress, vocabulary: int | None, model_s: float) -> None:
        super().__init__(address, vocabulary=vocabulary)
        self._model_s = model_s

    async def sample(self, request: SampleRequest, progress: Progress | None = None) -> Completion:
        await asyncio.sleep(self._model_s)
        return await super().sample(request, progress)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--roles", required=True)
    parser.add_argument("--temporal", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--model-s", type=float, required=True)
    given = parser.parse_args()

    def connect(address: EngineAddress, *, vocabulary: int | None = None) -> TokenEngine:
        return SleepingEngine(address, vocabulary, given.model_s)

    roles = [WorkerRole(name) for name in given.roles.split(",")]
    settings = load_settings(shutdown_grace_s=1.0)
    asyncio.run(serve(settings, roles, given.temporal, given.database, Replaced(connect_engine=connect)))


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stdout.flush()
        os._exit(0 if sys.exc_info()[0] is None else 1)
