"""`atropos-worker`: serves workflows and activities until it is told to stop.

Invariant: a worker takes no work before everything it needs was checked (Temporal and its search attributes, the
store and its schema), and says in one sentence what is missing. Told to stop, it finishes or hands back what it has.
"""

import asyncio
import gc
import importlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr
from temporalio.client import Client
from temporalio.worker import Interceptor, Worker

from ..activities.catalogue import activities_of
from ..activities.services import Connect, Services
from ..activities.watch import STUCK_S
from ..contracts.queues import QUEUE_OF, WorkerRole
from ..db.errors import StoreError
from ..db.migrate import check
from ..db.store import open_store
from ..environments.faults import EnvironmentProblem
from ..environments.pool import ProcessPool
from ..inference.connect import connect_control, connect_engine
from ..inference.control import EngineControl
from ..inference.engines import EngineAddress
from ..inference.tokens import load_code
from ..settings import Settings, SettingsError, load_settings, mask_url, secret_from_environment
from ..trainer.problem import TrainerProblem
from ..trainer.rehearsal import rehearse
from ..workflows.plugin import WORKFLOWS
from .main import run_to_exit
from .resume import resume_runs
from .stack.addresses import resolve_addresses
from .stack.errors import StackError
from .stack.options import StackOptions
from .stack.running import running_stack
from .temporal import TemporalUnready, connect, prepare

_log = logging.getLogger("atropos.worker")
_LOCAL_SLOTS = 100
_WORKFLOW_TASKS = 40
_WORKFLOW_THREADS = 4
"""Workflow code is Python and takes no time: more threads only wait for the interpreter, and keep the loop waiting."""
_BEATS_HELD_BACK = timedelta(seconds=2)
_TRAINERS_BEATS_HELD_BACK = timedelta(seconds=1)
"""The SDK holds heartbeats back for up to four fifths of their timeout, which leaves a worker that is short of CPU too
little of it. Each is a call to the server, so others than a trainer, which does one thing at a time, send fewer."""
USER_ERRORS = (TemporalUnready, StoreError, SettingsError, StackError, EnvironmentProblem)
"""What is shown as its sentence alone."""


@dataclass(frozen=True)
class Replaced:
    """What benchmarks and fault tests put in the place of a worker's own parts."""

    connect_engine: Connect = connect_engine
    control_engine: Callable[[EngineAddress], EngineControl] = connect_control
    workflows: Sequence[type] = WORKFLOWS
    interceptors: Sequence[Interceptor] = ()
    stuck_s: float = STUCK_S


AS_IT_IS = Replaced()


def worker_of(
    role: WorkerRole, services: Services, settings: Settings, replaced: Replaced = AS_IT_IS, queue: str | None = None
) -> Worker:
    """The Temporal worker of one role, on its own queue or on one that authors of tools named."""
    slots = {
        WorkerRole.WORKFLOWS: 1,
        WorkerRole.CONTROL: settings.max_control_calls,
        WorkerRole.MODEL: settings.max_model_calls,
        WorkerRole.TOOLS: settings.max_tool_calls,
        WorkerRole.TRAINER: 1,
    }
    serves_workflows = role is WorkerRole.WORKFLOWS
    return Worker(
        services.client,
        task_queue=queue or QUEUE_OF[role],
        workflows=replaced.workflows if serves_workflows else (),
        activities=activities_of(role, services),
        interceptors=replaced.interceptors,
        no_remote_activities=serves_workflows,
        max_cached_workflows=settings.max_cached_workflows if serves_workflows else 0,
        max_concurrent_workflow_tasks=_WORKFLOW_TASKS if serves_workflows else None,
        workflow_task_executor=ThreadPoolExecutor(_WORKFLOW_THREADS, "workflow") if serves_workflows else None,
        max_concurrent_activities=slots[role],
        max_concurrent_local_activities=_LOCAL_SLOTS,
        max_heartbeat_throttle_interval=(_TRAINERS_BEATS_HELD_BACK if role is WorkerRole.TRAINER else _BEATS_HELD_BACK),
        graceful_shutdown_timeout=timedelta(seconds=settings.shutdown_grace_s),
    )


