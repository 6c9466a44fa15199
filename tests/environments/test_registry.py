"""Finding environments by name, module and file; what cannot be found is named with what was near."""

from pathlib import Path

import pytest
from atropos.environments.faults import BadEnvironment, BadEnvironmentArgs, EnvironmentProblem, UnknownEnvironment
from atropos.environments.registry import available, import_module, load

SAMPLES = Path(__file__).parent / "samples.py"

ONE = """
from atropos import EnvConfig, Environment, Task
class Config(EnvConfig):
    digits: int = 2
class One(Environment[Config]):
    def task(self, split, index): return Task(data=index)
    def prompt(self, task): return str(task.data)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.py").write_text(ONE)
    return tmp_path


def test_the_bundled_environment_is_found_by_name() -> None:
    assert "calculator" in available()
    assert load("calculator").ref == "calculator"
    assert load("calculator").version == "1"


def test_the_same_reference_and_arguments_are_loaded_once(folder: Path) -> None:
    assert load("one.py", {"digits": 3}, folder) is load(str(folder / "one.py"), {"digits": 3})
    assert load("one.py", {"digits": 3}, folder) is not load("one.py", {"digits": 4}, folder)


def test_files_are_relative_to_the_base_and_become_absolute(folder: Path) -> None:
    env = load("one.py:One", {"digits": 5}, folder)
    assert env.ref == f"{folder / 'one.py'}:One"
    assert env.environment.config.digits == 5


def test_a_module_and_class() -> None:
    assert load("atropos.environments.calculator:Calculator").name == "calculator"


@pytest.mark.parametrize(
    ("ref", "sentence"),
    [
        ("calculater", "no environment 'calculater'; did you mean 'calculator'?"),
        ("xyz", "no environment 'xyz'; installed: .*calculator.*module:Class or file.py"),
        ("no_such_module:Env", "no module 'no_such_module' for environment no_such_module:Env"),
        ("atropos.environments.calculator:Calculater", "did you mean 'Calculator'"),
        ("onne.py", "no file .*onne.py; did you mean one.py"),
        ("one.py:Two", r"no 'Two'.*\(environments in it: One\)"),
    ],
)
def test_what_is_not_found_is_answered_with_what_is_near(folder: Path, ref: str, sentence: str) -> None:
    with pytest.raises(UnknownEnvironment, match=sentence):
        load(ref, {}, folder)


def test_a_file_with_several_environments_wants_a_class() -> None:
    with pytest.raises(UnknownEnvironment, match=r"defines 3 environments \(Pooled, Aside, Broken\); name"):
        load(str(SAMPLES))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import nothing_like_it\n", r"bad.py cannot be imported: ModuleNotFoundError.*\(.*bad.py:1\)"),
        ("\n\ndef f(:\n", r"bad.py cannot be imported: SyntaxError.*bad.py:3"),
        ("raise SystemExit(2)\n", "bad.py cannot be imported: SystemExit: 2"),
        (ONE.replace("split, index", "split"), "One.task must take exactly `split` and `index`"),
        (ONE.replace("def prompt", "def promt"), "One has no method `prompt`"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(BadEnvironment, match=sentence) as caught:
        load("bad.py", {}, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_was_put_right_loads(tmp_path: Path) -> None:
    file = tmp_path / "fixed.py"
    file.write_text("1/0\n")
    with pytest.raises(BadEnvironment, match="ZeroDivisionError"):
        load("fixed.py", {}, tmp_path)
    file.write_text(ONE)
    assert load("fixed.py", {}, tmp_path).name == "one"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"digit": 3}, "environment calculator: unknown argument 'digit'; did you mean 'digits'?"),
        ({"zzz": 3}, r"unknown argument 'zzz' \(known: digits, operators, seed\)"),
        ({"digits": "many"}, "digits: input should be a valid integer.*got 'many'"),
        ({"digits": 0}, "digits: input should be greater than or equal to 1"),
        ({"operators": ["+", "x"]}, "operators.1: input should be '\\+' or '-'"),
    ],
)
def test_bad_arguments_name_the_field(args: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadEnvironmentArgs, match=sentence):
        load("calculator", args)


def test_modules_are_imported_by_name_or_refused() -> None:
    import_module("atropos.environments.calculator")
    with pytest.raises(EnvironmentProblem, match="no module 'not_here'"):
        import_module("not_here")
