"""Publishing to a real engine: the probe tells what it holds, and it is never left paused."""

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from atropos.contracts.engines import EngineKind
from atropos.inference.control import UNVERSIONED, publish
from atropos.inference.engines import EngineAddress
from atropos.inference.errors import EngineFailure, EngineFailureKind
from atropos.inference.probe import Probe, Verdict, judge, judge_checksums, noise_of
from atropos.inference.vllm_control import VllmControl
from atropos.tests.inference.conformance import reference_logprobs
from atropos.tests.inference.servers import Answer, Seen, serving
from safetensors.torch import load_file, save_file

from .conftest import Running, engine_process

SEQUENCES = tuple(tuple((17 * i + 5 * j) % 256 for j in range(12 + 9 * i)) for i in range(4))
Weights = tuple[Path, Path]


def control_of(url: str) -> VllmControl:
    return VllmControl(EngineAddress("dev", EngineKind.DEV, url))


@pytest.fixture
async def control(engine: Running, weights: Weights) -> AsyncIterator[VllmControl]:
    client = control_of(engine.url)
    yield client
    await publish(client, path=weights[0], label="default", load_timeout_s=60)
    await client.close()


def logprobs(folder: Path) -> tuple[tuple[float, ...], ...]:
    """What a trainer computes for the probe's sequences."""
    return tuple(tuple(reference_logprobs(folder, ids[:1], ids[1:])) for ids in SEQUENCES)


async def measured(control: VllmControl, trainer: tuple[tuple[float, ...], ...]) -> float:
    """The noise at version 0, as publishing measures it."""
    found = judge(Probe(SEQUENCES, trainer, trainer), await control.score(SEQUENCES, label="v0"), noise_of(None))
    return noise_of(found.distance_after)


async def test_the_probe_tells_new_weights_from_old_ones_under_a_new_name(
    control: VllmControl, weights: Weights
) -> None:
    old, new = logprobs(weights[0]), logprobs(weights[1])
    await publish(control, path=weights[0], label="v0", load_timeout_s=60)
    noise = await measured(control, old)
    assert noise < 1e-4
    probe = Probe(SEQUENCES, before=old, after=new)
    await publish(control, path=weights[1], label="v1", load_timeout_s=60)
    assert judge(probe, await control.score(SEQUENCES, label="v1"), noise).verdict is Verdict.VERIFIED
    await publish(control, path=weights[0], label="v2", load_timeout_s=60)
    wrong = judge(probe, await control.score(SEQUENCES, label="v2"), noise)
    assert wrong.verdict is Verdict.WRONG
    assert "nearer to the old weights" in wrong.reason


async def test_a_step_too_small_for_logprobs_is_seen_by_digests(
    control: VllmControl, weights: Weights, tmp_path: Path
) -> None:
    tensors = load_file(weights[0] / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1e-6
    save_file(tensors, tmp_path / "model.safetensors")
    await publish(control, path=weights[0], label="v0", load_timeout_s=60)
    old = logprobs(weights[0])
    noise = await measured(control, old)
    await publish(control, path=tmp_path, label="v1", load_timeout_s=60)
    judged = judge(Probe(SEQUENCES, old, old), await control.score(SEQUENCES, label="v1"), noise)
    assert judged.verdict is Verdict.UNVERIFIABLE
    expected = {name: digest(tensor) for name, tensor in tensors.items()}
    assert judge_checksums(expected, await control.checksums()).verdict is Verdict.VERIFIED
    await publish(control, path=weights[0], label="v1", load_timeout_s=60)
    wrong = judge_checksums(expected, await control.checksums())
    assert (wrong.verdict, wrong.reason) == (Verdict.WRONG, "the engine holds other weights in lm_head.weight")


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


async def test_another_version_than_expected_is_a_failure(control: VllmControl) -> None:
    await control.set_version("v7")
    with pytest.raises(EngineFailure, match="weights v7 instead of v8") as caught:
        await control.score(SEQUENCES[:1], label="v8")
    assert caught.value.kind is EngineFailureKind.WRONG_VERSION


async def test_an_engine_found_paused_is_published_to_and_resumed(control: VllmControl, weights: Weights) -> None:
    await control.pause()
    await control.pause()
    await publish(control, path=weights[1], label="v1", load_timeout_s=60)
    assert not await control.is_paused()
    assert (await control.weight_info()).label == "v1"
    await control.resume()
    await publish(control, path=weights[1], label="v1", load_timeout_s=60)
    assert len(await control.score(SEQUENCES, label="v1")) == len(SEQUENCES)


async def test_weights_that_cannot_be_loaded_leave_the_engine_running_and_unnamed(
    control: VllmControl, tmp_path: Path
) -> None:
    with pytest.raises(EngineFailure, match=r"holds no model\.safetensors") as caught:
        await publish(control, path=tmp_path, label="v1", load_timeout_s=60)
    assert caught.value.kind is EngineFailureKind.REJECTED
    assert not hasattr(caught.value, "__notes__")
    assert not await control.is_paused()
    assert (await control.weight_info()).label == UNVERSIONED


@contextlib.contextmanager
def weights_that_never_come(folder: Path) -> Iterator[Path]:
    """A model folder whose file is a pipe: a reader waits until the end of the block, and then finds no weights."""
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "pipe.safetensors"}}))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            os.close(os.open(folder / "pipe.safetensors", os.O_WRONLY | os.O_NONBLOCK))


