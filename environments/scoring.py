"""Scores and stop conditions: what an environment says about an episode or a group.

Invariant: a score is a finite number or None. None (a judge that is away, too few members) is unscored and stays
so; it never becomes 0. A scorer sees a private copy of the final state and cannot change it.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..contracts.context import Context, Judge, JudgeUnavailable
from ..contracts.episode import Episode, Score
from ..contracts.reasons import RunAt
from ..contracts.tasks import Task
from .calling import AuthorCode, NoJudge, plain
from .faults import EnvironmentFault, author_code, nearest
from .marks import INLINE_SECONDS
from .results import GroupScores, StopOutcome, as_number, as_numbers
from .spec import GroupScorer, Scorer

if TYPE_CHECKING:
    from .pool import ProcessPool


class ScoreGiver(AuthorCode):
    """The rewards, metrics, group rewards and stop conditions of an environment."""

    async def stop_condition(
        self, task: Task[Any], state: dict[str, Any], episode: Episode, *, pool: "ProcessPool | None" = None
    ) -> str | None:
        """Name of the first stop condition that holds, None where none does; asked in the pool where one is given."""
        if pool is not None:
            ctx = Context(episode.key.run_id, task.key, episode.key.member, len(episode.turns) - 1, "stop")
            payload = {"state": state, "episode": episode.model_dump(mode="json"), **plain(task, ctx)}
            value = await self._in_pool(pool, "stop", payload, INLINE_SECONDS)
            return StopOutcome.model_validate(value).condition
        for name in self.spec.stops:
            offered = {"task": task, "state": self._state(state), "episode": episode}
            value = await self._call(name, getattr(self.environment, name), offered)
            if not isinstance(value, bool):
                raise EnvironmentFault(f"{self.name}.{name} returned {value!r}; a stop condition returns True or False")
            if value:
                return name
        return None

    async def score(
        self,
        name: str,
        task: Task[Any],
        state: dict[str, Any],
        episode: Episode,
        judge: Judge | None,
        ctx: Context,
        *,
        pool: "ProcessPool | None" = None,
        apart: bool = False,
    ) -> Score:
        """One reward or metric of a finished episode. A judge that is away leaves it unscored (None).

        `apart`: in the pool, wherever it was placed.
        """
        scorer = self._scorer(name)
        if pool is not None and (apart or scorer.plan.run is RunAt.PROCESS):
            payload = {"name": name, "state": state, "episode": episode.model_dump(mode="json"), **plain(task, ctx)}
            value = await self._in_pool(pool, "score", payload, scorer.plan.timeout_s, judge)
            return Score.model_validate(value)
        await self.ready()
        where = f"{self.name}.{name}"
        offered = {
            "task": task,
            "state": self._state(state),
            "episode": episode,
            "judge": judge or NoJudge(),
            "ctx": dataclasses.replace(ctx, call=name),
        }
        try:
            with author_code(where):
                value = await self._placed(scorer.plan, getattr(self.environment, name), offered)
        except JudgeUnavailable:
            value = None
        return Score(name=name, value=as_number(where, value), weight=scorer.weight, metric=scorer.metric)

    async def score_inline(
        self, task: Task[Any], state: dict[str, Any], episode: Episode, judge: Judge | None, ctx: Context
    ) -> list[Score]:
        """Every reward and metric that runs inline, in order of definition."""
        inline = [scorer for scorer in self.spec.scorers if scorer.plan.run is RunAt.INLINE]
        return [await self.score(scorer.name, task, state, episode, judge, ctx) for scorer in inline]

    async def score_group(
        self,
        task: Task[Any],
        episodes: Sequence[Episode],
        judge: Judge | None,
        *,
        pool: "ProcessPool | None" = None,
        apart: bool = False,
    ) -> dict[str, list[float | None]]:
        """Every group reward over the valid members of a group: name → one value each, in their order.

        With fewer members than its `min_valid`, or without its judge, a group reward leaves everyone unscored.
        """
        given = [
            await self.score_members(scorer.name, task, episodes, judge, pool=pool, apart=apart)
            for scorer in self.spec.group_scorers
        ]
        return {scores.name: list(scores.values) for scores in given}

    async def score_members(
        self,
        name: str,
        task: Task[Any],
        episodes: Sequence[Episode],
        judge: Judge | None,
        *,
        pool: "ProcessPool | None" = None,
        apart: bool = False,
    ) -> GroupScores:
        """One group reward over the valid members of a group. `apart`: in the pool, wherever it was placed."""
        scorer = self._group_scorer(name)
        unscored = GroupScores(name=name, values=(None,) * len(episodes))
        if len(episodes) < scorer.min_valid:
            return unscored
        ctx = Context(run_id=episodes[0].key.run_id, task_key=task.key, member=-1, turn=-1, call=name)
        if pool is not None and (apart or scorer.plan.run is RunAt.PROCESS):
            payload = {"name": name, "episodes": [e.model_dump(mode="json") for e in episodes], **plain(task, ctx)}
            value = await self._in_pool(pool, "group", payload, scorer.plan.timeout_s, judge)
            return GroupScores.model_validate(value)
        await self.ready()
        where = f"{self.name}.{name}"
        offered = {"task": task, "episodes": list(episodes), "judge": judge or NoJudge(), "ctx": ctx}
        try:
            with author_code(where):
                value = await self._placed(scorer.plan, getattr(self.environment, name), offered)
        except JudgeUnavailable:
            return unscored
        return GroupScores(name=name, values=as_numbers(where, value, len(episodes)))

    @cached_property
    def _scorers(self) -> dict[str, Scorer]:
        return {scorer.name: scorer for scorer in self.spec.scorers}

    def _scorer(self, name: str) -> Scorer:
        if name not in self._scorers:
            raise EnvironmentFault(f"{self.name} has no reward or metric {name!r}{nearest(name, self._scorers)}")
        return self._scorers[name]

    def _group_scorer(self, name: str) -> GroupScorer:
        for scorer in self.spec.group_scorers:
            if scorer.name == name:
                return scorer
        raise EnvironmentFault(f"{self.name} has no group reward {name!r}")
