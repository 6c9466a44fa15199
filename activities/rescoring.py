"""Scoring stored episodes again: a page of groups, the scorers of one group, the note at the end.

Invariant: scorers see what was stored and nothing else, so scoring again needs no engine and no tool. A score that this
version has given is not computed twice; one that cannot be computed is counted with its reason and never becomes 0.
"""

from collections.abc import Sequence
from typing import Any

from temporalio import activity

from ..contracts.context import Context
from ..contracts.episode import Episode, Score
from ..contracts.ids import EpisodeKey, GroupKey
from ..contracts.messages import preview
from ..contracts.reasons import FailureKind
from ..contracts.rescoring import (
    END_RESCORING,
    NEXT_GROUPS,
    RESCORE_GROUP,
    GroupNumbers,
    Rescored,
    RescoreEnd,
    RescoreGroup,
    RescorePage,
    Rescoring,
)
from ..contracts.states import EpisodeState
from ..contracts.tasks import Task
from ..db.deaths import InlineCall
from ..db.episodes import episode_scores, episode_view, load_episode
from ..db.events import add_event
from ..db.groups import load_group
from ..db.rescoring import closed_groups, count_closed_groups, save_rescored, scored_by
from ..db.tasks import load_task
from ..environments.faults import EnvironmentProblem, nearest
from ..environments.loaded import LoadedEnvironment
from .entry import entered
from .failures import final
from .services import Services

_PAGE = 32
"""Groups scored at once."""

Given = tuple[EpisodeKey, Score]


