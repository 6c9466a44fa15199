"""A world a module: a namespace and a database of its own, and an engine that calls a tool twice, then answers."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from atropos.environments.registry import load

from ..support.scripted import make_model, scripted_engine, tool_call
from ..support.world import ENVIRONMENTS, World, new_namespace

MakeWorld = Callable[[], Awaitable[World]]


def looks_twice(prompt: str, turn: int) -> str:
    """Two tool calls, then the answer."""
    return tool_call("look", at=turn) if turn < 2 else "nothing"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tools = load(f"{ENVIRONMENTS}:Placed").spec.tool_specs()
    return make_model(tmp_path_factory.mktemp("model"), tools)


@pytest.fixture(scope="module")
async def world(temporal_address: str, database_url: str, model: Path) -> AsyncIterator[World]:
    async with scripted_engine(model, looks_twice) as engine:
        yield World(await new_namespace(temporal_address), database_url, engine)


@pytest.fixture(scope="module")
async def make_world(temporal_address: str, fresh_database: Callable[[], str], model: Path) -> AsyncIterator[MakeWorld]:
    """Makes worlds whose engine looks twice, each with a namespace and a database of its own."""
    async with AsyncExitStack() as stack:

        async def make() -> World:
            engine = await stack.enter_async_context(scripted_engine(model, looks_twice))
            return World(await new_namespace(temporal_address), fresh_database(), engine)

        yield make
