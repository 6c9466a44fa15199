"""Keep the engines of a run at the version they should hold.

Invariant: an engine counts as holding a version only once it has proved it, on this life of it; until then what it
samples is provisional. What it actually holds is asked, never remembered, so an engine that was restarted is loaded
again by the same path that brings a new version. An engine that does not answer holds nobody up.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from temporalio import activity

from ..contracts.activities_training import PUBLISH, Publish, Published
from ..contracts.records import EngineRecord
from ..contracts.runfile import RunConfig
from ..contracts.states import EngineState, IllegalTransition, PublicationState, RunState, is_live
from ..db.engines import engines_of, set_engine_state
from ..db.events import add_event
from ..db.publishing import (
    Wanted,
    begin_publication,
    mark_published,
    publication_state,
    settle_publication,
    wanted,
)
from ..db.registration import first_user
from ..inference.control import UNVERSIONED, EngineControl, publish
from ..inference.engines import EngineAddress
from ..inference.errors import EngineFailure
from ..inference.probe import Judgement, Probe, Verdict, judge, judge_checksums, noise_of
from .entry import entered
from .services import Services

_log = logging.getLogger("atropos.publishing")
_WATCH_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.2
"""Between two looks at the rows: a new version is found within this."""
_ASK_EVERY_S: Final = 1.0
"""Between two questions to engines that held the right version a moment ago."""
_LAST_TRIES: Final = 3
_AGAIN_S: Final = 20.0
"""Before an engine that holds what it should not is given the same version again."""
_LOAD_S: Final = 1800.0

_OUT: Final = (EngineState.REMOVED, EngineState.DRAINED)
"""Taken out by a person."""
_GOOD: Final = (PublicationState.VERIFIED, PublicationState.UNVERIFIED)
_SETTLED = {
    Verdict.VERIFIED: PublicationState.VERIFIED,
    Verdict.UNVERIFIABLE: PublicationState.UNVERIFIED,
    Verdict.WRONG: PublicationState.FAILED,
}


@dataclass(frozen=True)
class _Held:
    """What came of one engine."""

    reached: bool
    problem: str | None


class PublishingActivities:
    """Activities of the `control` role."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._not_before: dict[tuple[str, str, int], float] = {}

    @activity.defn(name=PUBLISH.name)
    @entered
    async def publish(self, request: Publish) -> Published:
        store, started, asked, held = self._services.store, time.monotonic(), 0.0, -1
        problem: str | None = None
        while True:
            target = await wanted(store, request.run_id)
            if target is not None and not is_live(target.run_state):
                if target.run_state is RunState.COMPLETED and not target.published:
                    await self._last(request.run_id, target)
                return Published(version=target.version, ended=True)
            now = time.monotonic()
            if target is not None and (held != target.version or now - asked >= _ASK_EVERY_S):
                found = await self._bring(request.run_id, target)
                asked = time.monotonic()
                problem = "; ".join(one.problem for one in found if one.problem) or None
                held = target.version if any(one.reached for one in found) else -1
                if held == target.version:
                    news = await mark_published(store, request.run_id, target.version)
                    if news or request.known != target.version:
                        return Published(version=target.version, problem=problem)
            if now - started >= _WATCH_S:
                return Published(version=None if held < 0 else held, problem=problem)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _last(self, run_id: str, target: Wanted) -> None:
        """A run that ends leaves its last version in the engines that can be reached; it waits for no other.

        An engine that failed a moment ago is asked again at once, and one that is just coming back has three seconds.
        """
        for _ in range(_LAST_TRIES):
            self._not_before = {key: until for key, until in self._not_before.items() if key[0] != run_id}
            if any(one.reached for one in await self._bring(run_id, target)):
                await mark_published(self._services.store, run_id, target.version)
                return
            await asyncio.sleep(_ASK_EVERY_S)

    async def _bring(self, run_id: str, target: Wanted) -> list[_Held]:
        """Ask every engine what it holds, and load those that hold something else, one at a time."""
        records = [one for one in await engines_of(self._services.store, run_id) if one.state not in _OUT]
        config = (await self._services.run(run_id)).config
        return [await self._engine(run_id, config, record, target, len(records) > 1) for record in records]

    async def _engine(
        self, run_id: str, config: RunConfig, record: EngineRecord, target: Wanted, others: bool
    ) -> _Held:
        store = self._services.store
        secret = self._services.secret(record.api_key_env) if record.api_key_env else None
        control = self._services.control(EngineAddress.of(record, secret))
        try:
            info = await control.weight_info()
            known = await publication_state(store, run_id, record.engine_id, info.incarnation, target.version)
            if info.label == target.label and (known in _GOOD or (known is None and _begun_with(target))):
                if record.state != EngineState.READY:
                    await set_engine_state(store, run_id, record.engine_id, EngineState.READY, None)
                return _Held(True, None)
            if info.label == target.label and known is PublicationState.LOADING:
                await control.resume()  # it is named after the load and before it goes on
                return await self._prove(run_id, config, record, control, info.incarnation, target, time.monotonic())
            if target.path is None or (target.borrowed and await first_user(store, record.url) != run_id):
                return _Held(False, f"{record.url} holds {info.label}, not {target.label}")
            key = (run_id, record.engine_id, target.version)
            if known is PublicationState.FAILED and time.monotonic() < self._not_before.get(key, 0.0):
                return _Held(False, f"{record.url}: {record.reason or 'it does not hold what it should'}")
            self._not_before[key] = time.monotonic() + _AGAIN_S
            if others and record.state == EngineState.READY:
                await set_engine_state(store, run_id, record.engine_id, EngineState.DRAINING, "new weights are loaded")
            return await self._load(run_id, config, record, control, info.incarnation, target)
        except EngineFailure as failure:
            await self._down(run_id, record, failure.message, target)
            return _Held(False, failure.message)
        except IllegalTransition:
            return _Held(False, f"{record.url} was taken out meanwhile")
        finally:
            await control.close()

    async def _load(
        self,
        run_id: str,
        config: RunConfig,
        record: EngineRecord,
        control: EngineControl,
        incarnation: str,
        target: Wanted,
    ) -> _Held:
        """Publish to one engine, and have it prove what it holds."""
        store, here = self._services.store, (run_id, record.engine_id, incarnation, target.version)
        await begin_publication(store, *here)
        began = time.monotonic()
        try:
            await publish(control, path=Path(target.path or ""), label=target.label, load_timeout_s=_LOAD_S)
        except EngineFailure as failure:
            await settle_publication(store, *here, PublicationState.FAILED, failure.message)
            raise
        return await self._prove(run_id, config, record, control, incarnation, target, began)

    async def _prove(
        self,
        run_id: str,
        config: RunConfig,
        record: EngineRecord,
        control: EngineControl,
        incarnation: str,
        target: Wanted,
        began: float,
    ) -> _Held:
        """Probe an engine that was given the version, and settle. Where whoever gave it died before that, what it
        sampled since then is kept like this, and nothing is loaded twice."""
        store, here = self._services.store, (run_id, record.engine_id, incarnation, target.version)
        try:
            found = await _proved(control, config, target)
        except EngineFailure as failure:
            await settle_publication(store, *here, PublicationState.FAILED, failure.message)
            raise
        state = _SETTLED[found.verdict]
        await settle_publication(store, *here, state, found.reason, found.distance_after)
        data = {"version": target.version, "engine": record.engine_id, "verdict": str(found.verdict)}
        data |= {"seconds": f"{time.monotonic() - began:.2f}"}
        if state is PublicationState.FAILED:
            reason = f"version {target.version}: {found.reason}"
            await _disown(control)
            await set_engine_state(store, run_id, record.engine_id, EngineState.QUARANTINED, reason)
            await add_event(store, run_id, "quarantined", f"{record.url}: {reason}", data)
            return _Held(False, f"{record.url}: {reason}")
        await set_engine_state(store, run_id, record.engine_id, EngineState.READY, None, target.label, incarnation)
        await add_event(
            store, run_id, "published", f"{record.url} holds version {target.version}: {found.reason}", data
        )
        return _Held(True, None)

    async def _down(self, run_id: str, record: EngineRecord, reason: str, target: Wanted) -> None:
        """An engine that was ready does not answer; one in quarantine stays there, and so does one taken out."""
        store = self._services.store
        if any(one.state in _OUT for one in await engines_of(store, run_id) if one.engine_id == record.engine_id):
            return
        if record.state != EngineState.QUARANTINED:
            await set_engine_state(store, run_id, record.engine_id, EngineState.DOWN, reason)
        elif target.borrowed:
            reason = f"weights {target.label!r} could not be loaded into it again from {target.path}: {reason}"
            await set_engine_state(store, run_id, record.engine_id, EngineState.QUARANTINED, reason)


