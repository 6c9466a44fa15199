"""The model call: exactly one stored completion per (episode, attempt, turn).

Invariant: tokens in, tokens out. The prompt sent is the segment's ids, to the letter; what was sampled is stored with
its logprobs and versions before this activity returns; a retry that finds the row returns it and pays nothing. Once
tokens are paid for, storing them is retried here, heartbeating, until it succeeds or the activity is cancelled. Where a
completion may be long, its tokens are kept while it grows, and a retry after the same prompt continues behind them.
"""

import asyncio
from dataclasses import replace
from typing import TypeAlias

from temporalio import activity

from ..contracts.activities import SAMPLE_TURN, SampleTurn, TurnResult
from ..contracts.ids import EpisodeKey
from ..contracts.reasons import FailureKind, FinishReason
from ..contracts.records import EpisodeFacts, PartialTurn, Sampled, TurnRecord, VersionSpan
from ..contracts.states import EpisodeState
from ..db.engines import put_version
from ..db.episodes import save_turn
from ..db.errors import WrongWeights
from ..db.partial import load_partial, prompt_digest, save_partial
from ..environments.loaded import LoadedEnvironment
from ..inference.control import UNVERSIONED
from ..inference.engines import Completion, SampleRequest, TokenEngine
from ..inference.errors import EngineFailure, EngineFailureKind
from ..inference.tokens import TokenRenderer
from .asking import ask_turn, known_prompt
from .entry import entered
from .failures import engine_failure, final, refuse_ended_run, waited_out
from .keeping import STREAMED_ABOVE, continued, ended, keeping
from .patience import patiently
from .prompts import Prompt, build_prompt, spoken, token_budget
from .restoring import set_aside
from .services import Services

_NAMED_WITHIN = 8
_NAMED_AGAIN_S = 0.25
"""Weights that are being loaded have no name for a moment, which is waited out before they count as foreign."""

Drawn: TypeAlias = tuple[Sampled, FinishReason, bool]
"""What was sampled, why it ended, and whether parts of it were kept."""


