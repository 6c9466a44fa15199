"""A small world for workflow tests: a Temporal namespace of its own, a database of its own, workers, an engine.

Everything is real but the model's words.
"""

import tempfile
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from atropos.activities.services import Services
from atropos.cli.worker import AS_IT_IS, Replaced, serving
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.queues import WORKFLOWS, WorkerRole
from atropos.contracts.workflows import RUN_WORKFLOW, RunResult
from atropos.environments.registry import load
from atropos.settings import load_settings
from atropos.workflows.plugin import AtroposPlugin
from psycopg import sql
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client, WorkflowHandle, WorkflowHistory

from . import environments
from .fault_worker import worker_process
from .scripted import Script, ScriptedEngine, make_model, scripted_engine

ROLES = tuple(WorkerRole)
TABLES = ("groups", "episodes", "turns", "segments", "tool_calls", "scores", "evaluation_samples", "late_results")
_ROWS = sql.SQL("SELECT t::text FROM {} t WHERE run_id = %s ORDER BY 1")
HOME = Path(tempfile.gettempdir()) / "atropos-test-home"
"""Of workers in this process; they leave no file in it."""
ENVIRONMENTS = Path(environments.__file__)


async def new_namespace(address: str) -> Client:
    """A client of a namespace that nobody else uses."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    first = await Client.connect(address)
    request = RegisterNamespaceRequest(namespace=name)
    request.workflow_execution_retention_period.FromTimedelta(timedelta(days=30))
    await first.workflow_service.register_namespace(request)
    return await Client.connect(address, namespace=name, plugins=[AtroposPlugin()])


@asynccontextmanager
async def scripted_world(
    address: str, database: str, folder: Path, environment: str, script: Script
) -> AsyncIterator["World"]:
    """A world whose model, made in `folder`, knows the tools of one of the test environments and says `script`."""
    model = make_model(folder, load(f"{ENVIRONMENTS}:{environment}").spec.tool_specs())
    async with scripted_engine(model, script) as engine:
        yield World(await new_namespace(address), database, engine)


@dataclass
class World:
    """What a test needs to start runs and look at them."""

    client: Client
    database: str
    engine: ScriptedEngine
    checkpoints: Path | None = None
    settings: dict[str, Any] = field(
        default_factory=lambda: {"shutdown_grace_s": 1.0, "tool_processes": 1, "home": HOME}
    )

    @asynccontextmanager
    async def workers(
        self, roles: Sequence[WorkerRole] = ROLES, replaced: Replaced = AS_IT_IS
    ) -> AsyncIterator[Services]:
        """Workers in this process."""
        settings = load_settings(**self.settings)
        async with serving(self.client, self.database, settings, roles, replaced) as services:
            yield services

    def document(self, name: str, *, environment: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """A run file over one of the test environments: two groups of two unless changed."""
        chosen = {"id": f"{ENVIRONMENTS}:{name}", "group_size": 2, **(environment or {})}
        return {
            "name": "test",
            "model": {"path": str(self.engine.model)},
            "engines": [{"kind": "dev", "url": self.engine.url, "concurrency": 16}],
            "environments": [chosen],
            "budget": {"groups": 2},
            **changes,
        }

    def training(self, name: str, *, steps: int = 2, **changes: Any) -> dict[str, Any]:
        """A run file that trains: batches of two groups of two."""
        trainer = {"kind": "builtin", "steps": steps, "optim": {"lr": 1e-2, "warmup": 0}}
        trainer |= {"checkpoint": {"dir": str(self.checkpoints), "keep": 2}} if self.checkpoints else {}
        return self.document(
            name,
            **{
                "trainer": trainer,
                "batch": {"groups": 2},
                "publish": {"verify": "checksum"},
                "budget": {},
                **changes,
            },
        )

    def process(
        self,
        roles: Sequence[WorkerRole],
        folder: Path,
        *,
        die_around: Sequence[str] = (),
        armed: Path | None = None,
        grace_s: float = 1.0,
    ) -> AbstractAsyncContextManager[Process]:
        """Workers in a process of their own, started again whenever they die at a boundary."""
        return worker_process(
            roles,
            temporal=self.client.service_client.config.target_host,
            namespace=self.client.namespace,
            database=self.database,
            folder=folder,
            die_around=die_around,
            armed=armed,
            grace_s=grace_s,
        )

    def rows(self, run_id: str) -> dict[str, list[str]]:
        """Every row that was written for a run's episodes, as text: table → rows in order."""
        with psycopg.connect(self.database) as connection:
            return {
                table: [row[0] for row in connection.execute(_ROWS.format(sql.Identifier(table)), (run_id,))]
                for table in TABLES
            }

    async def start(self, document: Any, run_id: str | None = None) -> "WorkflowHandle[Any, RunResult]":
        return await self.client.start_workflow(
            RUN_WORKFLOW,
            document,
            id=run_id or f"run/test-{uuid.uuid4().hex[:6]}",
            task_queue=WORKFLOWS,
            result_type=RunResult,
        )

    async def run(self, document: Any) -> RunResult:
        """Start a run and wait for its end."""
        result: RunResult = await (await self.start(document)).result()
        return result

    async def history(self, key: EpisodeKey) -> WorkflowHistory:
        return await self.client.get_workflow_handle(key.workflow_id).fetch_history()
