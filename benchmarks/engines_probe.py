"""Whether the proof of a reload tells wrong weights from right ones, and never right ones from wrong.

A random model of the tiny policy's size is stepped as Adam would, by the learning rate in each number; the dev engine
is given the new weights (a good reload) or what a fault would leave it with, and is asked for the proof that publishing
asks for. `unverifiable` counts as caught: such a version is never called verified.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from atropos.activities.publishing import proved
from atropos.contracts.engines import EngineKind
from atropos.contracts.states import RunState
from atropos.db.publishing import Wanted
from atropos.inference.control import EngineControl, publish
from atropos.inference.engines import EngineAddress
from atropos.inference.probe import Verdict
from atropos.inference.vllm_control import VllmControl
from atropos.trainer.state import checksums
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

RATES: Final = (1e-6, 1e-5, 1e-4, 1e-3)
FAULTS: Final = ("nothing loaded", "the version before", "one stale tensor", "another adapter", "a stale head")
_SEQUENCES, _LENGTH = 12, 33

Weights = dict[str, torch.Tensor]


class Deaf(VllmControl):
    """An engine that says it has loaded, and has not."""

    async def load(self, path: Path, label: str, *, limit_s: float) -> None:
        del path, limit_s
        await self.set_version(label)


class Trial:
    """One model beside one engine; each reload begins with what the one before left."""

    def __init__(self, folder: Path, url: str, seed: int) -> None:
        self._model = LlamaForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)  # sharp enough that its logprobs say something
        self._folder, self._draw = folder, random.Random(seed)
        self._address = EngineAddress("engine", EngineKind.DEV, url, 8)
        tokens = range(3, self._model.config.vocab_size)
        self._sequences = [self._draw.choices(tokens, k=_LENGTH) for _ in range(_SEQUENCES)]
        self._count = 0
        self._noise: float | None = None
        torch.manual_seed(seed)

    async def begin(self) -> None:
        """Load version 0 and measure by how much two implementations differ."""
        self._older = self._weights()
        before = self._logprobs()
        _, self._noise = await self._proof(VllmControl(self._address), self._older, before, before, "auto")

    async def reload(self, rate: float, fault: str | None) -> Verdict:
        """One step and one reload of it."""
        before, old = self._logprobs(), self._weights()
        self._step(rate)
        new = self._weights()
        given = self._given(fault, old, new, rate)
        control = (Deaf if fault == FAULTS[0] else VllmControl)(self._address)
        verdict, _ = await self._proof(control, given, before, self._logprobs(), "auto")
        self._older = old
        if fault is not None:  # the next trial begins on an engine that holds what it should
            await self._proof(VllmControl(self._address), new, before, before, "logprobs")
        return verdict

    def _given(self, fault: str | None, old: Weights, new: Weights, rate: float) -> Weights:
        if fault == "the version before":
            return self._older
        if fault == "one stale tensor":
            name = self._draw.choice([name for name in new if not torch.equal(new[name], old[name])])
            return new | {name: old[name]}
        if fault == "another adapter":
            return {name: value + rate * torch.randn_like(value).sign() for name, value in old.items()}
        if fault == "a stale head":
            return new | {"lm_head.weight": old["lm_head.weight"]}
        return new

    async def _proof(
        self, control: EngineControl, given: Weights, before: Any, after: Any, verify: str
    ) -> tuple[Verdict, float | None]:
        self._count += 1
        path, label = self._folder.parent / f"given-{self._count}.safetensors", f"v{self._count}"
        save_file(given, path)
        probe = {"sequences": self._sequences, "before": before, "after": after, "checksums": checksums(self._model)}
        target = Wanted(RunState.RUNNING, self._count - 1, label, str(path), None, probe, False, self._noise)
        try:
            await publish(control, path=path, label=label, load_timeout_s=60)
            found = await proved(control, verify, target)
        finally:
            await control.close()
            path.unlink()
        return found.verdict, found.distance_after

    def _step(self, rate: float) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(rate * torch.randn_like(parameter).sign())

    def _weights(self) -> Weights:
        return {name: value.clone() for name, value in self._model.state_dict().items()}

    def _logprobs(self) -> list[list[float]]:
        ids = torch.tensor(self._sequences)
        with torch.no_grad():
            logits = self._model(input_ids=ids).logits[:, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return [[float(value) for value in row] for row in chosen]


def plan(good: int, bad: int) -> Iterator[tuple[float, str | None]]:
    """Reloads of each kind, spread over the learning rates: `good` in all, and `bad` of each fault."""
    for number in range(good):
        yield RATES[number % len(RATES)], None
    for fault in FAULTS:
        for number in range(bad):
            yield RATES[number % len(RATES)], fault


async def measure(folder: Path, url: str, good: int, bad: int) -> dict[str, float]:
    trial = Trial(folder, url, seed=7)
    await trial.begin()
    missed = alarms = 0
    counts: dict[str, dict[str, int]] = {}
    for rate, fault in plan(good, bad):
        verdict = await trial.reload(rate, fault)
        row = counts.setdefault(f"{fault or 'good'}, {rate:g}", {})
        row[verdict] = row.get(verdict, 0) + 1
        missed += fault is not None and verdict is Verdict.VERIFIED
        alarms += fault is None and verdict is Verdict.WRONG
    for name, row in counts.items():
        print(f"{name:<28} {', '.join(f'{count} {word}' for word, count in sorted(row.items()))}", flush=True)
    return {"probe_missed": missed, "probe_false_alarms": alarms}
