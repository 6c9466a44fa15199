"""A trainer of your own, whole: REINFORCE with plain SGD, outside of the run that it trains.

Start a run whose file says `trainer: {kind: external, steps: 40}`, then, where its model and its store are at hand:

    python examples/external_trainer.py RUN

Kill it at any moment and start it again, or start it twice: no group is trained on twice. SGD keeps no state besides
the weights, so that a version is a folder of weights; an optimiser with state saves that beside them.
"""

import argparse
import asyncio
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from atropos.cli.access import find_run, opened_store
from atropos.contracts.training import SampleGroup
from atropos.db.external import external_trainer
from atropos.settings import load_settings
from atropos.trainer import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer


async def train(run: str, folder: Path, lr: float) -> None:
    async with opened_store(load_settings()) as store:
        trainer = await external_trainer(store, (await find_run(store, run)).run_id)
        initial = Path(trainer.run.config.model.path)
        model, held = load(initial), 0
        words = AutoTokenizer.from_pretrained(initial).encode(__doc__)[:256]
        same = [logprobs(model, words).tolist()]
        await trainer.begin(initial, {"sequences": [words], "before": same, "after": same})
        while (batch := await trainer.next_batch()) is not None:
            if held != batch.head.version:  # an earlier life was here, or our own step came to nothing
                model = load(batch.head.path)
            sequences = [
                segment.ids[:256][:-1] for group in batch.groups for one in group.episodes for segment in one.segments
            ][:8]
            before = [logprobs(model, ids).tolist() for ids in sequences]
            loss = step(model, batch.groups, lr)
            after = [logprobs(model, ids).tolist() for ids in sequences]
            path = folder / batch.name
            digest = checkpoint.write(path, partial(save, model, initial))
            probe = {"sequences": sequences, "before": before, "after": after}
            done = await trainer.commit(batch, path, digest, {"loss": loss}, probe)
            held = -1 if done is None else done.version
            print(f"version {held}: loss {loss:.4g}" if done else f"the batch of step {batch.claim.step} is not ours")
            needed = await trainer.needed()
            for old in folder.glob("version-*"):
                if str(old.absolute()) not in needed and int(old.name.split("-")[1]) <= batch.version:
                    checkpoint.remove(old)


def step(model: Any, groups: list[SampleGroup], lr: float) -> float:
    """Make the better episodes of each group likelier. Returns the loss."""
    tokens = sum(sum(segment.mask) for group in groups for one in group.episodes for segment in one.segments)
    total = 0.0
    model.zero_grad()
    for group in groups:
        rewards = [one.reward for one in group.episodes if one.reward is not None]
        mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards) + 1e-6
        for one in group.episodes:
            advantage = 0.0 if one.reward is None else (one.reward - mean) / spread
            for segment in one.segments:
                said = logprobs(model, segment.ids, segment.temperatures) * torch.tensor(segment.mask[1:])
                loss = -advantage * said.sum() / tokens
                torch.autograd.backward(loss)
                total += float(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
    return total


def logprobs(model: Any, ids: list[int], temperatures: list[float] | None = None) -> torch.Tensor:
    """Of each token but the first, under the distribution it was sampled from."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    if temperatures is not None:
        logits = logits / torch.tensor(temperatures[1:])[:, None]
    chosen: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return chosen


def load(path: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def save(model: Any, initial: Path, folder: Path) -> None:
    """A folder that an engine can load."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(initial).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a run from outside.")
    parser.add_argument("run", help="the run's id, or an unambiguous beginning or end of it")
    parser.add_argument("--checkpoints", type=Path, default=Path(".atropos/external"), help="where engines load from")
    parser.add_argument("--lr", type=float, default=0.1)
    given = parser.parse_args()
    asyncio.run(train(given.run, given.checkpoints / given.run.replace("/", "-"), given.lr))
