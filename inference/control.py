"""The control side of an engine: pause, load weights under a name, resume, and score fixed tokens.

Invariant: an engine is never left paused by whoever publishes to it, and never serves weights under a name that is not
theirs. Whatever happens after the pause was asked for, `publish` asks for the resume before it passes the failure on;
where a load may have happened and was not confirmed, the weights are called `unversioned` first, so that no token
sampled from then on counts as any version's. Publishing again repairs both.

Every call has a limit on its whole time and raises EngineFailure, and nothing is retried.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from .engines import WeightInfo
from .errors import EngineFailure, EngineFailureKind, unavailable

UNVERSIONED: Final = "unversioned"
"""What weights are called that were loaded and not confirmed; the dev engine calls them so by itself."""
PAUSE_S: Final = 60.0
"""A pause returns after the step that is being computed."""
RESUME_S: Final = 30.0
CHECKSUMS_S: Final = 300.0
SCORE_S: Final = 120.0

Result = TypeVar("Result")


class EngineControl(Protocol):
    """The control routes of one engine. Weights are read from a path on the engine's own machine."""

    engine_id: str

    async def weight_info(self) -> WeightInfo: ...

    async def pause(self) -> None:
        """No call in flight goes on over a load under the name that it began with. Harmless where it is paused."""
        ...

    async def load(self, path: Path, label: str, *, limit_s: float) -> None:
        """Replace the weights by those under `path`, called `label`, and drop every cached key and value. After
        `pause` only."""
        ...

    async def set_version(self, label: str) -> None:
        """Call the weights it holds `label`; calls in flight go on."""
        ...

    async def resume(self) -> None:
        """Harmless where it is not paused."""
        ...

    async def checksums(self) -> dict[str, str]:
        """The SHA-256 of each tensor by its plain name, as far as the engine knows any."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]], *, label: str | None = None) -> list[list[float]]:
        """The logprob of every token but the first of each sequence, at temperature 1.

        A sequence is shorter than the engine's context. `label`: the version that must answer; another is an
        EngineFailure of kind WRONG_VERSION. Never asked of a paused engine, which would not answer.
        """
        ...

    async def close(self) -> None: ...


async def publish(control: EngineControl, *, path: Path, label: str, load_timeout_s: float) -> None:
    """Put the weights under `path` into an engine and call them `label`: pause, load under that name, resume.

    An engine that was found paused is resumed, too. What it then serves is to be probed, after this returned. Cancelled
    or failing, it first resumes the engine, which takes up to `RESUME_S` and ten seconds more. Where even that fails,
    the failure says so in a note.
    """
    before = (await control.weight_info()).incarnation
    loading = False
    try:
        await _to_the_end(control.pause())
        loading = True
        await control.load(path, label, limit_s=load_timeout_s)
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


async def all_of(work: list[Coroutine[Any, Any, list[float]]]) -> list[list[float]]:
    """All results, in order; the first failure ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def wrong_version(who: str, found: set[str], label: str) -> EngineFailure:
    says = f"{who} answered with weights {', '.join(sorted(found))} instead of {label}"
    return EngineFailure(EngineFailureKind.WRONG_VERSION, says, retryable=True)
