"""What a trainer of one's own needs of the store: begin, take a batch, commit what became of it.

Invariant: the same fences as the built-in trainer's. A trainer may die anywhere and be started again, or run twice by
mistake: a batch that was taken and not committed is taken again with the very same groups, and of two that hold it the
one that took it last can commit.
"""

import asyncio
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..contracts.ids import weight_label
from ..contracts.states import is_live
from ..contracts.training import SampleGroup, TrainerKind
from .batches import (
    Claim,
    Head,
    Leased,
    StepRow,
    claim_batch,
    commit_step,
    committed_steps,
    lease_batch,
    live_checkpoints,
    read_head,
)
from .errors import Refused
from .publishing import add_first_version
from .runs import RunRow, get_run, run_state, unknown_run
from .samples import read_batch
from .store import Store

_LOOK_EVERY_S: Final = 0.5


@dataclass(frozen=True)
class Batch:
    """Groups to train on, taken by this trainer, and the version to begin from."""

    claim: Claim
    head: Head
    groups: list[SampleGroup]

    @property
    def version(self) -> int:
        """What committing it makes."""
        return self.claim.step + 1

    @property
    def name(self) -> str:
        """Of the folder for its weights: nobody else's, whoever else works on this step."""
        return f"version-{self.version:06d}-fence-{self.claim.fence}"


class ExternalTrainer:
    """The trainer of a run with `trainer: {kind: external}`. Made by `external_trainer`."""

    def __init__(self, store: Store, run: RunRow) -> None:
        self.run = run
        self._store = store
        self._owner = f"{socket.gethostname()}/{os.getpid()}"

    async def begin(self, path: Path | str, probe: Mapping[str, Any] | None = None) -> Head:
        """Say which weights the run begins with, a folder that the engines can load: rollouts wait for that.

        `probe` as for `commit`, `before` and `after` being the same; the noise that later probes have to exceed is
        measured with it. Returns the newest version, which is a later one where the run has begun before.
        """
        run_id = self.run.run_id
        label = weight_label(run_id, 0)
        return await add_first_version(self._store, run_id, label, str(Path(path).absolute()), None, probe)

    async def next_batch(self) -> Batch | None:
        """Wait for the batch of the next step and take it; None once the run has ended or has all its steps."""
        run_id, config = self.run.run_id, self.run.config
        while True:
            state = await run_state(self._store, run_id)
            if state is None or not is_live(state):
                return None
            if await committed_steps(self._store, run_id) >= config.trainer.steps:
                return None
            found = await lease_batch(self._store, run_id, config)
            if isinstance(found, Leased):
                claim = await claim_batch(self._store, run_id, found.batch_no, self._owner)
                if claim is not None and not claim.committed:  # neither abandoned nor committed by another meanwhile
                    head = await read_head(self._store, run_id)
                    groups = await read_batch(self._store, run_id, found.batch_no, config.trainer.scores)
                    return Batch(claim, head, groups)
            else:
                await asyncio.sleep(_LOOK_EVERY_S)

    async def commit(
        self,
        batch: Batch,
        path: Path | str,
        digest: str,
        metrics: Mapping[str, float],
        probe: Mapping[str, Any] | None = None,
    ) -> StepRow | None:
        """Make the weights in the folder `path` the next version. None where the batch was abandoned or taken by
        another trainer: then nothing happened, and these weights are nobody's.

        `digest` names their content. `probe` lets engines prove that they hold them: token ids as `sequences`, and the
        logprobs of each but the first of a sequence `before` and `after` the step; without it they count as unverified.
        Raises BadRecord for metrics that are not finite numbers.
        """
        folder, run_id = str(Path(path).absolute()), self.run.run_id
        return await commit_step(
            self._store, run_id, batch.claim, path=folder, digest=digest, metrics=metrics, probe=probe
        )

    async def needed(self, keep: int = 2) -> set[str]:
        """Folders that must stay: the newest `keep` versions and those that a running evaluation is pinned to."""
        return await live_checkpoints(self._store, self.run.run_id, keep)


async def external_trainer(store: Store, run_id: str) -> ExternalTrainer:
    """The trainer of a run. Raises Unknown, or Refused where the run's file does not leave its steps to others."""
    row = await get_run(store, run_id)
    if row is None:
        raise unknown_run(run_id)
    if row.config.trainer.kind is not TrainerKind.EXTERNAL:
        raise Refused(f"{run_id} has `trainer.kind: {row.config.trainer.kind}`; its file must say `external`.")
    return ExternalTrainer(store, row)
