"""Train steps: lease a batch, step, write a checkpoint, commit.

Invariant: a step begins from the newest committed version, whatever this process remembers: memory that is not it is
thrown away and restored from its checkpoint. What was computed counts only once it is committed under the newest
fence; a trainer that lost removes its files and forgets its weights.
"""

import asyncio
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from temporalio import activity

from ..contracts.activities import RunRef
from ..contracts.activities_training import (
    LEASE_BATCH,
    PREPARE_TRAINING,
    TRAIN_STEP,
    BatchRef,
    Lease,
    StepResult,
    TrainingPlan,
)
from ..contracts.ids import weight_label
from ..contracts.messages import user
from ..contracts.reasons import FailureKind
from ..contracts.runfile import RunConfig, evaluated_version
from ..contracts.states import EvaluationState, is_live
from ..contracts.training import SampleGroup, TrainerKind
from ..db.batches import (
    Claim,
    Head,
    Leased,
    StepRow,
    Waiting,
    claim_batch,
    commit_step,
    committed_steps,
    lease_batch,
    live_checkpoints,
    read_head,
    train_steps,
)
from ..db.errors import Unknown
from ..db.evaluations import list_evaluations
from ..db.publishing import add_first_version
from ..db.runs import run_state
from ..db.samples import read_batch
from ..db.store import Store
from ..trainer import checkpoint
from ..trainer.learner import Learner
from ..trainer.problem import TrainerProblem
from .admission import rollouts_over
from .entry import entered
from .failures import final, waited_out
from .services import Services

_log = logging.getLogger("atropos.trainer")
_LEASE_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.3
_PROBES: Final = 8
_PROBE_TOKENS: Final = 256
"""Of each sequence of a probe: hundreds of tokens in all, which is power enough."""

T = TypeVar("T")


