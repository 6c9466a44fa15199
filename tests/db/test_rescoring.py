"""Scores that are given later stand beside the first ones; only a reward that was missing is filled in."""

from collections.abc import Sequence

import pytest
from atropos.contracts.episode import Score
from atropos.contracts.ids import EpisodeKey, GroupKey
from atropos.contracts.reasons import StopReason
from atropos.contracts.records import BadRecord
from atropos.contracts.states import GroupState
from atropos.db.audit import audit_run
from atropos.db.endings import finish_episode
from atropos.db.episodes import start_episode
from atropos.db.groups import close_group, load_group
from atropos.db.rescoring import closed_groups, count_closed_groups, save_rescored, scored_by
from atropos.db.store import Store
from atropos.tests.db.ledger import ledger
from atropos.tests.db.samples import LABEL, admitted, beginning, new_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NAMES = ("right", "kind")


def score(name: str, value: float | None, *, weight: float = 1.0, metric: bool = False) -> Score:
    return Score(name=name, value=value, weight=weight, metric=metric)


async def ended(store: Store, run_id: str, scores: Sequence[Score]) -> EpisodeKey:
    """An episode of a closed group that ended with these scores, as version `first`."""
    [group] = await admitted(store, run_id, size=1)
    key = group.key.episode(0)
    await start_episode(store, beginning(key))
    parts = [one for one in scores if not one.metric]
    whole = parts and all(one.value is not None for one in parts)
    reward = sum(one.weight * (one.value or 0.0) for one in parts) if whole else None
    await finish_episode(
        store, key, stop=StopReason.CONTEXT_OVERFLOW, failure=None, reason=None, reward=reward, scores=list(scores),
        scorer_version="first",
    )  # fmt: skip
    await close_group(store, group.key, [key], GroupState.SEALED, None, None)
    return key


async def reward_of(store: Store, key: EpisodeKey) -> float | None:
    facts = await load_group(store, key.group)
    assert facts.mean_reward == facts.members[0].reward
    return facts.members[0].reward


async def test_another_version_stands_beside_the_first_and_changes_no_reward(store: Store) -> None:
    key = await ended(store, await new_run(store), [score("right", 1.0)])
    assert await save_rescored(store, key.group, [(key, score("right", 0.25)), (key, score("new", 5.0))], "second")
    assert await scored_by(store, key.group, "second") == {(0, 0, "right"), (0, 0, "new")}
    assert await reward_of(store, key) == 1.0
    assert (await audit_run(store, key.run_id)).violations == ()


async def test_a_value_is_never_replaced_and_a_missing_one_is_filled_in(store: Store) -> None:
    key = await ended(store, await new_run(store), [score("right", None, weight=2.0), score("kind", 0.5)])
    assert await reward_of(store, key) is None
    assert await save_rescored(store, key.group, [(key, score("right", 0.75, weight=2.0))], "first")
    assert await save_rescored(store, key.group, [(key, score("right", 9.0)), (key, score("kind", 9.0))], "first")
    assert await reward_of(store, key) == 2.0
    assert (await audit_run(store, key.run_id)).violations == ()


async def test_groups_that_a_trainer_holds_and_groups_that_failed_get_none(store: Store) -> None:
    run_id = await ledger(store)
    assert await closed_groups(store, run_id, LABEL, -1, 100, unscored=False) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert await closed_groups(store, run_id, LABEL, 3, 2, unscored=False) == [4, 6]
    assert await count_closed_groups(store, run_id, LABEL, unscored=False) == 8
    assert await closed_groups(store, run_id, LABEL, -1, 100, unscored=True) == []
    for group_no, taken in ((0, True), (4, True), (6, False), (8, True)):
        group = GroupKey(run_id=run_id, group_no=group_no)
        assert await save_rescored(store, group, [(group.episode(0), score("new", 1.0))], "v2") is taken
        assert bool(await scored_by(store, group, "v2")) is taken
    assert (await audit_run(store, run_id)).violations == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_score_that_is_no_number_is_refused_and_nothing_beside_it_is_stored(store: Store, value: float) -> None:
    key = await ended(store, await new_run(store), [score("right", 1.0)])
    bad = Score.model_construct(name="bad", value=value, weight=1.0, metric=False)
    with pytest.raises(BadRecord):
        await save_rescored(store, key.group, [(key, score("good", 1.0)), (key, bad)], "second")
    assert await scored_by(store, key.group, "second") == set()


VALUES = st.none() | st.integers(-4, 4).map(float)
ROUND = st.tuples(st.sampled_from(("first", "second", "third")), st.dictionaries(st.sampled_from(NAMES), VALUES))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.fixed_dictionaries(dict.fromkeys(NAMES, VALUES)), rounds=st.lists(ROUND, max_size=5))
async def test_a_reward_is_the_sum_of_the_first_values_as_soon_as_there_is_one_of_each(
    store: Store, first: dict[str, float | None], rounds: list[tuple[str, dict[str, float | None]]]
) -> None:
    key = await ended(store, await new_run(store), [score(name, value) for name, value in first.items()])
    known = dict(first)
    for version, values in rounds:
        valued = [(key, score(name, value)) for name, value in values.items() if value is not None]
        assert await save_rescored(store, key.group, valued, version)
        known |= {name: value for name, value in values.items() if known[name] is None and value is not None}
    whole = None not in known.values()
    assert await reward_of(store, key) == (sum(known.values()) if whole else None)  # type: ignore[arg-type]
    assert (await audit_run(store, key.run_id)).violations == ()
