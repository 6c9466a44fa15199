"""A client for each kind of engine, and one for its control routes.

Invariant: which client speaks to an engine follows from its kind alone; nothing is sent before it is asked for.
"""

from ..contracts.engines import EngineKind
from .control import EngineControl
from .engines import EngineAddress, MessageEngine, TokenEngine
from .hosted import HostedEngine
from .sglang import SglangEngine
from .sglang_control import SglangControl
from .vllm import VllmEngine
from .vllm_control import VllmControl


def connect_engine(address: EngineAddress, *, vocabulary: int | None = None) -> TokenEngine | MessageEngine:
    """A client for the engine at `address`. `vocabulary`: see VllmEngine."""
    if address.kind is EngineKind.OPENAI:
        return HostedEngine(address)
    if address.kind is EngineKind.SGLANG:
        return SglangEngine(address, vocabulary=vocabulary)
    return VllmEngine(address, vocabulary=vocabulary)


def connect_control(address: EngineAddress) -> EngineControl:
    """A client for the control routes of the engine at `address`, whose kind can be published to."""
    return SglangControl(address) if address.kind is EngineKind.SGLANG else VllmControl(address)
