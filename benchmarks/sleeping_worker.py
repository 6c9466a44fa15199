"""A worker whose model calls take a while longer: the engine is the real one, and the wait costs no CPU."""

import argparse
import asyncio
import os
import sys

from atropos.cli.worker import Replaced, serve
from atropos.contracts.queues import WorkerRole
from atropos.inference.engines import Completion, Engine, EngineAddress, Progress, SampleRequest, WeightInfo
from atropos.inference.vllm import VllmEngine
from atropos.settings import load_settings


class SleepingEngine:
    """A real engine, each completion `model_s` seconds later."""

    def __init__(self, engine: VllmEngine, model_s: float) -> None:
        self.engine_id = engine.engine_id
        self._engine = engine
        self._model_s = model_s

    async def sample(self, request: SampleRequest, progress: Progress | None = None) -> Completion:
        await asyncio.sleep(self._model_s)
        return await self._engine.sample(request, progress)

    async def health(self) -> None:
        await self._engine.health()

    async def weight_info(self) -> WeightInfo:
        return await self._engine.weight_info()

    async def context_limit(self) -> int | None:
        return await self._engine.context_limit()

    async def close(self) -> None:
        await self._engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--roles", required=True)
    parser.add_argument("--temporal", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--model-s", type=float, required=True)
    given = parser.parse_args()

    def connect(address: EngineAddress, *, vocabulary: int | None = None) -> Engine:
        return SleepingEngine(VllmEngine(address, vocabulary=vocabulary), given.model_s)

    roles = [WorkerRole(name) for name in given.roles.split(",")]
    settings = load_settings(shutdown_grace_s=1.0)
    asyncio.run(serve(settings, roles, given.temporal, given.database, Replaced(connect_engine=connect)))


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stdout.flush()
        os._exit(0 if sys.exc_info()[0] is None else 1)
