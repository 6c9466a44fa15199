"""Lists and curves of a run equal what its rows say, however they were read."""

from datetime import UTC, datetime, timedelta

from atropos.contracts.sampling import Sampling
from atropos.contracts.states import EpisodeState, GroupState
from atropos.db.admission import insert_evaluation_groups
from atropos.db.batches import lease_batch
from atropos.db.curves import MOST_PLACES, RunCurves, Sums, merged, rates, width_for
from atropos.db.evaluations import evaluation_groups, start_evaluation
from atropos.db.overview import group_answers, group_lines, run_figures, run_heads
from atropos.db.store import Store
from atropos.db.summary import run_summary
from hypothesis import given
from hypothesis import strategies as st

from .samples import LABEL, admitted, claimed, closed, committed, new_group, new_run, played, training_run

NOW = datetime.now(UTC)


async def test_runs_come_newest_first_with_what_they_have_done(store: Store) -> None:
    first = await training_run(store, steps=7)
    second = await new_run(store)
    for rewards in ((0.0, 1.0), (1.0, 0.0), (0.5, 0.5)):
        await closed(store, first, rewards)
    await lease_batch(store, first)
    await committed(store, first, await claimed(store, first))
    heads = await run_heads(store, 2)
    assert [(head.run_id, head.wanted_steps) for head in heads] == [(second, None), (first, 7)]
    assert [head.run_id for head in await run_heads(store, 1, 1)] == [first]
    figures = await run_figures(store, [first, second])
    assert (figures[first].steps, figures[first].episodes, figures[first].rewards) == (1, 6, (0.5, 0.5, 0.5))
    assert (figures[second].steps, figures[second].episodes, figures[second].rewards) == (0, 0, ())
    assert await run_figures(store, []) == {}


async def test_the_mean_reward_of_a_list_of_runs_is_the_one_of_their_summaries(store: Store) -> None:
    run_id, other = await training_run(store), await new_run(store)
    for rewards in ((0.25, None), (1.0, 0.25)):
        await closed(store, run_id, rewards)
    await start_evaluation(
        store, run_id, "held-out", tasks=1, samples=1, environment=LABEL, split="eval", sampling=Sampling()
    )
    await insert_evaluation_groups(
        store, run_id, "held-out", [new_group(100, split="eval", size=1, evaluation="held-out")]
    )
    [measured] = await evaluation_groups(store, run_id, "held-out")
    await played(store, measured.key.episode(0), 9.0)
    figures = await run_figures(store, [run_id, other])
    for one in (run_id, other):
        train = (await run_summary(store, one)).episodes["train"]
        assert (figures[one].mean_reward, figures[one].scored) == (train.mean_reward, train.scored)
    assert (figures[run_id].mean_reward, figures[run_id].scored) == (0.5, 3)
    curves = RunCurves(run_id, trains=True)
    await curves.update(store)
    assert sum(one.reward for one in curves.over_time()) / sum(one.scored for one in curves.over_time()) == 0.5


async def test_groups_are_paged_and_chosen_by_environment_and_state(store: Store) -> None:
    run_id = await training_run(store)
    for rewards in ((0.0, 1.0), (0.5, 0.5), (0.0, 1.0)):
        await closed(store, run_id, rewards)
    [last] = await admitted(store, run_id)
    lines = await group_lines(store, run_id, 2)
    assert [line.key.group_no for line in lines] == [last.key.group_no, 2]
    assert [line.key.group_no for line in await group_lines(store, run_id, 9, before=2)] == [1, 0]
    filtered = await group_lines(store, run_id, 9, state=GroupState.FILTERED, environment=LABEL)
    assert [(line.key.group_no, line.mean_reward) for line in filtered] == [(1, 0.5)]
    members = [(one.member, one.attempt, one.state, one.reward) for one in lines[1].members]
    assert members == [(0, 0, EpisodeState.DONE, 0.0), (1, 0, EpisodeState.DONE, 1.0)]
    assert lines[0].members == ()
    assert await group_lines(store, run_id, 9, environment="another") == []


async def test_answers_are_the_last_words_of_the_newest_attempts(store: Store) -> None:
    run_id = await new_run(store)
    [group] = await admitted(store, run_id)
    await played(store, group.key.episode(1), 1.0)
    await played(store, group.key.episode(1, 1), 1.0)
    answers = await group_answers(store, group.key)
    assert list(answers) == [1]
    assert (answers[1].turns, answers[1].prompt[0].text) == (1, "1 + 1?")
    assert answers[1].last is not None
    assert answers[1].last.text == "let me see"


async def test_curves_read_on_equal_curves_read_at_once(store: Store) -> None:
    run_id = await training_run(store)
    read_on = RunCurves(run_id, trains=True)
    await read_on.update(store)
    for place in range(4):
        await closed(store, run_id, (0.0, float(place)))
        await read_on.update(store)
        if place == 2:
            await lease_batch(store, run_id)
            await committed(store, run_id, await claimed(store, run_id))
    [running] = await admitted(store, run_id)
    await read_on.update(store)
    await played(store, running.key.episode(0), 1.0)
    await read_on.update(store)
    at_once = RunCurves(run_id, trains=True)
    await at_once.update(store)
    assert (read_on.places, read_on.steps, read_on.trained) == (at_once.places, at_once.steps, at_once.trained)
    assert [(one.place, one.episodes, one.mean) for one in at_once.over_time()] == [
        (0, 2, 0.0), (1, 2, 0.5), (2, 2, 1.0), (3, 2, 1.5), (4, 1, 1.0),
    ]  # fmt: skip
    assert [(one.place, one.episodes) for one in at_once.over_steps()] == [(0, 6)]
    assert at_once.over_steps()[0].length == 3


@given(st.integers(0, 10**7))
def test_a_run_of_any_size_has_few_places(groups: int) -> None:
    width = width_for(groups)
    assert groups <= width * MOST_PLACES
    assert width == 1 or groups > width // 2 * MOST_PLACES


def test_sums_of_failures_and_rewards_are_joined_by_place() -> None:
    later = NOW + timedelta(seconds=5)
    [one] = merged(
        [
            (3, "train", None, NOW, NOW, 2, 2, 1.0, 1.0, 2, 20, 15),
            (3, "train", "tool", NOW, later, 1, 0, 0.0, 0.0, 1, 40, 40),
        ]
    )
    assert one == Sums(3, "train", NOW, later, 3, 2, 1.0, 1.0, 3, 60, 40, {"tool": 1})
    assert (one.mean, one.spread, one.length) == (0.5, 0.5, 20.0)


def test_rates_are_what_ended_in_equal_pieces_of_time() -> None:
    def bucket(place: int, ended: float, tokens: int = 20) -> Sums:
        at = NOW + timedelta(seconds=ended)
        return Sums(place, "train", NOW, at, 1, 1, 1.0, 1.0, 1, tokens, tokens)

    found = rates([bucket(0, 10), bucket(1, 40, 60), bucket(2, 15)], places=4)
    assert found == [
        (NOW + timedelta(seconds=10), 0.0), (NOW + timedelta(seconds=20), 4.0),
        (NOW + timedelta(seconds=30), 0.0), (NOW + timedelta(seconds=40), 6.0),
    ]  # fmt: skip
    assert rates([]) == rates([bucket(0, 0)]) == []
