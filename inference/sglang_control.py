"""The control side of SGLang.

Invariant: as for every engine, no token counts as a version's that another sampled. How depends on the server:

* One that keeps calls (`KEEPS_CALLS`) is paused with its calls put back into its queue (`retract`). Their keys and
  values are computed anew by the new weights, and their answers say which weights sampled each token.
* An older one says one name for a whole answer, the one at its end. It is not paused: a load then waits for the calls
  in flight and holds new ones back until it is done, so that one name is the truth. Where such a load fails, what the
  server then holds is called `unversioned` a moment after it goes on.

Logprobs must be those after temperature, which a variable of the server's environment may turn off. Nothing tells, so
it is measured wherever fixed tokens are scored: at twice the temperature one token leads another by half as much.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from .connection import CONTROL_S
from .control import PAUSE_S, RESUME_S, SCORE_S, all_of, wrong_version
from .engines import EngineAddress, WeightInfo
from .errors import rejected, unavailable
from .sglang import GENERATE, NEUTRAL, SglangServer, keeps_calls
from .sglang_answers import read_labels, read_lead, read_scores

_HOT: Final = 2.0
_TELLING: Final = 0.5
"""A lead of so many nats is told from half of it, whatever the number format."""


class SglangControl:
    """The control routes of one engine."""

    def __init__(self, address: EngineAddress) -> None:
        self.engine_id = address.engine_id
        self._concurrency = address.concurrency
        self._server = SglangServer(address)

    async def weight_info(self) -> WeightInfo:
        return await self._server.weight_info()

    async def pause(self, *, limit_s: float = PAUSE_S) -> None:
        if keeps_calls(await self._server.model()):
            await self._server.within(limit_s, "/pause_generation", {"mode": "retract"})
        else:  # a paused server would load without waiting for the calls that it holds
            await self.resume()

    async def load(self, path: Path, label: str, *, limit_s: float) -> None:
        """`flush_cache` drops cached keys and values in the same step."""
        route = "/update_weights_from_disk"
        body = {"model_path": str(path), "weight_version": label, "abort_all_requests": False, "flush_cache": True}
        answer = self._server.parsed(route, await self._server.within(limit_s, route, body))
        if answer.get("success") is not True:
            raise unavailable(f"{self._server.who} did not load {path}: {str(answer.get('message'))[:300]}")

    async def set_version(self, label: str) -> None:
        """Calls in flight are aborted by default."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._server.within(CONTROL_S, "/update_weight_version", body)

    async def resume(self, *, limit_s: float = RESUME_S) -> None:
        await self._server.within(limit_s, "/continue_generation", {})

    async def checksums(self) -> dict[str, str]:
        """None: `/weights_checker` hashes, to 64 bits and in its own way, tensors that the server has fused."""
        return {}

    async def score(
        self, sequences: Sequence[Sequence[int]], *, label: str | None = None, limit_s: float = SCORE_S
    ) -> list[list[float]]:
        slots = asyncio.Semaphore(self._concurrency)

        async def one(ids: Sequence[int]) -> list[float]:
            async with slots:
                return await self._score(ids, label, limit_s)

        scores = await all_of([one(ids) for ids in sequences])
        if sequences:
            await self._refuse_unscaled(sequences[0], limit_s)
        return scores

    async def _score(self, ids: Sequence[int], label: str | None, limit_s: float) -> list[float]:
        """Logprobs of a prompt are those before temperature; nothing is sampled after it."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
        }
        answer = self._server.parsed(GENERATE, await self._server.within(limit_s, GENERATE, body))
        if label is not None:
            found = read_labels(self._server.who, answer)
            if found != {label}:
                raise wrong_version(self._server.who, found, label)
        return read_scores(self._server.who, ids, answer)

    async def _refuse_unscaled(self, ids: Sequence[int], limit_s: float) -> None:
        """Raises EngineFailure where logprobs are those before temperature, as far as these tokens can tell."""
        (tokens, plain), (same, hot) = [await self._lead(ids, temperature, limit_s) for temperature in (1.0, _HOT)]
        if tokens == same and plain > _TELLING and abs(hot - plain) < abs(hot - plain / _HOT):
            says = "returns logprobs before temperature; start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
            raise rejected(f"{self._server.who} {says}")

    async def _lead(self, ids: Sequence[int], temperature: float, limit_s: float) -> tuple[tuple[Any, Any], float]:
        body = {
            "input_ids": list(ids),
            "sampling_params": NEUTRAL | {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": 2,
            "stream": False,
        }
        answer = self._server.parsed(GENERATE, await self._server.within(limit_s, GENERATE, body))
        return read_lead(self._server.who, answer)

    async def close(self) -> None:
        await self._server.close()
