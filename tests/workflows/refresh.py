"""Record the histories again and store the fingerprint: `python -m atropos.tests.workflows.refresh`.

Do it after a decision, not instead of one: where workflows in flight must survive the change, guard it by
`workflow.patched` first, check that the histories of before still replay, and only then record new ones beside them.
With `--fingerprint` only the fingerprint is stored: for a change that moves no command, as the replays show.

Recorded on a stack of its own, with paths relative to a temporary folder, so that no history names the machine.
"""

import argparse
import asyncio
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from atropos.cli.rescore import started
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import RunningStack, running_stack
from atropos.contracts.ids import EpisodeKey, evaluation_workflow_id, rollout_workflow_id, trainer_workflow_id
from atropos.contracts.rescoring import Rescoring
from atropos.environments.registry import load
from temporalio.client import WorkflowFailureError

from ..support.scripted import make_model, served, tool_call
from ..support.weights import WeightedEngine, add_weights, every_other
from ..support.world import ENVIRONMENTS, World, new_namespace
from . import fingerprint

HISTORIES = Path(__file__).with_name("histories")
_MODEL = "model"
_PROCESS = re.compile(r"^\d+@\S+$")
"""How the SDK calls a worker, and its sticky queue."""
_PLACED = [tool_call("slow", at=1) + "\n" + tool_call("far", at=2) + "\n" + tool_call("look", at=3), "nothing"]


def _looks_once(prompt: str, turn: int) -> str:
    return tool_call("look", at=turn) if turn < 1 else "nothing"


class Recorder:
    """Runs a scenario each, and keeps what Temporal says about its workflows."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _document(self, name: str, **changes: Any) -> dict[str, Any]:
        size = changes.pop("size", 1)
        environment = {"id": f"{ENVIRONMENTS.name}:{name}", "group_size": size}
        changed = {"budget": {"groups": 1}, "model": {"path": _MODEL}, **changes}
        return self._world.document(name, environment=environment, **changed)

    async def everything(self) -> None:
        sets = [{"id": "Effects", "split": "eval", "tasks": 1}]
        run = (await self._world.run(self._document("Effects", size=2, eval={"sets": sets}))).run_id
        await self._keep("run", run)
        await self._keep("rollout", rollout_workflow_id(run))
        await self._keep("evaluation", evaluation_workflow_id(run, "end-Effects-eval"))
        await self._keep("group", _group(run))
        await self._keep("episode", _episode(run))
        await self.rescored(run)

        self._world.engine.script = lambda prompt, turn: _PLACED[turn]
        run = (await self._world.run(self._document("Placed"))).run_id
        await self._keep("episode-placed", _episode(run))

        self._world.engine.script = lambda prompt, turn: f"word {turn}"
        judges = {"default": {"url": self._world.engine.url, "model": "judge"}}
        run = (await self._world.run(self._document("Judged", size=2, judges=judges))).run_id
        await self._keep("group-judged", _group(run))
        await self._keep("episode-step", _episode(run))

        lost = self._document("Faulty", budget={"groups": 1, "hours": 0.001}, group={"top_up": 1})
        run = (await self._world.run(lost)).run_id
        await self._keep("group-topped-up", _group(run))
        await self._keep("episode-failed", _episode(run))
        await self.trained()
        await self.cancelled()
        await self.refused()

    async def trained(self) -> None:
        self._world.engine.script = every_other("nothing", "something")
        sets = [{"id": "Effects", "split": "eval", "tasks": 1}]
        document = self._world.training("Effects", model={"path": _MODEL}, eval={"sets": sets, "every": 1})
        document["environments"] = [{"id": f"{ENVIRONMENTS.name}:Effects", "group_size": 2}]
        run = (await self._world.run(document)).run_id
        await self._keep("run-trained", run)
        await self._keep("trainer", trainer_workflow_id(run))
        await self._keep("rollout-trained", rollout_workflow_id(run))

    async def rescored(self, run: str) -> None:
        asked = Rescoring(run_id=run, environment="Effects", code=f"{ENVIRONMENTS.name}:Second")
        handle = await started(self._world.client, asked)
        await handle.result()
        await self._keep("rescore", handle.id)

    async def cancelled(self) -> None:
        self._world.engine.script = _looks_once
        self._world.engine.hold(1)
        handle = await self._world.start(self._document("Effects"))
        await self._world.engine.waiting.wait()
        await handle.execute_update("cancel", "enough")
        await handle.result()
        self._world.engine.release()
        for name, key in (("run", handle.id), ("group", _group(handle.id)), ("episode", _episode(handle.id))):
            await self._keep(f"{name}-cancelled", key)

    async def refused(self) -> None:
        handle = await self._world.start({**self._document("Effects"), "buget": 1})
        try:
            await handle.result()
        except WorkflowFailureError:
            await self._keep("run-refused", handle.id)

    async def _keep(self, name: str, workflow_id: str) -> None:
        handle = self._world.client.get_workflow_handle(workflow_id)
        with suppress(WorkflowFailureError):
            await handle.result()  # an abandoned child may end after its parent
        history = (await handle.fetch_history()).to_json_dict()
        document = {"workflow_id": workflow_id, **_unnamed(history)}
        (HISTORIES / f"{name}.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
        print(f"{name}: {len(history['events'])} events", file=sys.stderr)


def _unnamed(value: Any) -> Any:
    """Without what names processes and files of the machine."""
    if isinstance(value, list):
        return [_unnamed(one) for one in value]
    if isinstance(value, str):
        return _PROCESS.sub("recorder", value)
    if not isinstance(value, dict):
        return value
    return {key: "" if key == "stackTrace" else _unnamed(one) for key, one in value.items()}


def _group(run: str) -> str:
    return EpisodeKey(run_id=run, group_no=0, member=0).group.workflow_id


def _episode(run: str) -> str:
    return EpisodeKey(run_id=run, group_no=0, member=0).workflow_id


@asynccontextmanager
async def _world(stack: RunningStack) -> AsyncIterator[World]:
    assert stack.temporal_address is not None
    assert stack.database_url is not None
    client = await new_namespace(stack.temporal_address)
    async with served(WeightedEngine(Path(_MODEL), _looks_once)) as engine:
        world = World(client, stack.database_url.get_secret_value(), engine, Path("checkpoints"))
        async with world.workers():
            yield world


async def _record(stack: RunningStack) -> None:
    async with _world(stack) as world:
        await Recorder(world).everything()


def record() -> None:
    """Record every history, in a temporary folder."""
    HISTORIES.mkdir(exist_ok=True)
    for old in HISTORIES.glob("*.json"):
        old.unlink()
    home = Path(tempfile.mkdtemp(prefix="atropos-record-"))
    home.chmod(0o755)  # Postgres must get through when this runs as root
    back = Path.cwd()
    os.chdir(home)
    try:
        shutil.copy(ENVIRONMENTS, home)
        add_weights(make_model(home / _MODEL, load(f"{ENVIRONMENTS}:Placed").spec.tool_specs()))
        with running_stack(home / "stack", StackOptions(workers=False)) as stack:
            asyncio.run(_record(stack))
    finally:
        os.chdir(back)
        shutil.rmtree(home, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record workflow histories and store the fingerprint.")
    parser.add_argument("--fingerprint", action="store_true", help="store the fingerprint only")
    if not parser.parse_args().fingerprint:
        logging.disable(logging.ERROR)  # environments fail on purpose here
        record()
    fingerprint.store()
    sys.stderr.flush()
    os._exit(0)  # the SDK's runtime may crash an interpreter that is shutting down


if __name__ == "__main__":
    main()
