"""Which run or episode a person means."""

import pytest
from atropos.cli.access import the_one, workflow_page
from atropos.cli.episode import episode_key
from atropos.cli.errors import CommandError
from atropos.cli.run_start import new_run_id
from atropos.contracts.ids import EpisodeKey

RUNS = ["run/math-ab12", "run/math-cd34", "run/taxi-ef56"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("run/taxi-ef56", "run/taxi-ef56"),
        ("taxi", "run/taxi-ef56"),
        ("run/t", "run/taxi-ef56"),
        ("cd34", "run/math-cd34"),
        ("math-a", "run/math-ab12"),
    ],
)
def test_a_beginning_or_an_end_of_a_run_is_enough(text: str, found: str) -> None:
    assert the_one(text, RUNS) == found


@pytest.mark.parametrize(
    ("text", "known", "sentence"),
    [
        ("math", RUNS, r"fits 2 runs \(run/math-ab12, run/math-cd34\)"),
        ("run/", RUNS, "fits 3 runs"),
        ("taxi-ef65", RUNS, "did you mean run/taxi-ef56"),
        ("zzz", RUNS, "`atropos run list` shows them"),
        ("", RUNS, "There is no run ''"),
        ("x", [], "There are no runs yet"),
        ("r", [f"run/r-{n}" for n in range(9)], "and 4 more"),
    ],
)
def test_what_fits_none_or_several_is_refused(text: str, known: list[str], sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        the_one(text, known)


@pytest.mark.parametrize(
    ("words", "attempt"),
    [
        (["run/a/group/1/episode/2"], 0),
        (["run/a/group/1/episode/2/attempt/3"], 3),
        (["run/a/group/1/episode/2/"], 0),
        (["run/a", "1", "2"], 0),
        (["run/a", "1", "2", "3"], 3),
    ],
)
def test_an_episode_is_named_by_its_id_or_by_numbers(words: list[str], attempt: int) -> None:
    assert episode_key(words) == EpisodeKey(run_id="run/a", group_no=1, member=2, attempt=attempt)


@pytest.mark.parametrize("words", [["run/a"], ["a", "1"], ["a", "1", "x"], ["a", "1", "2", "3", "4"], ["a", "-1", "2"]])
def test_what_names_no_episode_is_refused(words: list[str]) -> None:
    with pytest.raises(CommandError, match="group/12/episode/3"):
        episode_key(words)


@pytest.mark.parametrize("number", ["2147483648", "1" + "0" * 20, "9" * 5000])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_number_that_no_row_can_have_is_refused_in_one_sentence(number: str, place: int) -> None:
    numbers = ["0", "0", "0"]
    numbers[place] = number
    group, member, attempt = numbers
    for words in (["run/a", *numbers], [f"run/a/group/{group}/episode/{member}/attempt/{attempt}"]):
        with pytest.raises(CommandError) as refused:
            episode_key(words)
        assert str(refused.value).startswith("Groups, members and attempts are numbered up to 2147483647; ")
        assert len(str(refused.value)) < 150


def test_numbers_in_the_name_of_a_run_are_no_numbers_of_an_episode() -> None:
    name = "run/seed-99999999999"
    assert episode_key([f"{name}/group/1/episode/2"]) == EpisodeKey(run_id=name, group_no=1, member=2)


def test_a_new_run_is_called_by_its_name_and_four_letters() -> None:
    made = {new_run_id("toy", None) for _ in range(50)}
    assert len(made) > 40
    assert all(one.startswith("run/toy-") and len(one) == len("run/toy-xxxx") for one in made)
    assert new_run_id("toy", "mine") == new_run_id("toy", "run/mine") == "run/mine"
    for bad in ("", "run/", "a b", "a/b", "../x", "x\n", "-x"):
        with pytest.raises(CommandError, match="cannot be used"):
            new_run_id("toy", bad)


def test_a_workflow_has_a_page() -> None:
    assert workflow_page("http://ui/", "run/a-b").endswith("//ui/namespaces/default/workflows/run%2Fa-b")
