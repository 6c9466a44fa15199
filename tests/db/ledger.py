"""A run that trained, written through the store's own functions: something of every state that a group can end in."""

from collections.abc import Sequence
from typing import Any

from atropos.contracts.episode import Score
from atropos.contracts.ids import weight_label
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.records import STEP_INDEX, VersionSpan
from atropos.contracts.sampling import Sampling
from atropos.contracts.states import GroupState, PublicationState
from atropos.db.admission import insert_evaluation_groups
from atropos.db.batches import Leased, claim_batch, commit_step, lease_batch
from atropos.db.endings import finish_episode
from atropos.db.engines import engine_id, put_engines
from atropos.db.episodes import save_calls, save_scores, start_episode
from atropos.db.evaluations import finish_evaluation, start_evaluation
from atropos.db.events import add_event
from atropos.db.groups import GroupRow, close_group
from atropos.db.models import Base
from atropos.db.partial import save_partial
from atropos.db.publishing import add_first_version, begin_publication, settle_publication
from atropos.db.runs import get_run
from atropos.db.store import Store
from atropos.db.turns import save_turn
from atropos.tests.db.samples import LABEL, admitted, beginning, call, new_group, new_run, partial, rows, started, turn

MEMBERS = 2
ENGINE = engine_id("http://127.0.0.1:8000/v1")
LIFE = "first"


async def ledger(store: Store) -> str:
    """A run after two steps.

    Groups 0 and 1 made version 1; 2 and 3, while 4 was filtered, version 2; 5 failed, 6 and 7 are leased, 8 is sealed.
    Each has one member with reward 0, which answered, and one with 1, which the environment's step ended, but the one
    without signal.
    """
    trainer = {"kind": "builtin", "steps": 9}
    run_id = await new_run(store, trainer=trainer, batch={"groups": 2})
    row = await get_run(store, run_id)
    assert row is not None
    await put_engines(store, run_id, row.config.engines)
    await add_first_version(store, run_id, weight_label(run_id, 0), "tiny", None, {})
    groups = await admitted(store, run_id, 9)
    await published(store, run_id, 0)
    await sealed(store, groups[0:2], 0)
    await stepped(store, run_id)
    await published(store, run_id, 1)
    await sealed(store, groups[2:4], 1)
    await played(store, groups[4], 1, rewards=(1.0, 1.0))
    await closed(store, groups[4], GroupState.SEALED, signal=False)
    await stepped(store, run_id)
    await begin_publication(store, run_id, ENGINE, LIFE, 2)
    await played(store, groups[5], 2)  # provisional for good, and nobody minds
    await settle_publication(store, run_id, ENGINE, LIFE, 2, PublicationState.FAILED, "it holds something else")
    await closed(store, groups[5], GroupState.FAILED, FailureKind.ENGINE)
    await sealed(store, groups[6:8], 1)
    assert isinstance(await lease_batch(store, run_id), Leased)
    await sealed(store, groups[8:], 1)
    return run_id


async def everything(store: Store) -> str:
    """The same run with an evaluation and an episode that is playing: rows in every table."""
    run_id = await ledger(store)
    what: dict[str, Any] = {"environment": LABEL, "split": "eval", "tasks": 2, "samples": 2, "sampling": Sampling()}
    await start_evaluation(store, run_id, "last", **what)
    asked = [new_group(draw, split="eval", evaluation="last", key=f"eval-{draw}", size=2) for draw in range(2)]
    for group in await insert_evaluation_groups(store, run_id, "last", asked):
        members = [group.key.episode(member) for member in range(2)]
        for member in members:
            await start_episode(store, beginning(member))
            await save_turn(store, member, turn())
            await finish_episode(store, member, stop=StopReason.ANSWERED, failure=None, reason=None, reward=1.0)
        await close_group(store, group.key, members, GroupState.SEALED, None, None)
    await finish_evaluation(store, run_id, "last")
    key = await started(store, run_id)
    await save_turn(store, key, turn())
    await save_turn(store, key, turn(tokens=2))  # another was first
    await save_partial(store, key, 1, partial())
    await save_calls(store, key, [call(state={"text": "long " * 1000})])
    await save_scores(store, key, [Score(name="right", value=1.0)], "v1")
    await add_event(store, run_id, "note", "something happened")
    for table in Base.metadata.tables:
        assert await rows(store, f"SELECT FROM {table} WHERE run_id = %s LIMIT 1", run_id), table
    return run_id


async def published(store: Store, run_id: str, version: int) -> None:
    await begin_publication(store, run_id, ENGINE, LIFE, version)
    await settle_publication(store, run_id, ENGINE, LIFE, version, PublicationState.VERIFIED)


async def sealed(store: Store, groups: list[GroupRow], version: int) -> None:
    for group in groups:
        await played(store, group, version)
        await closed(store, group, GroupState.SEALED)


async def closed(
    store: Store, group: GroupRow, state: GroupState, failure: FailureKind | None = None, signal: bool = True
) -> None:
    members = [group.key.episode(member) for member in range(MEMBERS)]
    await close_group(store, group.key, members, state, failure, None, has_signal=lambda _: signal)


async def played(store: Store, group: GroupRow, version: int, rewards: Sequence[float] = (0.0, 1.0)) -> None:
    label = weight_label(group.key.run_id, version)
    for member, reward in enumerate(rewards):
        key = group.key.episode(member)
        await start_episode(store, beginning(key))
        spans = (VersionSpan(label, version, 0, 3),)
        await save_turn(store, key, turn(spans=spans, engine_id=ENGINE, incarnation=LIFE))
        if member:
            await save_calls(store, key, [call(0, STEP_INDEX, call=None, content="", done=True)])
        await finish_episode(
            store,
            key,
            stop=StopReason.DONE if member else StopReason.ANSWERED,
            failure=None,
            reason=None,
            reward=reward,
            scores=[
                Score(name="right", value=reward, weight=1.0, metric=False),
                Score(name="tries", value=3.0, weight=1.0, metric=True),
            ],
            scorer_version="v1",
        )


async def stepped(store: Store, run_id: str) -> None:
    leased = await lease_batch(store, run_id)
    assert isinstance(leased, Leased)
    claim = await claim_batch(store, run_id, leased.batch_no, "me")
    assert claim is not None
    assert await commit_step(store, run_id, claim, path="there", digest="d", metrics={"loss": -0.5}) is not None