class LeaseActivities:
    """Activities of the `control` role."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=LEASE_BATCH.name)
    @entered
    async def lease_batch(self, request: RunRef) -> Lease:
        store, run_id, started = self._services.store, request.run_id, time.monotonic()
        while True:
            state = await run_state(store, run_id)
            if state is None or not is_live(state):
                return Lease(done=True)
            config = (await self._services.run(run_id)).config
            if config.trainer.kind is TrainerKind.EXTERNAL:
                step, waiting = await committed_steps(store, run_id), "steps are taken elsewhere"
            else:
                found = await lease_batch(store, run_id, config)
                if isinstance(found, Leased):
                    return Lease(batch_no=found.batch_no, step=found.step, groups=found.groups)
                step, waiting = found.committed, _waits_for(found)
            if step >= config.trainer.steps or await rollouts_over(store, run_id, config):
                unfinished = await _between_steps(store, run_id)
                if not unfinished:
                    return Lease(done=True)
                waiting = f"the evaluation {unfinished[0]} has not ended"
            if time.monotonic() - started >= _LEASE_S:
                return Lease(step=step, waiting_for=waiting)
            await asyncio.sleep(_LOOK_EVERY_S)


class TrainingActivities:
    """Activities of the `trainer` role: one run's weights in memory at a time, one thing done with them at a time."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._busy = asyncio.Lock()
        self._learner: Learner | None = None
        self._run_id: str | None = None

    @activity.defn(name=PREPARE_TRAINING.name)
    @entered
    async def prepare_training(self, request: RunRef) -> TrainingPlan:
        run_id, store = request.run_id, self._services.store
        async with self._busy:
            try:
                head = await read_head(store, run_id)
            except Unknown:
                head = await self._begin(run_id)
            await _in_thread(_sweep, self._folder(run_id, (await self._services.run(run_id)).config))
        return TrainingPlan(version=head.version, evaluations=tuple(await _between_steps(store, run_id)))

    async def _begin(self, run_id: str) -> Head:
        """Load what the run begins with and write it down as version 0."""
        config = (await self._services.run(run_id)).config
        initial = Path(config.model.path).absolute()
        if config.model.init_from is not None:
            initial = self._folder(run_id, config) / "version-000000"
            await _in_thread(_copy_weights, Path(config.model.init_from), initial)
        learner = await self._load(run_id, config, Head(0, str(initial), None))
        sequences = await self._prompts(run_id, config)
        logprobs = await _in_thread(lambda: learner.logprobs(sequences))
        probe = {
            "sequences": sequences,
            "before": logprobs,
            "after": logprobs,
            "checksums": await _in_thread(learner.checksums),
        }
        label = weight_label(run_id, 0)
        return await add_first_version(self._services.store, run_id, label, str(initial), None, probe)

    async def _prompts(self, run_id: str, config: RunConfig) -> list[list[int]]:
        """Short prompts in the run's chat format: tokens to compare before anything was sampled."""
        renderer = await self._services.renderer(run_id)
        context = config.model.context or renderer.context_limit or 2**31
        longest = min(_PROBE_TOKENS, context - 1)  # the engine samples a token behind it
        out = []
        for number in range(_PROBES):
            chosen = config.environments[number % len(config.environments)]
            tools = (await self._services.environment(run_id, chosen.label)).spec.tool_specs()
            out.append(renderer.open([user(f"What comes after {number}?")], tools)[:longest])
        return out

    @activity.defn(name=TRAIN_STEP.name)
    @entered
    async def train_step(self, request: BatchRef) -> StepResult:
        run_id, store = request.run_id, self._services.store
        owner = f"{socket.gethostname()}/{os.getpid()}"
        async with self._busy:
            claim = await claim_batch(store, run_id, request.batch_no, owner)
            if claim is None:
                return StepResult(step=await committed_steps(store, run_id), version=None)
            config = (await self._services.run(run_id)).config
            done = await self._done(run_id, claim) or await self._step(run_id, config, claim)
            if done is None:
                raise waited_out("FencedOff", f"batch {request.batch_no} of {run_id} was taken over or abandoned")
            await self._track(run_id, config, done.step)
        return StepResult(
            step=done.step,
            version=done.version,
            loss=done.metrics.get("loss"),
            reward=done.metrics.get("reward_mean"),
            evaluations=tuple(config.evaluations(done.version)),
        )

    async def _done(self, run_id: str, claim: Claim) -> StepRow | None:
        if not claim.committed:
            return None
        return (await train_steps(self._services.store, run_id, since=claim.step))[0]

    async def _step(self, run_id: str, config: RunConfig, claim: Claim) -> StepRow | None:
        """Take the step and commit it; None where another trainer took the batch meanwhile, or a person gave it up."""
        store = self._services.store
        learner = await self._at_head(run_id, config)
        self._learner = None  # until it is committed, memory is no version: whatever goes wrong, it is loaded again
        groups = await read_batch(store, run_id, claim.batch_no, config.trainer.scores)
        sequences = _probe_sequences(groups)
        before = await _in_thread(lambda: learner.logprobs(sequences))
        try:
            outcome = await _in_thread(lambda: learner.step(groups))
        except TrainerProblem as problem:
            raise final(FailureKind.INFRASTRUCTURE, f"step {claim.step} cannot be taken: {problem}") from None
        after = await _in_thread(lambda: learner.logprobs(sequences))
        folder = self._folder(run_id, config) / f"version-{claim.step + 1:06d}-fence-{claim.fence}"
        digest = await _in_thread(lambda: learner.save(folder))
        checksums = await _in_thread(learner.checksums)
        probe = {"sequences": sequences, "before": before, "after": after, "checksums": checksums}
        row = await commit_step(
            store,
            run_id,
            claim,
            path=str(folder),
            digest=digest,
            metrics=_metrics(outcome.metrics, claim),
            probe=probe,
        )
        if row is None:
            await _in_thread(lambda: checkpoint.remove(folder))
            return None
        self._learner = learner
        _log.info("%s", _line(run_id, row))
        await self._prune(run_id, config, row.version)
        return row

    async def _at_head(self, run_id: str, config: RunConfig) -> Learner:
        """The newest version in memory: what is there, where it is that, else loaded."""
        head = await read_head(self._services.store, run_id)
        held = self._learner
        if held is not None and self._run_id == run_id and (held.version, held.digest) == (head.version, head.digest):
            return held
        return await self._load(run_id, config, head)

    async def _load(self, run_id: str, config: RunConfig, head: Head) -> Learner:
        self._learner = None  # before the new one, so that memory holds one of them
        path, services = Path(head.path), self._services
        threads, device = services.trainer_threads, services.trainer_device

        def load() -> Learner:
            if head.digest is None:
                return Learner.fresh(path, config.trainer, config.seed, threads=threads, device=device)
            learner = Learner.restore(path, config.trainer, threads=threads, device=device)
            if learner.digest != head.digest:
                raise TrainerProblem(f"{path} is not the checkpoint that was committed as version {head.version}")
            return learner

        try:
            self._learner = await _in_thread(load)
        except TrainerProblem as problem:
            raise final(FailureKind.INFRASTRUCTURE, f"version {head.version} cannot be loaded: {problem}") from None
        self._run_id = run_id
        return self._learner

    async def _prune(self, run_id: str, config: RunConfig, version: int) -> None:
        """Remove checkpoints of this version and before that nobody needs, those of losers and of the dead included."""
        live = await live_checkpoints(self._services.store, run_id, config.trainer.checkpoint.keep)

        def prune() -> None:
            for folder in self._folder(run_id, config).glob("version-*"):
                if str(folder) not in live and int(folder.name.split("-")[1]) <= version:
                    checkpoint.remove(folder)
            _sweep(self._folder(run_id, config))

        await _in_thread(prune)

    def _folder(self, run_id: str, config: RunConfig) -> Path:
        chosen = config.trainer.checkpoint.dir
        root = self._services.home / "checkpoints" if chosen is None else Path(chosen)
        return root.absolute() / quote(run_id, safe="")

    async def _track(self, run_id: str, config: RunConfig, step: int) -> None:
        """Hand the metrics of `step` to whoever watches from outside; nothing that goes wrong there comes back."""
        if config.wandb is None or config.wandb.mode == "disabled":
            return
        tracker, fresh = self._services.tracker(run_id, config, config.wandb)
        for row in await train_steps(self._services.store, run_id, since=0 if fresh else step):
            tracker.log(row.version, row.metrics | {"staleness": float(row.staleness)})


