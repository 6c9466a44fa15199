"""Start, answer, score and finish an episode: the environment's side of it.

Invariant: author code runs first and its result is written under a key after; whoever writes first wins, and what is
returned is what the row says. So a call that runs twice (a worker died in between) is a call that counts once, and
side effects carry `ctx.key`, which is the same at every try.
"""

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from temporalio import activity

from ..contracts.activities import (
    ANSWER_TURN,
    FINISH_EPISODE,
    RUN_TOOL,
    SCORE_EPISODE,
    START_EPISODE,
    AnswerTurn,
    EpisodePlan,
    EpisodeResult,
    FinishEpisode,
    RunTool,
    ScoreEpisode,
    StartEpisode,
    TurnAnswer,
)
from ..contracts.context import Context
from ..contracts.episode import Score, total_reward
from ..contracts.ids import EpisodeKey, rollout_workflow_id
from ..contracts.messages import preview
from ..contracts.reasons import FailureKind, RunAt
from ..contracts.records import STEP_INDEX, CallRecord, EpisodeFacts, EpisodeStart, TurnRecord
from ..contracts.states import EpisodeState
from ..contracts.tasks import Task
from ..contracts.workflows import WAKE
from ..db.admission import left_a_place
from ..db.deaths import InlineCall
from ..db.episodes import (
    episode_result,
    episode_scores,
    episode_view,
    finish_episode,
    save_calls,
    save_scores,
    start_episode,
)
from ..db.events import add_event
from ..db.tasks import load_opening
from ..environments.faults import EnvironmentProblem
from ..environments.loaded import LoadedEnvironment
from .entry import entered
from .failures import final, refuse_ended_run
from .services import Services
from .waking import wake


