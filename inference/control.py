"""The control side of an engine: pause, load weights, name them, resume, and score fixed tokens. vLLM's wire.

Invariant: an engine is never left paused by whoever publishes to it, and never serves weights under a name that is not
theirs. Whatever happens after the pause was asked for, `publish` asks for the resume before it passes the failure on;
where a load may have happened and was not confirmed, the weights are called `unversioned` first, so that no token
sampled from then on counts as any version's. Publishing again repairs both.

Every call has a limit on its whole time and raises EngineFailure, and nothing is retried.
"""

import asyncio
import re
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from .answers import read_labels, read_prompt_logprobs
from .connection import CONTROL_S, Connection
from .engines import EngineAddress, WeightInfo
from .errors import EngineFailure, EngineFailureKind, malformed, unavailable
from .vllm import GENERATE

UNVERSIONED: Final = "unversioned"
"""What weights are called that were loaded and not confirmed; the dev engine calls them so by itself."""
PAUSE_S: Final = 60.0
"""A pause returns after the step that is being computed."""
RESUME_S: Final = 30.0
CHECKSUMS_S: Final = 300.0
SCORE_S: Final = 120.0
_RANK: Final = re.compile(r"^(?:[a-z]+\d+:)+")
"""`dp0:pp0:pcp0:tp0:` before a tensor's name."""

Result = TypeVar("Result")


class EngineControl:
    """The control routes of one engine. Weights are read from a path on the engine's own machine."""

    def __init__(self, address: EngineAddress) -> None:
        self.engine_id = address.engine_id
        self._concurrency = address.concurrency
        self._server = Connection(address)

    async def weight_info(self) -> WeightInfo:
        return await self._server.weight_info()

    async def is_paused(self) -> bool:
        paused = (await self._server.call("GET", "/is_paused")).get("is_paused")
        if not isinstance(paused, bool):
            raise malformed(f"{self._server.who} does not say whether it is paused")
        return paused

    async def pause(self, *, limit_s: float = PAUSE_S) -> None:
        """Freeze calls in flight and drop every cached key and value. Harmless where it is paused already."""
        await self._server.within(limit_s, "/pause?mode=keep&clear_cache=true")

    async def load(self, path: Path, *, limit_s: float) -> None:
        """Replace the weights by those under `path`. The engine must be paused."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await self._server.within(limit_s, "/collective_rpc", body)

    async def set_version(self, label: str) -> None:
        await self._server.within(CONTROL_S, "/update_weight_version", {"new_version": label})

    async def resume(self, *, limit_s: float = RESUME_S) -> None:
        """Harmless where it is not paused."""
        await self._server.within(limit_s, "/resume")

    async def checksums(self, *, limit_s: float = CHECKSUMS_S) -> dict[str, str]:
        """The SHA-256 of each tensor by its plain name. A name that ranks report with different digests is sharded and
        has no digest of its own; it is left out."""
        path = "/weight_checker"
        answer = self._server.parsed(path, await self._server.within(limit_s, path, {"action": "checksum"}))
        reported = answer.get("checksums")
        if not isinstance(reported, dict) or not all(isinstance(value, str) for value in reported.values()):
            raise malformed(f"{self._server.who} did not return a digest for each tensor")
        by_name: dict[str, set[str]] = {}
        for name, digest in reported.items():
            by_name.setdefault(_RANK.sub("", name), set()).add(digest)
        return {name: digests.pop() for name, digests in by_name.items() if len(digests) == 1}

    async def score(
        self, sequences: Sequence[Sequence[int]], *, label: str | None = None, limit_s: float = SCORE_S
    ) -> list[list[float]]:
        """The logprob of every token but the first of each sequence, at temperature 1.

        A sequence is shorter than the engine's context, since a token is sampled after it. `label`: the version that
        must answer; another is an EngineFailure of kind WRONG_VERSION. `limit_s` holds for each sequence. Never asked
        of a paused engine, which would not answer.
        """
        model = (await self._server.model()).get("id")
        slots = asyncio.Semaphore(self._concurrency)

        async def one(ids: Sequence[int]) -> list[float]:
            async with slots:
                return await self._score(ids, model, label, limit_s)

        return await _all([one(ids) for ids in sequences])

    async def _score(self, ids: Sequence[int], model: object, label: str | None, limit_s: float) -> list[float]:
        parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "ignore_eos": True}
        body = {"model": model, "token_ids": list(ids), "stream": False, "sampling_params": parameters}
        answer = self._server.parsed(GENERATE, await self._server.within(limit_s, GENERATE, body))
        if label is not None:
            found = read_labels(self._server.who, answer)
            if found != {label}:
                says = f"{self._server.who} answered with weights {', '.join(sorted(found))} instead of {label}"
                raise EngineFailure(EngineFailureKind.WRONG_VERSION, says, retryable=True)
        return read_prompt_logprobs(self._server.who, ids, answer)

    async def close(self) -> None:
        await self._server.close()


async def publish(control: EngineControl, *, path: Path, label: str, load_timeout_s: float) -> None:
    """Put the weights under `path` into an engine and call them `label`: pause, load, name, resume.

    An engine that was found paused is resumed, too. What it then serves is to be probed, after this returned. Cancelled
    or failing, it first resumes the engine, which takes up to `RESUME_S` and ten seconds more. Where even that fails,
    the failure says so in a note.
    """
    before = (await control.weight_info()).incarnation
    loading = False
    try:
        await _to_the_end(control.pause())
        loading = True
        await control.load(path, limit_s=load_timeout_s)
        await control.set_version(label)
        now = await control.weight_info()
        if now != WeightInfo(label, before):
            raise unavailable(f"engine {control.engine_id} was restarted or given another name while it loaded weights")
        await control.resume()
    except BaseException as error:
        left = await _to_the_end(_recovered(control, loading))
        for sentence in left:
            error.add_note(sentence)
        raise


async def _recovered(control: EngineControl, loading: bool) -> list[str]:
    """Resume; `loading`: the weights may be others than their name says. Returns what could not be done."""
    left = []
    if loading:
        try:
            await control.set_version(UNVERSIONED)
        except EngineFailure as failure:
            left.append(f"its weights may still carry an old name: {failure.message}")
    try:
        await control.resume()
    except EngineFailure as failure:
        left.append(f"it may still be paused: {failure.message}")
    return left


async def _to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is short and goes on if we are cancelled meanwhile; that is raised once it is over.

    A pause that was sent and not waited for might arrive after the resume.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()
        raise cancelled
    return task.result()


async def _all(work: list[Coroutine[Any, Any, list[float]]]) -> list[list[float]]:
    """All results, in order; the first failure ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