def _waits_for(found: Waiting) -> str:
    return f"{found.ready} of {found.wanted} groups with signal are there ({found.drawn} were drawn)"


async def _between_steps(store: Store, run_id: str) -> list[str]:
    """Evaluations that began after a step and have not ended."""
    return [
        one.name
        for one in await list_evaluations(store, run_id)
        if one.state is EvaluationState.RUNNING and evaluated_version(one.name) is not None
    ]


async def _in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run `work` in a thread and do not come back before it is over, also when cancelled: it owns the weights."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _copy_weights(source: Path, folder: Path) -> None:
    """The run's own copy of what it begins with: the run it came from removes its checkpoints as it goes on."""
    try:
        checkpoint.verify(source)
        ignored = shutil.ignore_patterns("trainer", checkpoint.MANIFEST)

        def fill(partial: Path) -> None:
            shutil.copytree(source, partial, ignore=ignored, dirs_exist_ok=True)

        checkpoint.write(folder, fill)
    except TrainerProblem as problem:
        message = f"the weights to begin with cannot be taken: {problem}"
        raise final(FailureKind.INFRASTRUCTURE, message) from None


def _sweep(folder: Path) -> None:
    for left in checkpoint.leftovers(folder):
        checkpoint.remove(left)


def _probe_sequences(groups: list[SampleGroup]) -> list[list[int]]:
    """The first segments of the batch, shortened: tokens that the step has just moved."""
    segments = [segment.ids for group in groups for episode in group.episodes for segment in episode.segments]
    spread = segments[:: max(1, len(segments) // _PROBES)][:_PROBES]
    # One token short of the segment, which may fill the context: an engine samples one behind what it scores.
    return [ids[: min(_PROBE_TOKENS, max(1, len(ids) - 1))] for ids in spread]


def _metrics(measured: Mapping[str, float], claim: Claim) -> dict[str, float]:
    """What the step measured, and what the batch was drawn from."""
    drawn = {"filtered_groups": float(claim.filtered), "stale_groups": float(claim.stale)}
    drawn |= {"rewards": float(claim.rewards)}
    if claim.reward_mean is not None:
        drawn["reward_mean"] = claim.reward_mean
    return dict(measured) | drawn


def _line(run_id: str, row: StepRow) -> str:
    shown = ("reward_mean", "loss", "grad_norm", "clip_fraction", "k3", "seconds")
    parts = [f"{name} {row.metrics[name]:.4g}" for name in shown if name in row.metrics]
    return (
        f"{run_id} step {row.step} → version {row.version}: {row.groups} groups, staleness {row.staleness}, "
        + ", ".join(parts)
    )
