"""One vLLM for most tests of the session, with random weights of a tiny untied Llama; few tests start another."""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from atropos.contracts.engines import EngineKind
from atropos.environments.registry import load
from atropos.inference.engines import EngineAddress
from atropos.inference.vllm_control import VllmControl
from atropos.tests.inference.conformance import Target
from transformers import AutoTokenizer

from ..support.scripted import make_model
from ..support.vllm_server import COMPLETE, VllmServer, vllm_server
from ..support.weights import add_weights
from ..support.world import ENVIRONMENTS

CONTEXT = 1024
WIDTH = 64
"""Two heads of 32, the smallest that vLLM computes on a CPU."""
TOLERANCE = 1e-3
CONCURRENCY = 16
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Say = Callable[[str], None]


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Say:
    """Lines for a person who waits, past pytest's capture."""
    plugins = request.config.pluginmanager
    reporter, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")

    def line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(text)
            reporter.flush()

    return line if reporter is not None and capture is not None else print


@pytest.fixture(scope="session")
def installed() -> None:
    """vLLM's own virtual environment; `make test-vllm` makes it and demands it."""
    if COMPLETE.is_file():
        return
    reason = "vLLM is not installed here; `make test-vllm` installs it into .venv-vllm (3 GB) and plays these tests"
    if os.environ.get("ATROPOS_TEST_VLLM") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


def make_policy(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A model that vLLM serves, trainers train and renderers know: random, and sharp enough to tell two seeds apart."""
    make_model(folder, load(f"{ENVIRONMENTS}:Effects").spec.tool_specs())
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    return add_weights(folder, seed=seed, width=WIDTH, layers=2, tied=tied, times=4.0)


@pytest.fixture(scope="session")
def weights(installed: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_policy(folder / "zero", seed=0), make_policy(folder / "one", seed=1)


@pytest.fixture(scope="session")
def server(weights: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, say: Say) -> Iterator[VllmServer]:
    with vllm_server(weights[0], tmp_path_factory.mktemp("vllm"), CONTEXT, say=say) as running:
        yield running


@pytest.fixture(scope="session")
def target(weights: tuple[Path, Path]) -> Target:
    return Target(
        model="policy",
        weights=weights,
        context=CONTEXT,
        names_incarnation=False,
        streams_versions=False,
        digests_all_tensors=False,
        tolerance=TOLERANCE,
    )


@pytest.fixture(scope="session")
def address(server: VllmServer) -> EngineAddress:
    return EngineAddress("vllm-0", EngineKind.VLLM, server.url, CONCURRENCY)


@pytest.fixture
async def client(server: VllmServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0, trust_env=False) as client:
        yield client


@pytest.fixture
async def control(address: EngineAddress) -> AsyncIterator[VllmControl]:
    control = VllmControl(address)
    yield control
    await control.close()
