"""The engine: calls in flight, pauses, versions.

Invariant: a token carries the version of the weights that computed it *and* every key and value it attended to. To keep
it, weights change only while the batcher is halted at a step boundary; on resume each frozen call is computed anew from
its first token under the weights of then. After a reload and until a version is named, tokens are labelled
`unversioned`: the engine never guesses what its weights are called.
"""

import asyncio
import json
import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from . import weights
from .batching import Batcher, BatchLimits, Sampled
from .calls import Call
from .journal import Journal, Line
from .wire import ApiError, SamplingParams

FIRST_VERSION = "default"
"""What vLLM calls the weights it was started with."""
UNVERSIONED = "unversioned"
SHUTTING_DOWN = "The engine is shutting down."

PauseMode = Literal["abort", "wait", "keep"]


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)


class Engine:
    """Serves calls on one model. All methods belong to one event loop; sampling happens in a thread of its own."""

    def __init__(
        self,
        model: Any,
        model_path: Path,
        limits: BatchLimits,
        context: int,
        eos_ids: frozenset[int],
        journal: Journal,
        on_fatal: Callable[[str], None],
    ) -> None:
        """`context`: longest prompt plus completion. `on_fatal` is told why if sampling dies."""
        self.incarnation = str(uuid.uuid4())
        self.context = context
        self.totals = Totals()
        self._label = _label(FIRST_VERSION)
        self._model = model
        self._model_path = model_path
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._eos_ids = eos_ids
        self._journal = journal
        self._on_fatal = on_fatal
        self._batcher = Batcher(model, limits, self._record, self._fail)
        self._calls: dict[Call, None] = {}
        self._numbers = 0
        self._running = False
        self._closed = False
        self._control = asyncio.Lock()
        self._idle = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._batcher.start()
        self._running = True

    async def close(self) -> None:
        """Stop sampling for good; calls in flight fail with 503, so that their callers go elsewhere."""
        self._closed = True
        for call in self._calls:
            call.error, call.error_status = SHUTTING_DOWN, 503
            call.changed.set()
        self._calls.clear()
        self._idle.set()
        async with self._control:
            if self._running:
                await self._halt()
        self._journal.close()

    @property
    def version(self) -> str:
        """The name of the present weights."""
        return self._label[0]

    @property
    def paused(self) -> bool:
        return not self._running

    @property
    def healthy(self) -> bool:
        """False once sampling has died; a paused engine is healthy."""
        return self.paused or self._batcher.alive

    @property
    def running(self) -> int:
        return self._batcher.running

    @property
    def waiting(self) -> int:
        return max(0, len(self._calls) - self._batcher.running)

    def submit(
        self, prompt: list[int], params: SamplingParams, request_id: str | None = None, streamed: bool = False
    ) -> Call:
        """Take a call; while paused it waits for the resume. Raises ApiError if it cannot be served."""
        self._refuse_impossible(prompt, request_id)
        self._numbers += 1
        call_id = f"{self.incarnation[:8]}-{self._numbers}"
        request_id = request_id or f"cmpl-{call_id}"
        eos = frozenset() if params.ignore_eos else self._eos_ids
        call = Call(
            request_id=request_id,
            call_id=call_id,
            prompt=prompt,
            params=params,
            stop_ids=eos | frozenset(params.stop_token_ids),
            eos_ids=eos,
            budget=min(params.max_tokens, self.context - len(prompt)),
            streamed=streamed,
            dice=random.Random(params.seed) if params.seed is not None else random.SystemRandom(),
            line=Line(request_id, call_id),
        )
        self.totals.prompt_tokens += len(prompt)
        self._calls[call] = None
        if self._running:
            self._batcher.add(call)
        return call

    def cancel(self, call: Call) -> None:
        """Forget a call whose caller is gone; nothing more is sampled for it. Harmless if it is over."""
        if not call.over and self._calls.pop(call, 0) is None:
            self._batcher.drop(call)
            self.totals.finished["abort"] += 1
            self._note_idle()

    async def pause(self, mode: PauseMode) -> None:
        """Halt. `keep` freezes calls in flight, `wait` lets them end first, `abort` ends them as they are; calls that
        arrive later wait. Returns when nothing is being sampled any more."""
        async with self._control:
            if self._running and mode == "wait":
                await self._drain()
            elif self._running:
                self._running = False
                await self._halt()
            if mode == "abort":
                self._abort_all()

    async def resume(self) -> None:
        """Go on: every waiting call is computed from its first token under the present weights."""
        async with self._control:
            if self._running or self._closed:
                return
            self._batcher.start()
            self._running = True
            for call in self._calls:
                self._batcher.add(call)

    async def reload(self, path: Path | None) -> None:
        """Replace the weights by those under `path` (None: the folder of the start), all of them or none.

        Raises ApiError: 409 unless paused, 400 with the reason if they cannot be loaded.
        """
        async with self._control:
            if self._running:
                raise ApiError(409, "Pause the engine before it reloads weights (POST /pause?mode=keep).")
            try:
                tensors = await asyncio.to_thread(weights.read, path or self._model_path, self._model)
            except weights.WeightsError as error:
                raise ApiError(400, f"The weights were not reloaded, the old ones stay: {error}") from error
            await asyncio.to_thread(weights.replace, self._model, tensors)
            self.set_version(UNVERSIONED)

    def set_version(self, version: str) -> None:
        """Name the present weights; tokens sampled from the next step on carry the name."""
        self._label = _label(version)

    async def checksums(self) -> dict[str, str]:
        """SHA-256 of every parameter, under vLLM's names."""
        async with self._control:
            return await asyncio.to_thread(weights.checksums, self._model)

    def _refuse_impossible(self, prompt: list[int], request_id: str | None) -> None:
        if self._closed:
            raise ApiError(503, SHUTTING_DOWN)
        if not self.healthy:
            raise ApiError(503, "The engine's sampling loop has died; it is shutting down.")
        if not prompt:
            raise ApiError(400, "The prompt is empty.")
        if len(prompt) >= self.context:
            raise ApiError(
                400, f"The prompt has {len(prompt)} tokens; the context of {self.context} leaves no room to answer."
            )
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise ApiError(400, f"Token ids must lie between 0 and {self._vocabulary - 1}.")
        if request_id is not None and any(call.request_id == request_id for call in self._calls):
            raise ApiError(409, f"A request with the id {request_id!r} is in flight.")

    async def _drain(self) -> None:
        """Stop feeding, let what was fed end, then halt."""
        self._running = False
        while self._batcher.calls and self._batcher.alive and not self._closed:
            self._idle.clear()
            await self._idle.wait()
        await self._halt()

    async def _halt(self) -> None:
        self._running = False
        await asyncio.to_thread(self._batcher.halt)

    def _abort_all(self) -> None:
        for call in self._calls:
            call.finish_reason = "abort"
            call.changed.set()
        self.totals.finished["abort"] += len(self._calls)
        self._calls.clear()

    def _record(self, step: list[Sampled]) -> None:
        """In the sampling thread: book one step's tokens, in the journal first, then tell the loop."""
        version, version_json = self._label
        self._journal.append([call.line.of(len(call.tokens), token, version_json) for call, token, _ in step])
        for call, token, logprob in step:
            call.record(token, logprob, version)
        self.totals.generated_tokens += len(step)
        over = [call for call, _, _ in step if call.over]
        for call in over:
            self._batcher.calls.pop(f"{call.call_id}.{call.feeds}", None)
        news = [call for call, _, _ in step if call.streamed or call.over]
        if news and self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell, news)

    def _fail(self, call: Call, reason: str) -> None:
        """In the sampling thread: a call that the library gave up."""
        call.error = f"The engine failed on this request: {reason}"
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell, [call])

    def _tell(self, news: list[Call]) -> None:
        for call in news:
            if call.over and self._calls.pop(call, 0) is None:
                self.totals.finished[call.finish_reason or "error"] += 1
            call.changed.set()
        self._note_idle()
        failures = [call.error for call in news if call.error is not None]
        if failures and self._loop is not None:
            # A failed call may mean that sampling died; its thread has ended a moment later if so.
            self._loop.call_later(0.5, self._notice_death, failures[0])

    def _notice_death(self, reason: str) -> None:
        if not self.healthy:
            self._on_fatal(reason)

    def _note_idle(self) -> None:
        if not self._batcher.calls:
            self._idle.set()


def _label(version: str) -> tuple[str, str]:
    """A version and its JSON, in one object: the sampling thread never sees half a change."""
    return version, json.dumps(version)
