"""What activities of one process share: the store, loaded environments, renderers, engine pools, judges.

Invariant: everything cached here is immutable (a run's file, an environment's class, a tokenizer) or a connection.
What changes is read from rows each time.
"""

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from temporalio.client import Client

from ..contracts.reasons import FailureKind
from ..contracts.records import EngineRecord
from ..contracts.runfile import RunConfig
from ..contracts.states import EngineState
from ..contracts.training import WandbConfig
from ..db.engines import engines_of, versions
from ..db.runs import RunRow, get_run
from ..db.store import Store
from ..environments.loaded import LoadedEnvironment
from ..environments.pool import ProcessPool
from ..environments.registry import load
from ..inference.connect import connect_control, connect_engine
from ..inference.control import EngineControl
from ..inference.engines import EngineAddress, MessageEngine, TokenEngine
from ..inference.judge import HttpJudge
from ..inference.pool import EnginePool
from ..inference.tokens import TokenRenderer, load_renderer
from .failures import final
from .inline import InlineCode
from .memory import EpisodeMemory

if TYPE_CHECKING:
    from ..trainer.tracking import Tracker

_RUNS_KEPT = 64
_TRACKERS_END_S = 5.0
_ENGINES_READ_EVERY_S = 5.0


class Connect(Protocol):
    """Makes a client for an engine; replaced where an engine lives in the same process (benchmarks)."""

    def __call__(self, address: EngineAddress, *, vocabulary: int | None = None) -> TokenEngine | MessageEngine: ...


@dataclass
class RunServices:
    """What is known and open for one run in this process."""

    run_id: str
    config: RunConfig
    judge: HttpJudge
    environments: dict[str, LoadedEnvironment] = field(default_factory=dict)
    renderer: TokenRenderer | None = None
    labels: dict[str, int] = field(default_factory=dict)
    """Weights as engines call them → policy version."""
    pool: EnginePool[Any] | None = None
    """Of token engines or of message engines, as the run file says."""
    engines_read: float = 0.0
    """Monotonic time at which the pool was last told what the rows say."""

    async def close(self) -> None:
        await self.judge.close()
        if self.pool is not None:
            await self.pool.close()


class Services:
    """One per worker process. `secret` turns the name of an environment variable into its value."""

    def __init__(
        self,
        store: Store,
        client: Client,
        secret: Callable[[str], str | None],
        *,
        processes: ProcessPool | None = None,
        base: Path | None = None,
        connect: Connect = connect_engine,
        control: Callable[[EngineAddress], EngineControl] = connect_control,
        home: Path = Path(".atropos"),
        trainer_threads: int = 1,
        trainer_device: str = "auto",
    ) -> None:
        self.store = store
        self.client = client
        self.secret = secret
        self.processes = processes
        self.connect = connect
        self.control = control
        self.home = home
        self.trainer_threads = trainer_threads
        self.trainer_device = trainer_device
        self.memory = EpisodeMemory(store)
        self.inline = InlineCode(store)
        self._base = base
        self._trackers: dict[str, Tracker] = {}
        self._runs: OrderedDict[str, RunServices] = OrderedDict()
        self._opening = asyncio.Lock()

    async def run(self, run_id: str) -> RunServices:
        """The run's services. Raises a verdict where the store has no such run."""
        known = self._runs.get(run_id)
        if known is not None:
            return known
        async with self._opening:
            if run_id not in self._runs:
                row = await get_run(self.store, run_id)
                if row is None:
                    raise final(FailureKind.INFRASTRUCTURE, f"the store has no run {run_id}")
                self._runs[run_id] = self._open(row)
                while len(self._runs) > _RUNS_KEPT:
                    _, oldest = self._runs.popitem(last=False)
                    await oldest.close()
        return self._runs[run_id]

    def _open(self, row: RunRow) -> RunServices:
        return RunServices(row.run_id, row.config, HttpJudge(row.config.judges, self.secret))

    async def environment(self, run_id: str, label: str) -> LoadedEnvironment:
        """The run's environment of that label, loaded and started once per process."""
        run = await self.run(run_id)
        known = run.environments.get(label)
        if known is None:
            known = await self.load(run_id, run.config, label)
            await known.ready()
            run.environments[label] = known
        return known

    async def load(self, run_id: str, config: RunConfig, label: str) -> LoadedEnvironment:
        """An environment of the file of a run, which need not have a row. Raises EnvironmentProblem."""
        chosen = config.environment(label)
        return await self.load_code(run_id, label, chosen.id, chosen.args)

    async def load_code(self, run_id: str, label: str, ref: str, args: Mapping[str, Any]) -> LoadedEnvironment:
        """An environment for the sake of a run, which may know another under that label. Raises EnvironmentProblem."""
        with await self.inline.importing(run_id, label, ref):
            return load(ref, dict(args), self._base)

    async def renderer(self, run_id: str) -> TokenRenderer:
        run = await self.run(run_id)
        if run.renderer is None:
            run.renderer = await asyncio.to_thread(load_renderer, run.config.model)
        return run.renderer

    async def engines(self, run_id: str) -> EnginePool[TokenEngine]:
        """The pool of a run whose engines take tokens."""
        return await self._pool(run_id, (await self.renderer(run_id)).vocabulary)

    async def message_engines(self, run_id: str) -> EnginePool[MessageEngine]:
        """The pool of a run whose engines take messages."""
        return await self._pool(run_id, None)

    async def _pool(self, run_id: str, vocabulary: int | None) -> EnginePool[Any]:
        """The run's engine pool, told every few seconds what the store says about its engines."""
        services = await self.run(run_id)
        now = time.monotonic()
        if services.pool is not None and now - services.engines_read < _ENGINES_READ_EVERY_S:
            return services.pool
        services.engines_read = now
        records = [_worth_asking(record) for record in await engines_of(self.store, run_id)]
        if services.pool is None:
            services.pool = EnginePool(
                records, self.secret, connect=lambda address: self.connect(address, vocabulary=vocabulary)
            )
        else:
            services.pool.update(records)
        return services.pool

    async def version(self, run_id: str, label: str) -> int | None:
        """The policy version that engines call `label`; None where the run never published one so called."""
        services = await self.run(run_id)
        if label not in services.labels:
            services.labels = await versions(self.store, run_id)
        return services.labels.get(label)

    async def samples_from(self, run_id: str, label: str) -> bool:
        """Whether weights that engines call `label` are a version of the run, or may become its first."""
        if await self.version(run_id, label) is not None:
            return True
        return not (await self.run(run_id)).labels

    def tracker(self, run_id: str, config: RunConfig, wandb: WandbConfig) -> "tuple[Tracker, bool]":
        """Where the run's metrics go besides the store, and whether it was just begun in this process."""
        from ..trainer.tracking import Tracker

        known = self._trackers.get(run_id)
        if known is not None:
            return known, False
        folder = self.home / "wandb" / quote(run_id, safe="")
        document = config.model_dump(mode="json")
        self._trackers[run_id] = Tracker(folder, run_id, config.name, wandb.project, wandb.mode, document)
        return self._trackers[run_id], True

    async def close(self) -> None:
        await self.inline.close()
        for tracker in self._trackers.values():
            await asyncio.to_thread(tracker.close, _TRACKERS_END_S)
        for services in self._runs.values():
            await services.close()
        if self.processes is not None:
            await self.processes.close()
        await self.store.close()


def _worth_asking(record: EngineRecord) -> EngineRecord:
    """An engine that was down is asked again by the pool after its rest; only a drain or a quarantine stops that."""
    return dataclasses.replace(record, state=EngineState.READY) if record.state == EngineState.DOWN else record