class EpisodeActivities:
    """Activities of the `workflows` role (as local ones) and of the `tools` role."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=START_EPISODE.name)
    @entered
    async def start_episode(self, request: StartEpisode) -> EpisodePlan:
        key = request.key
        facts = await self._services.memory.episode(key)
        if facts is None:
            facts = await self._begin(key)
        environment = await self._environment(facts)
        run = await self._services.run(key.run_id)
        spec = environment.spec
        return EpisodePlan(
            environment=facts.environment,
            task_key=facts.task_key,
            limits=spec.limits.tightened(run.config.environment(facts.environment).limits),
            opening=preview(facts.prompt[-1].text if facts.prompt else ""),
            step=spec.step,
            scorers=spec.scheduled_scorers,
            ended=episode_result(facts) if facts.status is not EpisodeState.RUNNING else None,
        )

    async def _begin(self, key: EpisodeKey) -> EpisodeFacts:
        opening = await load_opening(self._services.store, key.group)
        environment = await self._services.environment(key.run_id, opening.environment)
        task = await environment.task_from_data(opening.task.data, opening.task.info)
        first = "setup" if environment.spec.has_setup else "prompt"
        code = InlineCall(key.run_id, key.workflow_id, "start", f"{opening.environment}.{first}")
        async with self._services.inline.running(code, RunAt.INLINE) as apart:
            pool = self._services.processes if apart else None
            prompt, state = await environment.start(task, _context(key, opening.task_key, 0, "start"), pool=pool)
        start = EpisodeStart(key, prompt, state, environment.spec.version)
        return self._services.memory.keep(await start_episode(self._services.store, start))

    @activity.defn(name=ANSWER_TURN.name)
    @entered
    async def answer_turn(self, request: AnswerTurn) -> TurnAnswer:
        facts, environment, task = await self._open(request.key)
        refuse_ended_run(facts)
        turn = facts.turns[request.turn]
        state = facts.state
        made: list[CallRecord] = []
        for index in _missing(facts, request.turn, request.calls):
            record = await self._call(environment, facts, task, turn.turn, index, state)
            made.append(record)
            state = record.state if record.state is not None else state
        if request.step and _missing(facts, request.turn, [STEP_INDEX]):
            made.append(await self._step(environment, facts, task, turn, state))
        if made:
            facts = with_calls(facts, await save_calls(self._services.store, request.key, made))
        wanted = (*request.calls, *([STEP_INDEX] if request.step else []))
        return await self._answer(facts, environment, task, request.turn, wanted, last=request.last)

    @activity.defn(name=RUN_TOOL.name)
    @entered
    async def run_tool(self, request: RunTool) -> TurnAnswer:
        facts, environment, task = await self._open(request.key)
        if _missing(facts, request.turn, [request.index]):
            record = await self._call(environment, facts, task, request.turn, request.index, facts.state)
            facts = with_calls(facts, await save_calls(self._services.store, request.key, [record]))
        return await self._answer(facts, environment, task, request.turn, (request.index,), last=False)

    async def _call(
        self,
        environment: LoadedEnvironment,
        facts: EpisodeFacts,
        task: Task[Any],
        turn: int,
        index: int,
        state: dict[str, Any],
    ) -> CallRecord:
        """One tool call. Its own exceptions are its result; only a tool that could not be run at all raises."""
        began = time.monotonic()
        call = facts.turns[turn].message.tool_calls[index]
        run = await self._services.run(facts.key.run_id)
        code = _code(facts, f"turn {turn}, call {index}", call.name)
        async with self._services.inline.running(code, environment.placed_at(call)) as apart:
            outcome = await environment.run_call(
                index,
                call,
                task,
                state,
                _context(facts.key, facts.task_key, turn, str(index)),
                judge=run.judge,
                pool=self._services.processes,
                apart=apart,
            )
        return CallRecord(
            turn=turn,
            index=index,
            call=call,
            content=outcome.content,
            error=outcome.error,
            state=outcome.state,
            seconds=time.monotonic() - began,
        )

    async def _step(
        self,
        environment: LoadedEnvironment,
        facts: EpisodeFacts,
        task: Task[Any],
        turn: TurnRecord,
        state: dict[str, Any],
    ) -> CallRecord:
        began = time.monotonic()
        run = await self._services.run(facts.key.run_id)
        context = _context(facts.key, facts.task_key, turn.turn, "step")
        plan, pool = environment.spec.step, self._services.processes
        code = _code(facts, f"turn {turn.turn}, step", "step")
        async with self._services.inline.running(code, plan.run if plan else None) as apart:
            outcome = await environment.run_step(
                task, state, turn.message, context, judge=run.judge, pool=pool, apart=apart
            )
        return CallRecord(
            turn=turn.turn,
            index=STEP_INDEX,
            call=None,
            state=outcome.state,
            replies=tuple(outcome.step.messages),
            reward=outcome.step.reward,
            done=outcome.step.done,
            truncated=outcome.step.truncated,
            info=outcome.step.info,
            seconds=time.monotonic() - began,
        )

    async def _answer(
        self,
        facts: EpisodeFacts,
        environment: LoadedEnvironment,
        task: Task[Any],
        turn: int,
        wanted: Iterable[int],
        *,
        last: bool,
    ) -> TurnAnswer:
        records = [call for call in facts.calls if call.turn == turn and call.index in set(wanted)]
        condition = None
        if last and environment.spec.stops:
            code = _code(facts, f"turn {turn}, stop", " or ".join(environment.spec.stops))
            async with self._services.inline.running(code, RunAt.INLINE) as apart:
                pool = self._services.processes if apart else None
                condition = await environment.stop_condition(task, facts.state, episode_view(facts), pool=pool)
        texts = [text for record in records for text in (record.content, *(reply.text for reply in record.replies))]
        return TurnAnswer(
            said=preview(" · ".join(text for text in texts if text)),
            done=any(record.done for record in records),
            truncated=any(record.truncated for record in records),
            condition=condition,
        )

    @activity.defn(name=SCORE_EPISODE.name)
    @entered
    async def score_episode(self, request: ScoreEpisode) -> int:
        facts, environment, task = await self._open(request.key)
        known = {score.name for score in await episode_scores(self._services.store, request.key)}
        names = [name for name in request.names if name not in known]
        scores = await self._score(facts, environment, task, names)
        await save_scores(self._services.store, request.key, scores, environment.spec.version)
        return len(scores)

    async def _score(
        self, facts: EpisodeFacts, environment: LoadedEnvironment, task: Task[Any], names: Iterable[str]
    ) -> list[Score]:
        judge, pool = (await self._services.run(facts.key.run_id)).judge, self._services.processes
        episode = episode_view(facts)
        places = {scorer.name: scorer.plan.run for scorer in environment.spec.scorers}
        scores = []
        for name in names:
            context = _context(facts.key, facts.task_key, len(facts.turns), name)
            async with self._services.inline.running(_code(facts, "score", name), places.get(name)) as apart:
                score = await environment.score(
                    name, task, facts.state, episode, judge, context, pool=pool, apart=apart
                )
            scores.append(score)
        return scores

    @activity.defn(name=FINISH_EPISODE.name)
    @entered
    async def finish_episode(self, request: FinishEpisode) -> EpisodeResult:
        store = self._services.store
        facts = await self._services.memory.episode(request.key)
        if facts is None:  # it failed before it began: the ending makes its row
            return await finish_episode(
                store,
                request.key,
                stop=request.stop,
                failure=request.failure,
                reason=request.reason,
                reward=None,
            )
        if facts.status is not EpisodeState.RUNNING:
            return episode_result(facts)
        scores: list[Score] = []
        reward = None
        if request.failure is None:
            environment = await self._environment(facts)
            task = await environment.task_from_data(facts.task_data, facts.task_info)
            inline = [scorer.name for scorer in environment.spec.scorers if scorer.plan.run is RunAt.INLINE]
            scores = await self._score(facts, environment, task, inline)
            elsewhere = await episode_scores(store, facts.key) if environment.spec.scheduled_scorers else []
            reward = total_reward((*elsewhere, *scores))
        await self._clean_up(facts)
        self._services.memory.forget(facts.key)
        result = await finish_episode(
            store,
            request.key,
            stop=request.stop,
            failure=request.failure,
            reason=request.reason,
            reward=reward,
            scores=scores,
        )
        if facts.evaluation is None and result.valid and await left_a_place(store, facts.key.group):
            await wake(self._services, rollout_workflow_id(facts.key.run_id), WAKE)
        return result

    async def _clean_up(self, facts: EpisodeFacts) -> None:
        """Tear down on every exit. Its failure is an event, not the episode's: what was scored stands."""
        environment = await self._services.environment(facts.key.run_id, facts.environment)
        if not environment.spec.has_cleanup:
            return
        try:
            task = await environment.task_from_data(facts.task_data, facts.task_info)
            await environment.cleanup(task, facts.state, _context(facts.key, facts.task_key, len(facts.turns), "end"))
        except EnvironmentProblem as fault:
            data = {"episode": facts.key.workflow_id}
            await add_event(self._services.store, facts.key.run_id, "cleanup_failed", str(fault), data)

    async def _open(self, key: EpisodeKey) -> tuple[EpisodeFacts, LoadedEnvironment, Task[Any]]:
        facts = await self._services.memory.episode(key)
        if facts is None:
            raise final(FailureKind.INFRASTRUCTURE, f"the store has no episode {key.workflow_id}")
        environment = await self._environment(facts)
        return facts, environment, await environment.task_from_data(facts.task_data, facts.task_info)

    async def _environment(self, facts: EpisodeFacts) -> LoadedEnvironment:
        """The episode's environment, refused where its version is not the one the episode began with."""
        environment = await self._services.environment(facts.key.run_id, facts.environment)
        if facts.status is EpisodeState.RUNNING and environment.spec.version != facts.environment_version:
            raise final(
                FailureKind.ENVIRONMENT,
                f"{facts.key.workflow_id} began with version {facts.environment_version} of {facts.environment}, "
                f"this worker has version {environment.spec.version}; start a worker with the old one, or a new run",
            )
        return environment


def _context(key: EpisodeKey, task_key: str, turn: int, call: str) -> Context:
    return Context(key.run_id, task_key, key.member, turn, call)


def _code(facts: EpisodeFacts, call: str, function: str) -> InlineCall:
    return InlineCall(facts.key.run_id, facts.key.workflow_id, call, f"{facts.environment}.{function}")


def _missing(facts: EpisodeFacts, turn: int, wanted: Iterable[int]) -> list[int]:
    known = {call.index for call in facts.calls if call.turn == turn}
    return [index for index in wanted if index not in known]


def with_calls(facts: EpisodeFacts, records: list[CallRecord]) -> EpisodeFacts:
    """The facts after these calls were stored: the state is that of the last one that changed it."""
    states = [record.state for record in records if record.state is not None]
    state = states[-1] if states else facts.state
    return dataclasses.replace(facts, calls=(*facts.calls, *records), state=state)