@asynccontextmanager
async def serving(
    client: Client,
    database: str,
    settings: Settings,
    roles: Sequence[WorkerRole],
    replaced: Replaced = AS_IT_IS,
    queues: Sequence[str] = (),
    stuck_s: float | None = None,
) -> AsyncIterator[Services]:
    """Check everything, then serve `roles` for the block.

    `stuck_s`: a loop held for so long ends the process, from before the first activity can hold it.
    """
    await asyncio.to_thread(check, database)
    for warning in await prepare(client):
        _log.warning("%s", warning)
    store = await open_store(database, pool_size=settings.database_pool)
    processes = ProcessPool(settings.tool_processes)
    services = Services(
        store,
        client,
        secret_from_environment,
        processes=processes,
        base=Path.cwd(),
        connect=replaced.connect_engine,
        control=replaced.control_engine,
        home=settings.home,
        trainer_threads=settings.trainer_threads,
        trainer_device=settings.trainer_device,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(services.close)
        await _code_loaded(roles)
        await services.inline.open(settings.home.expanduser().absolute() / "inline", mask_url(database))
        if stuck_s is not None:
            services.inline.end_process_when_stuck(stuck_s)
        for role in roles:
            await stack.enter_async_context(worker_of(role, services, settings, replaced))
        for queue in queues:
            await stack.enter_async_context(worker_of(WorkerRole.TOOLS, services, settings, replaced, queue))
        if WorkerRole.CONTROL in roles:
            for run_id in await resume_runs(services):
                _log.info("run %s goes on: Temporal did not know it any more", run_id)
        _log.info("serving %s", ", ".join(roles))
        yield services


async def _code_loaded(roles: Sequence[WorkerRole]) -> None:
    """Before there is work: what a dead worker left behind is to be taken up at once, and while code is imported, the
    interpreter is held, calls in hand give no sign of life and are given away."""
    gc.disable()  # code that is being loaded is no garbage: to look for some takes a fifth of the time
    try:
        if WorkerRole.MODEL in roles:
            await asyncio.to_thread(load_code)
        if WorkerRole.TRAINER in roles:
            await asyncio.to_thread(rehearse)
    except TrainerProblem as problem:
        _log.warning("no run can be trained here: %s", problem)
    finally:
        gc.enable()


async def serve(
    settings: Settings,
    roles: Sequence[WorkerRole],
    temporal: str | None,
    database: str,
    replaced: Replaced = AS_IT_IS,
    queues: Sequence[str] = (),
) -> None:
    """Serve `roles` until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    client = await connect(temporal)
    async with serving(client, database, settings, roles, replaced, queues, replaced.stuck_s):
        gc.collect()
        gc.freeze()  # what is loaded now stays: without this, every full collection walks all of it again
        if settings.ready_file is not None:
            settings.ready_file.touch()
        await stop.wait()
        _log.info("stopping: what is running has %.0f s to finish", settings.shutdown_grace_s)


def run_worker(settings: Settings, roles: Sequence[WorkerRole], queues: Sequence[str] = ()) -> None:
    """Serve with the addresses that settings, a running stack or a found server give; else embedded parts."""
    addresses = resolve_addresses(settings)
    temporal, database = addresses.temporal.value, addresses.database.value
    if temporal is not None and database is not None:
        asyncio.run(serve(settings, roles, temporal, database.get_secret_value(), queues=queues))
        return
    options = StackOptions(temporal=temporal is None, postgres=database is None, workers=False)
    missing = " and ".join(name for name, value in (("Temporal", temporal), ("Postgres", database)) if value is None)
    typer.echo(f"No {missing} configured or found: starting embedded parts in {settings.home}.", err=True)
    with running_stack(settings.home, options) as running:
        temporal = temporal or running.temporal_address
        url: SecretStr | None = database or running.database_url
        if url is None:
            raise StackError("The embedded Postgres gave no address; see its log.")
        if running.temporal_ui is not None:
            typer.echo(f"Temporal: {temporal}, pages at {running.temporal_ui}", err=True)
        asyncio.run(serve(settings, roles, temporal, url.get_secret_value(), queues=queues))


def _roles(text: str) -> list[WorkerRole]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or names == ["all"]:
        trains = find_spec("torch") is not None
        return [role for role in WorkerRole if trains or role is not WorkerRole.TRAINER]
    unknown = [name for name in names if name not in list(WorkerRole)]
    if unknown:
        raise typer.BadParameter(f"no role {unknown[0]!r}; roles are {', '.join(WorkerRole)} and all")
    return [WorkerRole(name) for name in dict.fromkeys(names)]


def command(
    roles: Annotated[
        str,
        typer.Option(
            help="Comma-separated: workflows, control, model, tools, trainer, or all (trainer: where torch is)."
        ),
    ] = "all",
    queues: Annotated[
        list[str] | None, typer.Option("--queue", help="A queue that tools name (queue=…) to serve besides.")
    ] = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="A module that registers environments; may be repeated.")
    ] = None,
) -> None:
    """Serve workflows and activities until stopped."""
    chosen = _roles(roles)
    try:
        settings = load_settings()
        logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("httpx").setLevel(max(logging.WARNING, logging.getLogger().level))  # a line a model call
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        for name in imports or ():
            importlib.import_module(name)
        run_worker(settings, chosen, queues or ())
    except USER_ERRORS as error:
        typer.echo(f"atropos-worker: {error}", err=True)
        raise typer.Exit(1) from None


def main() -> None:
    """Entry point of `atropos-worker`."""
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    program.command()(command)
    run_to_exit(program, "atropos-worker")


if __name__ == "__main__":
    main()