def _begun_with(target: Wanted) -> bool:
    """Whether engines hold it from their start, and it is whatever they call so."""
    return target.path is None or target.borrowed


async def _disown(control: EngineControl) -> None:
    """Take the name from weights that are not what it says: what still samples with them counts as no version's, even
    where the version is loaded again, and rightly, while it runs."""
    try:
        await control.set_version(UNVERSIONED)
    except EngineFailure as failure:
        _log.warning("wrong weights keep their name: %s", failure.message)


async def _proved(control: EngineControl, config: RunConfig, target: Wanted) -> Judgement:
    """What the engine computes, measured directly, once it serves again. Raises EngineFailure."""
    material = target.probe or {}
    verify = config.publish.verify
    found = Judgement(Verdict.UNVERIFIABLE, "there is nothing to compare it with")
    if verify != "checksum" and material.get("sequences"):
        probe = _probe_of(material)
        measured = await control.score(probe.sequences, label=target.label)
        found = judge(probe, measured, noise_of(target.noise if target.version else None))
    if found.verdict is not Verdict.UNVERIFIABLE or verify == "logprobs" or not material.get("checksums"):
        return found
    digests = judge_checksums(material["checksums"], await control.checksums())
    if digests.verdict is Verdict.WRONG and verify == "auto" and found.distance_after is not None:
        # Another number format gives other digests of the same weights, and the logprobs did not contradict.
        return Judgement(Verdict.UNVERIFIABLE, f"{found.reason}; {digests.reason}", found.distance_after)
    return Judgement(digests.verdict, digests.reason, found.distance_after)


def _probe_of(material: dict[str, Any]) -> Probe:
    def rows(name: str) -> Any:
        return tuple(tuple(row) for row in material[name])

    return Probe(rows("sequences"), rows("before"), rows("after"))
