"""A run that trains on groups which are there from the start, the same for every run, and an engine to publish to.

Everything is real but the rollouts: there are none, since the groups are all that the steps need.
"""

import math
import os
import random
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from atropos.contracts.ids import GroupKey, weight_label
from atropos.contracts.messages import assistant, user
from atropos.contracts.queues import WORKFLOWS, WorkerRole
from atropos.contracts.reasons import FinishReason, StopReason
from atropos.contracts.records import EpisodeStart, NewGroup, TurnRecord, VersionSpan
from atropos.contracts.runfile import parse_run
from atropos.contracts.states import GroupState
from atropos.contracts.workflows import RUN_WORKFLOW, RunResult
from atropos.db.admission import AdmissionState, admit
from atropos.db.endings import finish_episode
from atropos.db.episodes import save_turn, start_episode
from atropos.db.groups import close_group
from atropos.db.runs import NewEnvironment, create_run
from atropos.db.store import Store, open_store
from atropos.environments.registry import load
from temporalio.client import Client, WorkflowHandle

from .armed import Armed
from .fault_worker import worker_process
from .world import ENVIRONMENTS

BATCH, MEMBERS = 2, 2
KEPT = 2


@dataclass
class Prefilled:
    """Where such runs take place."""

    client: Client
    database: str
    store: Store
    model: Path
    engines: Sequence[str]
    folder: Path
    vocabulary: int

    def __post_init__(self) -> None:
        (self.folder / "armed").mkdir(exist_ok=True)

    @property
    def points(self) -> Armed:
        return Armed(self.folder / "armed")

    def worker(self, name: str, roles: Sequence[WorkerRole]) -> AbstractAsyncContextManager[Process]:
        """A worker process that dies where it is told to, and is started again."""
        folder = self.folder / name
        folder.mkdir()
        return worker_process(
            roles,
            temporal=self.client.service_client.config.target_host,
            namespace=self.client.namespace,
            database=self.database,
            folder=folder,
            armed=self.points.folder,
        )

    async def start(self, steps: int) -> "WorkflowHandle[Any, RunResult]":
        """Start a run whose store holds the groups for all its steps."""
        run_id = f"run/filled-{uuid.uuid4().hex[:6]}"
        document = {
            "name": "filled",
            "model": {"path": str(self.model)},
            "engines": [{"kind": "dev", "url": url, "concurrency": 4} for url in self.engines],
            "environments": [{"id": f"{ENVIRONMENTS}:Effects", "group_size": MEMBERS}],
            "batch": {"groups": BATCH},
            "staleness": {"max": 64},
            "trainer": {
                "kind": "builtin",
                "steps": steps,
                "optim": {"lr": 1e-2, "warmup": 0},
                "checkpoint": {"dir": str(self.folder / "checkpoints"), "keep": KEPT},
            },
        }
        await self._fill(run_id, document, steps * BATCH)
        return await self.client.start_workflow(
            RUN_WORKFLOW, document, id=run_id, task_queue=WORKFLOWS, result_type=RunResult
        )

    async def _fill(self, run_id: str, document: dict[str, Any], count: int) -> None:
        config = parse_run(document)
        [chosen] = config.environments
        loaded = load(chosen.id, {}, None)
        limits = loaded.spec.limits.tightened(chosen.limits)
        row = NewEnvironment(chosen.label, chosen.id, loaded.spec.version, {}, MEMBERS, 1.0, limits)
        await create_run(self.store, run_id, config, [row])

        async def propose(state: AdmissionState) -> list[NewGroup]:
            return [
                NewGroup(chosen.label, "train", f"task-{draw}", {"at": draw}, {}, draw, MEMBERS)
                for draw in range(count)
            ]

        for group in await admit(self.store, run_id, propose):
            await self._play(group.key, loaded.spec.version)

    async def _play(self, group: GroupKey, version: str) -> None:
        """Two turns a member, the same for the group of the same number in every run."""
        members = [group.episode(member) for member in range(MEMBERS)]
        for key in members:
            rng = random.Random(f"{key.group_no}/{key.member}")
            await start_episode(self.store, EpisodeStart(key, (user("?"),), {}, version))
            for index in range(2):
                said = [rng.randrange(self.vocabulary) for _ in range(rng.randint(3, 9))]
                record = TurnRecord(
                    turn=index,
                    segment=0,
                    opens_segment=index == 0,
                    message=assistant("…"),
                    prompt_delta=[rng.randrange(self.vocabulary) for _ in range(4)],
                    sampled=said,
                    logprobs=[-math.log(self.vocabulary) + rng.uniform(-0.1, 0.1) for _ in said],
                    mask=[1] * len(said),
                    finish=FinishReason.STOP,
                    spans=(VersionSpan(weight_label(key.run_id, 0), 0, 0, len(said)),),
                    temperature=1.0,
                    engine_id="before",
                    incarnation="first",
                    request_id=f"{index}",
                )
                await save_turn(self.store, key, record)
            await finish_episode(
                self.store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=float(key.member)
            )
        await close_group(self.store, group, members, GroupState.SEALED, None, None)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database) as connection:
            return connection.execute(query.encode(), values).fetchall()

    def digests(self, run_id: str) -> list[str]:
        """What names the content of each checkpoint, in order of the versions that steps made."""
        query = "SELECT digest FROM policy_versions WHERE run_id = %s AND version > 0 ORDER BY version"
        return [digest for (digest,) in self.rows(query, run_id)]

    def files(self, run_id: str) -> set[str]:
        """Whatever is in the run's folder of checkpoints."""
        [(path,)] = self.rows(
            "SELECT path FROM policy_versions WHERE run_id = %s ORDER BY version DESC LIMIT 1", run_id
        )
        return set(os.listdir(Path(path).parent))

    def kept(self, run_id: str) -> set[str]:
        """What should be there: the newest checkpoints."""
        query = "SELECT path FROM policy_versions WHERE run_id = %s AND version > 0 ORDER BY version DESC LIMIT %s"
        return {Path(path).name for (path,) in self.rows(query, run_id, KEPT)}

    def committed(self, run_id: str) -> int:
        [(steps,)] = self.rows("SELECT count(*) FROM train_steps WHERE run_id = %s", run_id)
        return int(steps)


@asynccontextmanager
async def prefilled(
    client: Client, database: str, model: Path, engines: Sequence[str], folder: Path, vocabulary: int
) -> AsyncIterator[Prefilled]:
    store = await open_store(database)
    try:
        yield Prefilled(client, database, store, model, engines, folder, vocabulary)
    finally:
        await store.close()
