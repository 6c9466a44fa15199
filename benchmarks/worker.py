"""A worker of the episode benchmark: the product's own, with an engine that has no model.

`--variant` chooses the workflows: `product`, `every_step` (each step scheduled) or `bare` (no rows).
"""

import argparse
import asyncio
import os
import sys
from functools import cache
from pathlib import Path

from atropos.cli.temporal import connect
from atropos.cli.worker import Replaced, serve
from atropos.contracts.queues import WorkerRole
from atropos.inference.engines import EngineAddress, TokenEngine
from atropos.settings import load_settings
from atropos.workflows.plugin import WORKFLOWS
from temporalio.worker import Worker
from transformers import PreTrainedTokenizerFast

from . import bare
from .fake_engine import FakeEngine


async def serve_bare(address: str, roles: list[WorkerRole], ready: Path, bodies: bare.Bodies) -> None:
    client = await connect(address)
    model = WorkerRole.MODEL in roles
    worker = Worker(
        client,
        task_queue=bare.MODEL_QUEUE if model else bare.QUEUE,
        workflows=() if model else (bare.BareGroup, bare.BareEpisode),
        activities=(bodies.bare_model,) if model else (bodies.bare_tool, bodies.bare_mark),
        max_concurrent_activities=128,
        no_remote_activities=not model,
    )
    async with worker:
        ready.touch()
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=("product", "every_step", "bare"), required=True)
    parser.add_argument("--roles", required=True)
    parser.add_argument("--temporal", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-s", type=float, default=0.0)
    parser.add_argument(
        "--tool-s", type=float, default=0.0, help="of the bare variant; the others have it in their run"
    )
    given = parser.parse_args()
    roles = [WorkerRole(name) for name in given.roles.split(",")]
    settings = load_settings(shutdown_grace_s=1.0)
    if given.variant == "bare":
        if settings.ready_file is None:
            sys.exit("ATROPOS_READY_FILE names no file")
        bodies = bare.Bodies(given.model_s, given.tool_s)
        asyncio.run(serve_bare(given.temporal, roles, settings.ready_file, bodies))
        return
    workflows = list(WORKFLOWS)
    if given.variant == "every_step":
        from . import every_step

        workflows[2:4] = [every_step.EveryStepGroup, every_step.EveryStepEpisode]

    @cache
    def tokenizer() -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast.from_pretrained(given.model)

    def connect_fake(address: EngineAddress, *, vocabulary: int | None = None) -> TokenEngine:
        return FakeEngine(address, tokenizer(), given.model_s)

    replaced = Replaced(connect_engine=connect_fake, workflows=workflows)
    asyncio.run(serve(settings, roles, given.temporal, given.database, replaced))


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stdout.flush()
        os._exit(0 if sys.exc_info()[0] is None else 1)
