"""One episode: start → (call the model → run tools or step the environment)* → score → finish.

Invariant: whatever happens (a cancel, a bug, a lost worker), the episode's row ends exactly once with a stop reason,
and everything said on the way is in rows before the next thing happens. This workflow holds counts and previews only.

Its page in the Temporal UI reads as the conversation: each activity's summary is the line that led to it.
"""

import asyncio
from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributeUpdate
from temporalio.exceptions import FailureError, is_cancelled_exception

from ..contracts import activities as act
from ..contracts import search
from ..contracts.activities import Activity, EpisodePlan, EpisodeResult, TurnAnswer, TurnResult
from ..contracts.flow import CallPlan, Move, Next, Spent, after_answer, after_model, before_model, waves
from ..contracts.messages import preview
from ..contracts.reasons import FailureKind, RunAt, StopReason
from ..contracts.workflows import EPISODE_WORKFLOW, EpisodeInput
from .calls import InputT, ResultT, quick, root_cause, scheduled, verdict

_REWARD = SearchAttributeKey.for_float(search.REWARD)
_STOP_REASON = SearchAttributeKey.for_keyword(search.STOP_REASON)
_POLICY_VERSION = SearchAttributeKey.for_int(search.POLICY_VERSION)


@workflow.defn(name=EPISODE_WORKFLOW, failure_exception_types=[Exception])
class EpisodeWorkflow:
    @workflow.init
    def __init__(self, start: EpisodeInput) -> None:
        self._key = start.key
        self._start_at = start.start_at
        self._spent = Spent()
        self._transcript: list[str] = []

    @workflow.run
    async def run(self, start: EpisodeInput) -> EpisodeResult:
        failure: tuple[FailureKind, str] | None = None
        stop = StopReason.FAILED
        cancelled: BaseException | None = None
        try:
            plan = await self._begin()
            if plan.ended is not None:
                return plan.ended
            stop = await self._play(plan)
            await self._score(plan)
        except (FailureError, asyncio.CancelledError) as error:
            stop = StopReason.FAILED
            failure, cancelled = _blame(error)
        result = await self._finish(stop, failure)
        if cancelled is not None:
            raise cancelled
        return result

    async def _begin(self) -> EpisodePlan:
        argument = act.StartEpisode(key=self._key)
        plan = await self._edge(act.START_EPISODE, argument, summary="start")
        self._write("prompt", plan.opening)
        return plan

    async def _play(self, plan: EpisodePlan) -> StopReason:
        """Turns until the episode stops by itself."""
        said = plan.opening
        while True:
            move = before_model(self._spent, plan.limits)
            if move.stop is not None:
                return move.stop
            turn = self._spent.turns
            with workflow.create_event_group(f"turn {turn}").scope():
                result = await scheduled(
                    act.SAMPLE_TURN, act.SampleTurn(key=self._key, turn=turn), summary=f"→ model: {said}"
                )
                if result.overflow:
                    return StopReason.CONTEXT_OVERFLOW
                self._count(result)
                move = after_model(result.finish, len(result.calls), plan.step is not None)
                if move.stop is not None:
                    return move.stop
                answer = await self._answer(plan, turn, move, result)
            move = after_answer(done=answer.done, truncated=answer.truncated, condition=answer.condition)
            if move.stop is not None:
                return move.stop
            said = answer.said

    def _count(self, result: TurnResult) -> None:
        self._spent = Spent(turns=self._spent.turns + 1, tokens=self._spent.tokens + result.sampled_tokens)
        self._write("assistant", result.said)

    async def _answer(self, plan: EpisodePlan, turn: int, move: Move, result: TurnResult) -> TurnAnswer:
        """What the environment answers to a message: its tools in order, or its `step`."""
        line = f"assistant: {result.said}"
        if move.next is Next.STEP and plan.step is not None:
            argument = act.AnswerTurn(key=self._key, turn=turn, step=True)
            if plan.step.run is RunAt.INLINE:
                answer = await quick(act.ANSWER_TURN, argument, summary=line)
            else:
                answer = await scheduled(act.ANSWER_TURN, argument, summary=line, queue=plan.step.queue)
            self._write("environment", answer.said)
            return answer
        rounds = waves(result.calls)
        answers: list[TurnAnswer] = []
        for wave in rounds:
            answers.append(await self._wave(turn, wave, last=wave is rounds[-1], line=line))
        said = preview(" · ".join(answer.said for answer in answers))
        self._write("tool", said)
        return answers[-1].model_copy(update={"said": said})

    async def _wave(self, turn: int, wave: tuple[CallPlan, ...], *, last: bool, line: str) -> TurnAnswer:
        if wave[0].run is RunAt.INLINE:
            indices = tuple(call.index for call in wave)
            argument = act.AnswerTurn(key=self._key, turn=turn, calls=indices, last=last)
            return await quick(act.ANSWER_TURN, argument, summary=line)
        answers = await asyncio.gather(
            *(
                scheduled(
                    act.RUN_TOOL,
                    act.RunTool(key=self._key, turn=turn, index=call.index),
                    summary=f"tool {call.name}",
                    queue=call.queue,
                )
                for call in wave
            )
        )
        said = preview(" · ".join(answer.said for answer in answers))
        if not last:
            return TurnAnswer(said=said)
        closing = await quick(act.ANSWER_TURN, act.AnswerTurn(key=self._key, turn=turn), summary="stop conditions")
        return closing.model_copy(update={"said": said})

    async def _score(self, plan: EpisodePlan) -> None:
        """Run the scorers that need a process or a queue of their own, side by side per queue."""
        queues: dict[str | None, list[str]] = {}
        for scorer in plan.scorers:
            queues.setdefault(scorer.queue, []).append(scorer.name)
        await asyncio.gather(
            *(
                scheduled(
                    act.SCORE_EPISODE,
                    act.ScoreEpisode(key=self._key, names=tuple(names)),
                    summary=f"score {', '.join(names)}",
                    queue=queue,
                )
                for queue, names in queues.items()
            )
        )

    async def _finish(self, stop: StopReason, failure: tuple[FailureKind, str] | None) -> EpisodeResult:
        kind, reason = failure or (None, None)
        argument = act.FinishEpisode(key=self._key, stop=stop, failure=kind, reason=reason)
        try:
            result = await self._edge(act.FINISH_EPISODE, argument, summary=f"finish: {kind or stop}")
        except FailureError as error:
            found = verdict(error)
            if found is None or kind is not None:
                raise
            return await self._finish(StopReason.FAILED, found)
        self._write("end", f"{result.failure or result.stop}, reward {result.reward}")
        attributes: list[SearchAttributeUpdate[Any]] = [_STOP_REASON.value_set(result.failure or result.stop)]
        if result.reward is not None:
            attributes.append(_REWARD.value_set(result.reward))
        if result.policy_version is not None:
            attributes.append(_POLICY_VERSION.value_set(result.policy_version))
        workflow.upsert_search_attributes(attributes)
        return result

    async def _edge(self, activity: Activity[InputT, ResultT], argument: InputT, *, summary: str) -> ResultT:
        """Start and finish: quick, unless the environment has to set something up and tear it down."""
        run = quick if self._start_at is RunAt.INLINE else scheduled
        return await run(activity, argument, summary=summary)

    def _write(self, who: str, text: str) -> None:
        """Keep the conversation readable on the workflow's page; the text is hostile, so it is fenced as code."""
        self._transcript.append(f"- **{who}** `{text.replace('`', chr(39))}`")
        workflow.set_current_details("\n".join(self._transcript[-60:]))


def _blame(error: BaseException) -> tuple[tuple[FailureKind, str], BaseException | None]:
    """Whose fault it was, and the cancellation to pass on if it was one."""
    if is_cancelled_exception(error):
        return (FailureKind.CANCELLED, "cancelled"), error
    return verdict(error) or (FailureKind.INFRASTRUCTURE, root_cause(error)), None
