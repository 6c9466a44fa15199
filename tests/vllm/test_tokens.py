"""Through our own client, pool and renderer: what vLLM samples is what transformers computes, whatever is reloaded."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from atropos.contracts.messages import ToolCall, tool_result, user
from atropos.contracts.records import EngineRecord
from atropos.contracts.runfile import ModelConfig
from atropos.contracts.sampling import Sampling
from atropos.environments.registry import load
from atropos.inference.control import publish
from atropos.inference.engines import Completion, EngineAddress, SampleRequest
from atropos.inference.pool import EnginePool
from atropos.inference.tokens import TokenRenderer, load_renderer
from atropos.inference.vllm import VllmEngine
from atropos.inference.vllm_control import VllmControl
from atropos.tests.inference.conformance import likeliest, reference_logprobs

from ..support.world import ENVIRONMENTS
from .conftest import CONCURRENCY, TOLERANCE, Say

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

LOAD_S = 120.0
Pool = EnginePool[VllmEngine]
TOOLS = load(f"{ENVIRONMENTS}:Effects").spec.tool_specs()


@pytest.fixture(scope="module")
def renderer(weights: tuple[Path, Path]) -> TokenRenderer:
    return load_renderer(ModelConfig(path=str(weights[0])))


@pytest.fixture
async def pool(address: EngineAddress, renderer: TokenRenderer) -> AsyncIterator[Pool]:
    record = EngineRecord("vllm-0", "vllm", address.url, CONCURRENCY, None, "ready", None, None, None)
    pool = EnginePool(
        [record], lambda name: None, connect=lambda address: VllmEngine(address, vocabulary=renderer.vocabulary)
    )
    yield pool
    await pool.close()


async def sampled(
    pool: Pool,
    name: str,
    prompt: Sequence[int],
    *,
    most: int = 24,
    temperature: float = 1.0,
    streamed: bool = False,
) -> Completion:
    """A completion that ends only where it is full."""
    request = SampleRequest(name, list(prompt), Sampling(temperature=temperature), most, ())
    async with pool.lease(name) as engine:
        return await engine.sample(request, _heard if streamed else None)


async def _heard(partial: Completion) -> None:
    assert partial.token_ids


def apart(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


async def test_logprobs_are_those_of_transformers_before_and_after_each_reload(
    pool: Pool,
    control: VllmControl,
    weights: tuple[Path, Path],
    say: Say,
    record_property: Callable[[str, object], None],
) -> None:
    prompts = [[(13 * i + j) % 256 for j in range(2 + 17 * i)] for i in range(6)]
    temperatures = [1.0, 0.7, 1.6, 1.0, 0.4, 1.0]
    worst = 0.0
    for number in range(4):
        folder, other = weights[number % 2], weights[1 - number % 2]
        await publish(control, path=folder, label=f"v{number}", load_timeout_s=LOAD_S)
        completions = await asyncio.gather(
            *(
                sampled(pool, f"v{number}/{i}", prompt, temperature=t, streamed=i % 2 == 1)
                for i, (prompt, t) in enumerate(zip(prompts, temperatures, strict=True))
            )
        )
        for prompt, temperature, got in zip(prompts, temperatures, completions, strict=True):
            assert [span.label for span in got.spans] == [f"v{number}"]
            expected = reference_logprobs(folder, prompt, got.token_ids, temperature)
            worst = max(worst, apart(got.logprobs, expected))
            # The comparison has power: the other weights would be seen.
            assert apart(got.logprobs, reference_logprobs(other, prompt, got.token_ids, temperature)) > 100 * TOLERANCE
        scored = await control.score(prompts, label=f"v{number}")
        for prompt, row in zip(prompts, scored, strict=True):
            worst = max(worst, apart(row, reference_logprobs(folder, prompt[:1], prompt[1:])))
    record_property("vllm_logprob_maxdiff", worst)
    say(f"vllm_logprob_maxdiff {worst:.2e}")
    assert worst <= TOLERANCE


async def test_the_likeliest_tokens_are_those_of_transformers(
    pool: Pool, control: VllmControl, weights: tuple[Path, Path]
) -> None:
    """A prefix that is cached or recomputed, alone or in a batch, gives the same ids."""
    await publish(control, path=weights[1], label="greedy", load_timeout_s=LOAD_S)
    prompts = [[(5 * i + 3 * j) % 256 for j in range(40 + i)] for i in range(4)]
    for _ in range(2):
        found = await asyncio.gather(*(sampled(pool, f"greedy/{i}", p, temperature=0) for i, p in enumerate(prompts)))
        assert [one.token_ids for one in found] == [
            likeliest(weights[1], prompt, one.token_ids) for prompt, one in zip(prompts, found, strict=True)
        ]


async def test_a_conversation_with_a_tool_is_the_same_tokens_for_engine_and_trainer(
    pool: Pool, control: VllmControl, renderer: TokenRenderer, weights: tuple[Path, Path]
) -> None:
    await publish(control, path=weights[0], label="talk", load_timeout_s=LOAD_S)
    call = ToolCall(id="call_0", name="look", arguments={"at": 7})
    stream = renderer.open([user("What is at 7?")], TOOLS)
    turns = []
    for answer in ("1: nothing at 7.", "2: nothing at 8."):
        got = await sampled(pool, "talk", stream)
        assert got.usage_prompt == len(stream)
        turns.append((len(stream), got))
        delta = renderer.extend(stream, got.token_ids, [tool_result(answer, call)], TOOLS)
        assert delta is not None
        stream = [*stream, *got.token_ids, *delta]
    (scored,) = await control.score([stream], label="talk")
    for start, got in turns:
        end = start + len(got.token_ids)
        assert stream[start:end] == got.token_ids
        computed = reference_logprobs(weights[0], stream[:start], stream[start:end])
        assert apart(got.logprobs, computed) <= TOLERANCE
        assert apart(got.logprobs, scored[start - 1 : end - 1]) <= TOLERANCE


async def test_requests_in_flight_live_through_a_reload_and_each_token_has_the_version_that_sampled_it(
    pool: Pool, control: VllmControl, weights: tuple[Path, Path]
) -> None:
    await publish(control, path=weights[0], label="old", load_timeout_s=LOAD_S)
    most = 400
    prompts = [[(29 * i + j) % 256 for j in range(3 + 5 * i)] for i in range(CONCURRENCY - 1)]
    running = [
        asyncio.create_task(sampled(pool, f"load/{i}", prompt, most=most, streamed=i % 2 == 0))
        for i, prompt in enumerate(prompts)
    ]
    await sampled(pool, "first", [1, 2, 3], most=4)
    assert not any(task.done() for task in running)
    await publish(control, path=weights[1], label="new", load_timeout_s=LOAD_S)
    completions = await asyncio.gather(*running)
    crossed = [got for got in completions if [span.label for span in got.spans] == ["old", "new"]]
    assert len(crossed) >= CONCURRENCY // 2
    for prompt, got in zip(prompts, completions, strict=True):
        assert len(got.token_ids) == most
        by_label = {
            "old": reference_logprobs(weights[0], prompt, got.token_ids),
            "new": reference_logprobs(weights[1], prompt, got.token_ids),
        }
        expected = [value for span in got.spans for value in by_label[span.label][span.start : span.end]]
        assert apart(got.logprobs, expected) <= TOLERANCE
        assert apart(by_label["old"], by_label["new"]) > 100 * TOLERANCE