class Watched(VllmControl):
    """Says when a load has been asked for."""

    def __init__(self, url: str) -> None:
        super().__init__(EngineAddress("dev", EngineKind.DEV, url))
        self.loading = asyncio.Event()

    async def load(self, path: Path, label: str, *, limit_s: float) -> None:
        asyncio.get_running_loop().call_later(0.2, self.loading.set)
        await super().load(path, label, limit_s=limit_s)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_publisher_cancelled_while_it_loads_leaves_the_engine_resumed(
    times: int, engine: Running, control: VllmControl, tmp_path: Path
) -> None:
    watched = Watched(engine.url)
    with weights_that_never_come(tmp_path) as folder:
        publisher = asyncio.create_task(publish(watched, path=folder, label="v1", load_timeout_s=60))
        await watched.loading.wait()
        for _ in range(times):
            publisher.cancel()
            await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await publisher
    await watched.close()
    assert not await control.is_paused()
    assert (await control.weight_info()).label == UNVERSIONED


async def test_a_publisher_cancelled_while_it_pauses_leaves_the_engine_resumed(
    control: VllmControl, weights: Weights
) -> None:
    crowd = asyncio.create_task(control.score([[i % 256 for i in range(900)]] * 8))
    publisher = asyncio.create_task(publish(control, path=weights[1], label="v1", load_timeout_s=60))
    while not await control.is_paused():  # noqa: ASYNC110
        await asyncio.sleep(0)
    publisher.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publisher
    assert not await control.is_paused()
    assert len(await crowd) == 8


async def test_a_load_that_takes_too_long_is_a_failure(control: VllmControl, tmp_path: Path) -> None:
    with weights_that_never_come(tmp_path) as folder:
        publisher = asyncio.create_task(publish(control, path=folder, label="v1", load_timeout_s=0.5))
        await asyncio.sleep(1.0)
    with pytest.raises(EngineFailure, match=r"did not answer /collective_rpc within 0\.5 s") as caught:
        await publisher
    assert caught.value.retryable
    assert not await control.is_paused()


async def test_an_engine_killed_while_it_loads_is_a_failure(weights: Weights, tmp_path: Path) -> None:
    with engine_process(weights[0], tmp_path / "journal.jsonl") as running, weights_that_never_come(tmp_path) as folder:
        watched = Watched(running.url)
        publisher = asyncio.create_task(publish(watched, path=folder, label="v1", load_timeout_s=60))
        await watched.loading.wait()
        running.process.kill()
        with pytest.raises(EngineFailure) as caught:
            await publisher
        await watched.close()
    assert (caught.value.kind, caught.value.retryable) == (EngineFailureKind.UNAVAILABLE, True)
    assert any("it may still be paused" in note for note in caught.value.__notes__)


class Restarting:
    """An engine that is another process after its load; it remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.label = "default"
        self.life = "first"

    def __call__(self, seen: Seen) -> Answer:
        self.asked.append(seen.path.split("?")[0])
        if seen.path == "/collective_rpc":
            self.life = "second"
        if seen.path == "/update_weight_version":
            self.label = seen.json["new_version"]
        if seen.path == "/weight_info":
            return Answer(body={"weight_version": self.label, "incarnation": self.life})
        return Answer(body={})


async def test_an_engine_restarted_while_it_loads_does_not_keep_the_name(tmp_path: Path) -> None:
    engine = Restarting()
    async with serving(engine) as server:
        control = control_of(server.url)
        with pytest.raises(EngineFailure, match="was restarted"):
            await publish(control, path=tmp_path, label="v1", load_timeout_s=5)
        await control.close()
    assert engine.asked[-2:] == ["/update_weight_version", "/resume"]
    assert engine.label == UNVERSIONED


@pytest.mark.parametrize(
    ("prompt_logprobs", "says"),
    [
        (None, "too old to be probed"),
        ([None, {"2": {"logprob": -1.0}}], "too old to be probed"),
        ([None, {"9": {"logprob": -1.0}}, {"3": {"logprob": -1.0}}], "left out the logprob"),
        ([None, {"2": {"logprob": -1.0}}, None], "left out the logprob"),
        ([None, {"2": {"logprob": -1.0}}, {"3": {"logprob": float("nan")}}], "not a finite number"),
        ([None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -9999.0}}], "placeholder"),
    ],
)
async def test_scores_that_are_not_whole_are_refused(prompt_logprobs: object, says: str) -> None:
    def answer(seen: Seen) -> Answer:
        if seen.path == "/v1/models":
            return Answer(body={"data": [{"id": "policy"}]})
        return Answer(body={"choices": [], "prompt_logprobs": prompt_logprobs})

    async with serving(answer) as server:
        control = control_of(server.url)
        with pytest.raises(EngineFailure, match=says) as caught:
            await control.score([[1, 2, 3]])
        await control.close()
    assert caught.value.kind is EngineFailureKind.MALFORMED


async def test_ranks_are_stripped_and_sharded_tensors_left_out() -> None:
    sums = {"dp0:pp0:pcp0:tp0:norm": "1", "dp0:pp0:pcp0:tp1:norm": "1", "dp0:pp0:pcp0:tp0:wide": "2"}
    sums |= {"dp0:pp0:pcp0:tp1:wide": "3", "dp0:pp1:pcp0:tp0:last.weight": "4"}
    async with serving(lambda _: Answer(body={"checksums": sums})) as server:
        control = control_of(server.url)
        assert await control.checksums() == {"norm": "1", "last.weight": "4"}
        await control.close()
