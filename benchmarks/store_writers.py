"""Writers as busy as workers are: episodes of six short turns, a statement for each call, group after group.

Invariant: what a writer has told (`Told`) was acknowledged by the store before, so after any number of deaths of
Postgres each of it must be there, and once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from atropos.contracts.episode import Score
from atropos.contracts.ids import EpisodeKey, GroupKey
from atropos.contracts.messages import assistant, user
from atropos.contracts.reasons import FinishReason, StopReason
from atropos.contracts.records import EpisodeStart, NewGroup, TurnRecord, VersionSpan
from atropos.contracts.states import GroupState
from atropos.db.admission import AdmissionState, admit
from atropos.db.episodes import finish_episode, save_turn, start_episode
from atropos.db.errors import StoreUnreachable
from atropos.db.groups import close_group
from atropos.db.store import Store
from atropos.tests.db.samples import LABEL

TURNS = 6
WEIGHTS = "base"
TOKENS = 64
MEMBERS = 4
_AGAIN_S = 0.1
T = TypeVar("T")


@dataclass
class Told:
    """What the store has acknowledged: episodes that ended, turns of each, groups that closed, calls that broke."""

    turns: set[tuple[EpisodeKey, int]] = field(default_factory=set)
    episodes: set[EpisodeKey] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    broken: int = 0


class Writer:
    """Plays groups of a run without an engine. What breaks is done again, as an activity is."""

    def __init__(self, store: Store, run_id: str, told: Told) -> None:
        self._store, self._run_id, self._told = store, run_id, told

    async def write(self) -> None:
        """Group after group, until it is cancelled."""
        while True:
            await self.group()

    async def group(self) -> None:
        async def propose(state: AdmissionState) -> list[NewGroup]:
            draw = state.environments[0].next_draw
            return [NewGroup(LABEL, "train", f"task-{draw}", {"question": draw}, {}, draw, MEMBERS)]

        groups = await self._patiently(lambda: admit(self._store, self._run_id, propose))
        for group in groups:
            await self._played(group.key)

    async def _played(self, group: GroupKey) -> None:
        members = [group.episode(member) for member in range(MEMBERS)]
        for key in members:
            await self._episode(key)
        await self._patiently(lambda: close_group(self._store, group, members, GroupState.SEALED, None, None))
        self._told.groups.add(group.group_no)

    async def _episode(self, key: EpisodeKey) -> None:
        start = EpisodeStart(key, (user("What is it?"),), {}, "v1")
        await self._patiently(lambda: start_episode(self._store, start))
        for record in map(_turn, range(TURNS)):
            await self._patiently(partial(save_turn, self._store, key, record))
            self._told.turns.add((key, record.turn))
        reward = float(key.member % 2)
        scores = [Score(name="right", value=reward, weight=1.0, metric=False)]
        await self._patiently(
            lambda: finish_episode(
                self._store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=reward, scores=scores
            )
        )
        self._told.episodes.add(key)

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await work()
            except StoreUnreachable:
                self._told.broken += 1
                await asyncio.sleep(_AGAIN_S)


def _turn(number: int) -> TurnRecord:
    return TurnRecord(
        turn=number,
        segment=0,
        opens_segment=number == 0,
        message=assistant(f"It is {number}."),
        prompt_delta=[7] * TOKENS,
        sampled=[8] * TOKENS,
        logprobs=[-0.5] * TOKENS,
        mask=[1] * TOKENS,
        finish=FinishReason.STOP,
        spans=(VersionSpan(WEIGHTS, 0, 0, TOKENS),),
        temperature=1.0,
        engine_id="engine",
        incarnation="first",
        request_id=f"request-{number}",
    )


@asynccontextmanager
async def busy(store: Store, run_id: str, writers: int) -> AsyncIterator[Told]:
    """So many writers at work for the block."""
    told = Told()
    tasks = [asyncio.create_task(Writer(store, run_id, told).write()) for _ in range(writers)]
    try:
        yield told
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