class RescoringActivities:
    """Activities of the `tools` role."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=NEXT_GROUPS.name)
    @entered
    async def next_rescored_groups(self, request: RescorePage) -> GroupNumbers:
        asked, store = request.rescoring, self._services.store
        environment = await self._environment(asked)
        version = asked.version or environment.spec.version
        total = None
        if request.begin:
            _check(environment, asked)
            total = await count_closed_groups(store, asked.run_id, asked.environment, unscored=asked.unscored)
            await add_event(
                store, asked.run_id, "rescoring", f"{_what(asked, version)} are given", _data(asked, version)
            )
        groups = await closed_groups(
            store, asked.run_id, asked.environment, request.after, _PAGE, unscored=asked.unscored
        )
        return GroupNumbers(groups=tuple(groups), version=version, total=total)

    @activity.defn(name=RESCORE_GROUP.name)
    @entered
    async def rescore_group(self, request: RescoreGroup) -> Rescored:
        asked, store, key = request.rescoring, self._services.store, request.key
        environment = await self._environment(asked)
        group = await load_group(store, key)
        counted = Rescored(groups=1)
        members = [
            member.key
            for member in group.members
            if member.state is EpisodeState.DONE and not (asked.unscored and member.reward is not None)
        ]
        if not members:
            return counted
        stored = await load_task(store, key.run_id, group.group.environment, group.group.task_key)
        try:
            task = await environment.task_from_data(stored.data, stored.info)
        except EnvironmentProblem as problem:
            return counted + _failed(problem, len(members))
        scoring = _GroupScoring(self._services, environment, asked, task, await scored_by(store, key, request.version))
        for member in members:
            await scoring.score_member(member)
        valid = [member.key for member in group.members if member.state is EpisodeState.DONE]
        await scoring.score_together(key, valid, set(members))
        if scoring.given and not await save_rescored(store, key, scoring.given, request.version):
            return counted + Rescored(leased=1)
        return counted + scoring.counted

    @activity.defn(name=END_RESCORING.name)
    @entered
    async def end_rescoring(self, request: RescoreEnd) -> Rescored:
        asked, done = request.rescoring, request.outcome
        data = _data(asked, request.version) | done.model_dump(mode="json")
        text = f"{_what(asked, request.version)}: {done.written} written over {done.groups} groups"
        await add_event(self._services.store, asked.run_id, "rescored", text, data)
        return done

    async def _environment(self, asked: Rescoring) -> LoadedEnvironment:
        """Whose scorers are applied. Raises EnvironmentProblem, and the verdict `environment` for an unknown label."""
        config = (await self._services.run(asked.run_id)).config
        labels = [one.label for one in config.environments]
        if asked.environment not in labels:
            near = nearest(asked.environment, labels)
            raise final(FailureKind.ENVIRONMENT, f"{asked.run_id} has no environment {asked.environment!r}{near}")
        if asked.code is None:
            return await self._services.environment(asked.run_id, asked.environment)
        environment = await self._services.load_code(asked.run_id, asked.environment, asked.code, asked.args)
        await environment.ready()
        return environment


class _GroupScoring:
    """The scorers of a rescoring over one group: `given` is to be written, `counted` says what came of the rest."""

    def __init__(
        self,
        services: Services,
        environment: LoadedEnvironment,
        asked: Rescoring,
        task: Task[Any],
        known: set[tuple[int, int, str]],
    ) -> None:
        self._services, self._environment, self._asked, self._task = services, environment, asked, task
        self._known = known
        self._episodes: dict[EpisodeKey, Episode] = {}
        self.given: list[Given] = []
        self.counted = Rescored()

    async def score_member(self, key: EpisodeKey) -> None:
        """Every reward and metric of one episode that this version has not given."""
        for scorer in self._environment.spec.scorers:
            if not self._wanted(scorer.name) or self._is_known(key, scorer.name):
                continue
            episode, state = await self._episode(key)
            context = Context(key.run_id, self._task.key, key.member, len(episode.turns), scorer.name)
            judge = (await self._services.run(key.run_id)).judge
            code = InlineCall(key.run_id, key.workflow_id, "rescore", f"{self._asked.environment}.{scorer.name}")
            try:
                async with self._services.inline.running(code, scorer.plan.run) as apart:
                    score = await self._environment.score(
                        scorer.name, self._task, state, episode, judge, context,
                        pool=self._services.processes, apart=apart,
                    )  # fmt: skip
            except EnvironmentProblem as problem:
                self.counted += _failed(problem)
                continue
            self._give([(key, score)])

    async def score_together(self, key: GroupKey, valid: Sequence[EpisodeKey], wanted: set[EpisodeKey]) -> None:
        """Every group reward over the valid members, for those of them that are to be scored."""
        run = await self._services.run(key.run_id)
        for scorer in self._environment.spec.group_scorers:
            missing = [one for one in valid if one in wanted and not self._is_known(one, scorer.name)]
            if not self._wanted(scorer.name) or not missing:
                continue
            episodes = [(await self._episode(one))[0] for one in valid]
            code = InlineCall(key.run_id, key.workflow_id, "rescore", f"{self._asked.environment}.{scorer.name}")
            try:
                async with self._services.inline.running(code, scorer.plan.run) as apart:
                    values = await self._environment.score_members(
                        scorer.name, self._task, episodes, run.judge, pool=self._services.processes, apart=apart
                    )
            except EnvironmentProblem as problem:
                self.counted += _failed(problem, len(missing))
                continue
            by_key = dict(zip(valid, values.values, strict=True))
            self._give([(one, Score(name=scorer.name, value=by_key[one], weight=scorer.weight)) for one in missing])

    def _wanted(self, name: str) -> bool:
        return not self._asked.scorers or name in self._asked.scorers

    def _is_known(self, key: EpisodeKey, name: str) -> bool:
        if (key.member, key.attempt, name) not in self._known:
            return False
        self.counted += Rescored(known=1)
        return True

    def _give(self, scores: list[Given]) -> None:
        valued = [one for one in scores if one[1].value is not None]
        self.given += valued
        self.counted += Rescored(written=len(valued), unscored=len(scores) - len(valued))

    async def _episode(self, key: EpisodeKey) -> tuple[Episode, dict[str, Any]]:
        """An episode with the scores that it has, and the environment's last state of it."""
        facts = await load_episode(self._services.store, key)
        if facts is None:
            raise final(FailureKind.INFRASTRUCTURE, f"the store has no episode {key.workflow_id}")
        if key not in self._episodes:
            scores = await episode_scores(self._services.store, key)
            self._episodes[key] = episode_view(facts, tuple(scores))
        return self._episodes[key], facts.state


def _failed(problem: EnvironmentProblem, times: int = 1) -> Rescored:
    return Rescored(failed=times, reason=preview(str(problem)))


def _check(environment: LoadedEnvironment, asked: Rescoring) -> None:
    """Raises the verdict `environment` where a scorer is not there."""
    spec = environment.spec
    names = [scorer.name for scorer in spec.scorers] + [scorer.name for scorer in spec.group_scorers]
    for name in asked.scorers:
        if name not in names:
            near = nearest(name, names) or f"; it has: {', '.join(names)}"
            raise final(FailureKind.ENVIRONMENT, f"{spec.name} has no reward or metric {name!r}{near}")


def _what(asked: Rescoring, version: str) -> str:
    """The scores of a rescoring, in words."""
    names = " and ".join(asked.scorers) or "all scores"
    whose = f" by {asked.code}" if asked.code else ""
    return f"{names} of {asked.environment} as version {version}{whose}"


def _data(asked: Rescoring, version: str) -> dict[str, Any]:
    return asked.model_dump(mode="json", exclude={"run_id"}) | {"version": version}
