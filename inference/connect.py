"""A client for each kind of engine.

Invariant: which client speaks to an engine follows from its kind alone; nothing is sent before it is asked for.
"""

from ..contracts.engines import EngineKind
from .engines import EngineAddress, MessageEngine, TokenEngine
from .hosted import HostedEngine
from .vllm import VllmEngine


def connect_engine(address: EngineAddress, *, vocabulary: int | None = None) -> TokenEngine | MessageEngine:
    """A client for the engine at `address`. `vocabulary`: see VllmEngine."""
    if address.kind is EngineKind.OPENAI:
        return HostedEngine(address)
    return VllmEngine(address, vocabulary=vocabulary)
