"""An engine without a model, in the worker's own process: what it says is scripted, what it costs is chosen.

It stands for the model alone. The episode around it is the product's: prompts are rendered, completions parsed, every
row written.
"""

import asyncio
import json
import re

from atropos.contracts.reasons import FinishReason
from atropos.inference.engines import Completion, EngineAddress, LabelSpan, Progress, SampleRequest, WeightInfo
from transformers import PreTrainedTokenizerFast

_TURN = re.compile(r"/turn/(\d+)/")
TURNS = 6


class FakeEngine:
    """Five tool calls, then an answer; each completion takes `model_s` seconds."""

    def __init__(self, address: EngineAddress, tokenizer: PreTrainedTokenizerFast, model_s: float) -> None:
        self.engine_id = address.engine_id
        self._tokenizer = tokenizer
        self._model_s = model_s

    async def sample(self, request: SampleRequest, progress: Progress | None = None) -> Completion:
        del progress  # it is said at once, so there is nothing between
        if self._model_s:
            await asyncio.sleep(self._model_s)
        found = _TURN.search(request.request_id)
        ids = self._ids(int(found[1]) if found else 0)
        span = LabelSpan("default", 0, len(ids))
        return Completion(ids, [-0.5] * len(ids), FinishReason.STOP, (span,), "fake", len(request.prompt_ids))

    def _ids(self, turn: int) -> list[int]:
        if turn >= TURNS - 1:
            text = "nothing"
        else:
            call = json.dumps({"name": "look", "arguments": {"at": turn}})
            text = f"<tool_call>\n{call}\n</tool_call>"
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]

    async def health(self) -> None:
        return None

    async def weight_info(self) -> WeightInfo:
        return WeightInfo("default", "fake")

    async def label(self) -> str:
        return "default"

    async def context_limit(self) -> int | None:
        return None

    async def waiting(self) -> int | None:
        return None

    async def close(self) -> None:
        return None