class ModelActivities:
    """Activities of the `model` role."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=SAMPLE_TURN.name)
    @entered
    async def sample_turn(self, request: SampleTurn) -> TurnResult:
        services = self._services
        key = request.key
        facts = await services.memory.episode(key)
        if facts is None:
            raise final(FailureKind.INFRASTRUCTURE, f"the store has no episode {key.workflow_id}")
        environment = await services.environment(key.run_id, facts.environment)
        if request.turn < len(facts.turns):
            return _result(facts.turns[request.turn], environment, prompt_tokens=0)
        _refuse_ended(facts)
        if not (await services.run(key.run_id)).config.tokens:
            answered = await ask_turn(services, facts, environment, request.turn)
            if answered is None:
                return TurnResult(overflow=True, prompt_tokens=known_prompt(facts))
            return _result(answered, environment, answered.told_prompt or 0)
        renderer = await services.renderer(key.run_id)
        prompt = build_prompt(facts, renderer, environment.spec.tool_specs())
        budget = await self._budget(facts, renderer, environment, len(prompt.ids))
        if budget <= 0:
            return TurnResult(overflow=True, prompt_tokens=len(prompt.ids))
        sampled = await self._sample(facts, request.turn, renderer, environment, prompt, budget)
        if sampled is None:
            return TurnResult(overflow=True, prompt_tokens=len(prompt.ids))
        stored = await self._store(key, *sampled)
        return _result(stored, environment, len(prompt.ids))

    async def _budget(
        self, facts: EpisodeFacts, renderer: TokenRenderer, environment: LoadedEnvironment, prompt: int
    ) -> int:
        """Tokens this completion may have."""
        run = await self._services.run(facts.key.run_id)
        return token_budget(run.config, facts, environment, prompt, renderer.context_limit)

    async def _sample(
        self,
        facts: EpisodeFacts,
        turn: int,
        renderer: TokenRenderer,
        environment: LoadedEnvironment,
        prompt: Prompt,
        budget: int,
    ) -> tuple[TurnRecord, bool] | None:
        """One completion as a record, and whether parts of it are in the store; None where the engine has no room.

        Raises what Temporal should do about a failure.
        """
        run = await self._services.run(facts.key.run_id)
        sampling = run.config.sampling_for(facts.evaluation)
        request = SampleRequest(
            request_id=f"{facts.key.workflow_id}/turn/{turn}/try/{activity.info().attempt}",
            prompt_ids=prompt.ids,
            sampling=sampling,
            max_tokens=budget,
            stop_token_ids=renderer.stop_token_ids,
        )
        try:
            draw = self._draw_long if budget > STREAMED_ABOVE else self._draw
            drawn = await draw(facts.key, turn, request)
            if drawn is None:
                return None
            sampled, finish, kept = drawn
            _refuse_unpinned(facts, sampled)
        except EngineFailure as failure:
            raise engine_failure(failure) from failure
        record = TurnRecord(
            turn=turn,
            segment=prompt.segment,
            opens_segment=prompt.opens,
            message=renderer.parse(
                sampled.sampled, turn=turn, prompt_ids=prompt.ids, tools=environment.spec.tool_specs()
            ),
            prompt_delta=prompt.delta,
            sampled=sampled.sampled,
            logprobs=sampled.logprobs,
            mask=[1] * len(sampled.sampled),
            finish=finish,
            spans=sampled.spans,
            temperature=sampling.temperature,
            engine_id=sampled.engine_id,
            incarnation=sampled.incarnation,
            request_id=request.request_id,
        )
        return record, kept

    async def _draw(self, key: EpisodeKey, turn: int, request: SampleRequest) -> Drawn | None:
        """One completion from an engine of the run. Raises EngineFailure."""
        pool = await self._services.engines(key.run_id)
        async with pool.lease(key.workflow_id) as engine:
            fitted = await self._fitted(key.run_id, engine, request)
            if fitted is None:
                return None
            completion = await engine.sample(fitted)
            spans = await self._spans(key.run_id, completion, engine.engine_id)
        return continued(None, completion, spans, engine.engine_id), completion.finish, False

    async def _draw_long(self, key: EpisodeKey, turn: int, request: SampleRequest) -> Drawn | None:
        """The same, streamed: begun where an earlier try broke off, and kept while it grows.

        Where all of it was kept, no engine is asked.
        """
        store = self._services.store
        digest = prompt_digest(request.prompt_ids)
        partial = await load_partial(store, key, turn)
        begun = partial.so_far if partial is not None and partial.prompt_digest == digest else None
        if begun is not None:
            finish = ended(begun.sampled, request.max_tokens, request.stop_token_ids)
            if finish is not None:
                return begun, finish, True
            request = replace(
                request,
                prompt_ids=request.prompt_ids + begun.sampled,
                max_tokens=request.max_tokens - len(begun.sampled),
            )
        pool = await self._services.engines(key.run_id)
        async with pool.lease(key.workflow_id) as engine:
            fitted = await self._fitted(key.run_id, engine, request)
            if fitted is None:
                return None if begun is None else (begun, FinishReason.LENGTH, True)

            async def grown(completion: Completion) -> Sampled:
                spans = await self._spans(key.run_id, completion, engine.engine_id)
                return continued(begun, completion, spans, engine.engine_id)

            async def save(completion: Completion) -> None:
                await save_partial(store, key, turn, PartialTurn(digest, await grown(completion)))

            async with keeping(save) as keeper:
                completion = await engine.sample(fitted, keeper)
            return await grown(completion), completion.finish, partial is not None or keeper.used

    async def _fitted(self, run_id: str, engine: TokenEngine, request: SampleRequest) -> SampleRequest | None:
        """The request as this engine may be sent it (`_within`), once it holds weights that the run samples from.

        Raises EngineFailure.
        """
        label = await engine.label()
        for _ in range(_NAMED_WITHIN):
            if label != UNVERSIONED:
                break
            await asyncio.sleep(_NAMED_AGAIN_S)
            label = await engine.label()
        if not await self._services.samples_from(run_id, label):
            await set_aside(self._services, run_id, engine.engine_id, label)
            raise EngineFailure(
                EngineFailureKind.WRONG_VERSION,
                f"engine {engine.engine_id} serves weights {label!r}, which this run never published; it gets no call "
                "until weights of this run are loaded into it",
                retryable=True,
            )
        return await _within(engine, request)

    async def _spans(self, run_id: str, completion: Completion, engine_id: str) -> tuple[VersionSpan, ...]:
        """The engine's labels as policy versions of the run. The first label ever seen is version 0."""
        spans = []
        for span in completion.spans:
            version = await patiently(self._version, run_id, span.label)
            if version is None:
                await set_aside(self._services, run_id, engine_id, span.label)
                raise EngineFailure(
                    EngineFailureKind.WRONG_VERSION,
                    f"the engine sampled with weights {span.label!r}, which this run never published",
                    retryable=True,
                )
            spans.append(VersionSpan(span.label, version, span.start, span.end, engine_id, completion.incarnation))
        return tuple(spans)

    async def _version(self, run_id: str, label: str) -> int | None:
        known = await self._services.version(run_id, label)
        if known is None:
            await put_version(self._services.store, run_id, 0, label)
            known = await self._services.version(run_id, label)
        return known

    async def _store(self, key: EpisodeKey, record: TurnRecord, had_partial: bool) -> TurnRecord:
        async def save() -> TurnRecord:
            stored, _ = await save_turn(self._services.store, key, record, had_partial=had_partial)
            return stored

        try:
            return await patiently(save)
        except WrongWeights as problem:
            raise waited_out("WrongWeights", str(problem)) from problem


async def _within(engine: TokenEngine, request: SampleRequest) -> SampleRequest | None:
    """The request with no more tokens than this engine has room for, which may have been started with a smaller context
    than its model's; None where the prompt alone fills that. Raises EngineFailure."""
    limit = await engine.context_limit()
    room = request.max_tokens if limit is None else limit - len(request.prompt_ids)
    if room <= 0:
        return None
    return request if room >= request.max_tokens else replace(request, max_tokens=room)


def _refuse_unpinned(facts: EpisodeFacts, sampled: Sampled) -> None:
    """An evaluation samples with the version that it is pinned to and no other."""
    others = sorted({span.version for span in sampled.spans} - {facts.pinned})
    if facts.pinned is not None and others:
        message = f"the evaluation is pinned to version {facts.pinned}, and version {others[0]} answered"
        raise EngineFailure(EngineFailureKind.WRONG_VERSION, message, retryable=True)


def _refuse_ended(facts: EpisodeFacts) -> None:
    """An ended run or episode buys no more tokens."""
    refuse_ended_run(facts)
    if facts.status is not EpisodeState.RUNNING:
        raise final(FailureKind.INFRASTRUCTURE, f"{facts.key.workflow_id} has ended already ({facts.status})")


def _result(record: TurnRecord, environment: LoadedEnvironment, prompt_tokens: int) -> TurnResult:
    return TurnResult(
        finish=record.finish,
        prompt_tokens=prompt_tokens,
        sampled_tokens=record.tokens,
        policy_version=record.policy_version,
        calls=environment.plan_calls(record.message),
        said=spoken(record.message),
    )
