"""One episode in this process, from prompt to score: no Temporal, no store, no tokens.

Invariant: what happens next is asked of `contracts.flow`, the same functions the durable workflow asks, so an episode
tried here takes the turns, limits and stops it will take there.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..contracts import flow
from ..contracts.context import Context, Judge
from ..contracts.episode import Episode, Score, ToolOutcome, Turn, total_reward
from ..contracts.flow import Move, Next, Spent
from ..contracts.ids import EpisodeKey
from ..contracts.limits import Limits
from ..contracts.messages import Message, ToolSpec
from ..contracts.reasons import FinishReason, RunAt
from ..contracts.tasks import Task
from .loaded import LoadedEnvironment

if TYPE_CHECKING:
    from .pool import ProcessPool


@dataclass(frozen=True)
class Reply:
    """What a policy said; token counts where it knows them."""

    message: Message
    finish: FinishReason = FinishReason.STOP
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None


class Policy(Protocol):
    """Whoever plays: a model, a script, a person."""

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ctx: Context) -> Reply:
        """The next message after `messages`."""
        ...


class Watcher:
    """Told of everything as it happens; override what is of interest."""

    def opened(self, prompt: Sequence[Message]) -> None: ...
    def said(self, turn: int, reply: Reply) -> None: ...
    def called(self, outcome: ToolOutcome) -> None: ...
    def answered(self, turn: Turn) -> None: ...
    def ended(self, episode: Episode, condition: str | None) -> None: ...


class _Playing:
    """The episode as it stands."""

    def __init__(
        self, env: LoadedEnvironment, task: Task[Any], watch: Watcher, pool: "ProcessPool | None", judge: Judge | None
    ) -> None:
        self.env = env
        self.task = task
        self.watch = watch
        self.pool = pool
        self.judge = judge
        self.prompt: tuple[Message, ...] = ()
        self.state: dict[str, Any] = {}
        self.turns: list[Turn] = []
        self.condition: str | None = None

    def episode(self, key: EpisodeKey) -> Episode:
        return Episode(key=key, prompt=self.prompt, turns=tuple(self.turns))

    async def answer(self, move: Move, turn: Turn, ctx: Context, key: EpisodeKey) -> Move:
        """Tools or `step` answer a turn; what follows from their answer."""
        done = truncated = False
        if move.next is Next.TOOLS:
            turn = turn.model_copy(update={"outcomes": await self._tools(turn.message, ctx)})
        else:
            result = await self.env.run_step(self.task, self.state, turn.message, ctx, judge=self.judge, pool=self.pool)
            self.state = result.state if result.state is not None else self.state
            step = result.step
            done, truncated = step.done, step.truncated
            turn = turn.model_copy(update={"replies": step.messages, "reward": step.reward, "info": dict(step.info)})
            self.watch.answered(turn)
        self.turns.append(turn)
        self.condition = await self.env.stop_condition(self.task, self.state, self.episode(key))
        return flow.after_answer(done=done, truncated=truncated, condition=self.condition)

    async def _tools(self, message: Message, ctx: Context) -> tuple[ToolOutcome, ...]:
        outcomes: list[ToolOutcome] = []
        for wave in flow.waves(self.env.plan_calls(message)):
            if all(plan.run is RunAt.INLINE for plan in wave):
                made = [await self._tool(plan.index, message, ctx) for plan in wave]
            else:
                made = await asyncio.gather(*(self._tool(plan.index, message, ctx) for plan in wave))
            for outcome in made:
                self.watch.called(outcome)
            outcomes.extend(made)
        return tuple(outcomes)

    async def _tool(self, index: int, message: Message, ctx: Context) -> ToolOutcome:
        call = message.tool_calls[index]
        result = await self.env.run_call(index, call, self.task, self.state, ctx, judge=self.judge, pool=self.pool)
        self.state = result.state if result.state is not None else self.state
        return ToolOutcome(call=call, content=result.content, error=result.error)

    async def scores(self, episode: Episode, ctx: Context) -> tuple[Score, ...]:
        names = [scorer.name for scorer in self.env.spec.scorers]
        return tuple(
            [
                await self.env.score(name, self.task, self.state, episode, self.judge, ctx, pool=self.pool)
                for name in names
            ]
        )


async def play(
    env: LoadedEnvironment,
    task: Task[Any],
    policy: Policy,
    *,
    limits: Limits | None = None,
    run_id: str = "try",
    member: int = 0,
    watch: Watcher | None = None,
    pool: "ProcessPool | None" = None,
    judge: Judge | None = None,
) -> Episode:
    """Play one episode to its end and score it. `limits` tighten the environment's own.

    Group rewards are not among the scores: they compare the episodes of a group. Raises EnvironmentProblem.
    """
    limits = env.limits.tightened(limits) if limits else env.limits
    key = EpisodeKey(run_id=run_id, group_no=0, member=member)
    ctx = Context(run_id=run_id, task_key=task.key, member=member, turn=0)
    playing = _Playing(env, task, watch or Watcher(), pool, judge)
    playing.prompt, playing.state = await env.start(task, ctx)
    playing.watch.opened(playing.prompt)
    try:
        spent = Spent()
        move = flow.before_model(spent, limits)
        while move.next is Next.MODEL:
            ctx = Context(run_id=run_id, task_key=task.key, member=member, turn=spent.turns)
            reply = await policy(playing.episode(key).messages, env.spec.tool_specs(), ctx)
            playing.watch.said(spent.turns, reply)
            sampled = reply.sampled_tokens or 0
            turn = Turn(index=spent.turns, message=reply.message, finish=reply.finish, sampled_tokens=sampled)
            spent = Spent(turns=spent.turns + 1, tokens=spent.tokens + sampled)
            move = flow.after_model(reply.finish, len(reply.message.tool_calls), env.spec.has_step)
            if move.next is Next.END:
                playing.turns.append(turn)
            else:
                move = await playing.answer(move, turn, ctx, key)
            if move.next is Next.MODEL:
                move = flow.before_model(spent, limits)
        episode = playing.episode(key).model_copy(update={"stop": move.stop})
        scores = await playing.scores(episode, ctx)
    finally:
        await env.cleanup(task, playing.state, ctx)
    episode = episode.model_copy(update={"scores": scores, "reward": total_reward(scores)})
    playing.watch.ended(episode, playing.condition)
    return episode
