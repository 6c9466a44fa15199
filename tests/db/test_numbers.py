"""Numbers that are finite and still overflow sums are refused at every door; those within bounds overflow nothing."""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from atropos import Step
from atropos.cli.run_show import list_facts
from atropos.contracts.episode import Score, total_reward
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.messages import user
from atropos.contracts.numbers import LARGEST, why_no_number
from atropos.contracts.reasons import StopReason
from atropos.contracts.records import BadRecord
from atropos.contracts.runfile import RunFileError
from atropos.contracts.states import GroupState
from atropos.db.audit import audit_run
from atropos.db.endings import finish_episode
from atropos.db.episodes import save_calls, save_turn, start_episode
from atropos.db.errors import Refused, Unreadable
from atropos.db.groups import close_group, load_group
from atropos.db.importing_lines import parse_line
from atropos.db.importing_messages import BadLine
from atropos.db.ingest import PlayedEpisode, store_group
from atropos.db.rescoring import save_rescored
from atropos.db.runs import get_run, list_runs, tune_run
from atropos.db.scores import save_scores
from atropos.db.store import Store
from atropos.environments.faults import BadEnvironment, EnvironmentFault
from atropos.environments.marks import reward
from atropos.environments.results import as_number, as_numbers
from atropos.tests.db.samples import LABEL, admitted, beginning, call, new_group, new_run, rows, run_config, turn
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

BEYOND = st.one_of(
    st.floats(min_value=math.nextafter(LARGEST, math.inf), allow_nan=False),
    st.floats(max_value=-math.nextafter(LARGEST, math.inf), allow_nan=False),
    st.just(math.nan),
)
WITHIN = st.floats(min_value=-LARGEST, max_value=LARGEST)
DATABASE = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def weighted(weight: float) -> None:
    @reward(weight=weight)
    def scorer(self: Any) -> float:
        return 0.0


def of_environments(value: float) -> dict[str, Callable[[], object]]:
    return {
        "a step": lambda: Step(reward=value),
        "a score": lambda: as_number("f", value),
        "a group's score": lambda: as_numbers("f", [0.0, value], 2),
        "a weight": lambda: weighted(value),
        "an import": lambda: parse_line(json.dumps({"messages": SAID, "reward": value}).encode()),
        "a run file": lambda: run_config(environments=[{"id": LABEL, "weight": abs(value)}]),
    }


SAID = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


@settings(deadline=None)
@given(value=BEYOND)
@example(1e300)
def test_what_comes_from_people_and_their_code_is_refused_in_one_sentence(value: float) -> None:
    for door, give in of_environments(value).items():
        with pytest.raises((BadEnvironment, EnvironmentFault, BadLine, RunFileError, ValueError)) as refused:
            give()
        assert "must" in str(refused.value) or "should" in str(refused.value), door


@settings(deadline=None)
@given(value=WITHIN.filter(bool))
def test_what_is_within_bounds_passes_every_door(value: float) -> None:
    for give in of_environments(value).values():
        give()


@pytest.mark.parametrize("value", [10**400, -(10**400), Fraction(10**400)])
def test_a_number_that_is_no_float_at_all_is_refused_too(value: Any) -> None:
    assert why_no_number(value) == "it must be finite"
    with pytest.raises(EnvironmentFault, match="it must be finite"):
        as_number("f", value)


def scored(value: float, weight: float = 1.0) -> Score:
    return Score(name="right", value=value, weight=weight)


def played(*scores: Score) -> PlayedEpisode:
    return PlayedEpisode((user("?"),), {}, "v1", [turn(0, 0)], [], StopReason.ANSWERED, scores, "v1")


@DATABASE
@given(value=BEYOND)
@example(1e300)
async def test_the_store_refuses_them_whoever_writes(store: Store, value: float) -> None:
    run_id = await new_run(store)
    [group] = await admitted(store, run_id, size=1)
    key = group.key.episode(0)
    await start_episode(store, beginning(key))
    await save_turn(store, key, turn())
    bad = [scored(value), scored(1.0, weight=value), Score(name="m", value=value, metric=True)]
    for one in bad:
        for write in (
            save_scores(store, key, [one], "v1"),
            save_rescored(store, key.group, [(key, one)], "v2"),
            finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=None, scores=[one]),
        ):
            with pytest.raises(BadRecord, match="it must"):
                await write
        with pytest.raises(BadRecord, match="it must"):
            await store_group(store, run_id, new_group(7, size=1), [played(one)])
    with pytest.raises(BadRecord, match="it must"):
        await save_calls(store, key, [call(0, 0, reward=value)])
    with pytest.raises(Refused, match="weight"):
        await tune_run(store, run_id, None, {LABEL: abs(value)})


async def test_the_episodes_reward_is_bounded_as_well(store: Store) -> None:
    [group] = await admitted(store, await new_run(store), size=1)
    key = group.key.episode(0)
    await start_episode(store, beginning(key))
    with pytest.raises(BadRecord, match="the reward is 1e"):
        await finish_episode(store, key, stop=StopReason.ANSWERED, failure=None, reason=None, reward=1e300)


@DATABASE
@given(parts=st.lists(st.tuples(WITHIN, WITHIN), min_size=2, max_size=4))
@example([(LARGEST, LARGEST)] * 4)
@example([(LARGEST, LARGEST), (-LARGEST, LARGEST)])
async def test_a_group_of_the_largest_numbers_closes_and_reads(store: Store, parts: list[tuple[float, float]]) -> None:
    run_id = await new_run(store)
    [group] = await admitted(store, run_id, size=len(parts))
    members: list[EpisodeKey] = []
    for member, (value, weight) in enumerate(parts):
        key = group.key.episode(member)
        await start_episode(store, beginning(key))
        scores = [scored(value, weight)]
        await finish_episode(
            store, key, stop=StopReason.CONTEXT_OVERFLOW, failure=None, reason=None, reward=total_reward(tuple(scores)),
            scores=scores,
        )  # fmt: skip
        members.append(key)
    await close_group(store, group.key, members, GroupState.SEALED, None, None)
    facts = await load_group(store, group.key)
    assert facts.mean_reward is not None
    assert math.isfinite(facts.mean_reward)
    for view in ("sft_examples", "dpo_pairs", "episode_outcomes", "run_progress"):
        await rows(store, f"SELECT * FROM {view} WHERE run_id = %s", run_id)
    assert (await audit_run(store, run_id)).violations == ()


async def test_a_run_that_cannot_be_read_hides_no_other_one(store: Store) -> None:
    good, bad = await new_run(store), await new_run(store)
    spoil = "UPDATE runs SET config = jsonb_set(config, '{environments,0,weight}', '1e300') WHERE run_id = %s"
    await rows(store, f"{spoil} RETURNING 1", bad)
    listed = {fact["run"]: fact["reason"] for fact in list_facts(await list_runs(store))}
    assert listed[good] is None
    assert listed[bad].startswith(f"This build cannot read the file of {bad} (environments.0.weight: ")
    with pytest.raises(Unreadable, match=r"environments\.0\.weight"):
        await get_run(store, bad)
    assert await get_run(store, good) is not None
