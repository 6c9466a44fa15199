"""Run files on disk: read whole, or refused with the file's name and the place."""

import json
from pathlib import Path
from typing import Any

import pytest
from atropos.cli.documents import MAX_BYTES, plain, read_run_file, with_change, with_engines
from atropos.cli.main import app
from atropos.contracts.runfile import RunFileError, parse_run
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = """
name: demo
model: {path: policy}
engines: [{kind: dev, url: "http://127.0.0.1:8000"}]
environments: [{id: calculator}]
budget: {groups: 4}
"""
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


def written(folder: Path, text: str | bytes, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(*arguments: str | Path, stdin: str | None = None) -> list[str]:
    """What `atropos run render` says of a bad file."""
    result = CliRunner().invoke(app, ["run", "render", *map(str, arguments)], input=stdin)
    assert result.exit_code == 1, result.output
    assert not result.stdout
    lines = result.stderr.splitlines()
    assert lines
    assert all(line.startswith("atropos: ") for line in lines), lines
    return lines


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; a run file needs at least a name"),
        ("# only a comment\n", "is empty"),
        ("name: a\n  b: c\n", "line 2, column 4: it is no YAML (mapping values are not allowed here)"),
        ("name: [1, 2\n", "line 2, column 1: it is no YAML"),
        ("name: a\nname: b\n", "line 2, column 1: it is no YAML ('name' is given twice)"),
        ("a: *nobody\n", "line 1, column 4: it is no YAML (found undefined alias 'nobody')"),
        ("a: 1\n---\nb: 2\n", "it is no YAML (but found another document)"),
        ("a: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("a: !!int x\n", "a value does not fit the tag it is given"),
        ("a: !!bool x\n", "a value does not fit the tag it is given"),
        ("a: &a [*a]\n", "nested too deeply"),
        ("[" * 5000, "nested too deeply"),
        ("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(8)
        ), "more than 100000 values"),
        ("1: a\n", "the key 1 is no plain text"),
        ("seed: .nan\n", "seed: nan is no number that a run can use"),
        ("a: !!set {b}\n", "a value of type set does not belong in a run file"),
        (b"name: \xff\xfe\n", "line 1: it is no UTF-8 text"),
        (b"\x7fELF\x02\x01\x01\x00\x00", "it is no text (a NUL byte)"),
        (b"name: a\x07b\n", "a character that YAML does not allow"),
        ('name: "a\\0b"\n', "name: the text has a NUL"),
        (b"#" * (MAX_BYTES + 1), "is larger than 1024 KiB"),
        ("- a\n", "a run file is a mapping of fields, not list"),
        ("just words\n", "a run file is a mapping of fields, not str"),
        (GOOD + "buget: {}\n", "buget: unknown field; did you mean 'budget'?"),
    ],
)  # fmt: skip
def test_a_bad_yaml_file_is_refused_in_one_sentence(tmp_path: Path, text: str | bytes, sentence: str) -> None:
    path = written(tmp_path, text)
    (line,) = refused("-f", path)
    assert line.startswith(f"atropos: {path}")
    assert sentence in line


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("{", "line 1, column 2: it is no JSON (expecting property name enclosed in double quotes)"),
        ('{"a": 1,\n "b" 2}', "line 2, column 6: it is no JSON (expecting ':' delimiter)"),
        ('{"a": 1, "a": 2}', "it is no JSON ('a' is given twice)"),
        ('{"seed": NaN}', "NaN is no number in JSON"),
        ('{"name": "\\ud800"}', "half a character"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_json_file_is_refused_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (line,) = refused("-f", written(tmp_path, text, "run.json"))
    assert sentence in line


def test_what_is_no_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert refused("-f", tmp_path) == [f"atropos: {tmp_path} is a folder; name a run file"]
    assert refused("-f", tmp_path / "none.yaml") == [f"atropos: there is no file {tmp_path / 'none.yaml'}"]
    assert refused("-f", written(tmp_path, GOOD) / "x") == [
        f"atropos: {tmp_path / 'run.yaml' / 'x'} cannot be read: not a directory"
    ]


def test_every_problem_of_a_file_has_a_line_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + "seed: -1\nfoo: 1\n")
    assert refused("-f", path) == [
        f"atropos: {path}: seed: input should be greater than or equal to 0 (got -1)",
        f"atropos: {path}: foo: unknown field",
    ]


def test_a_file_may_come_from_standard_input() -> None:
    for text in (GOOD, json.dumps(parse_run(plain_of(GOOD)).model_dump(mode="json"))):
        result = CliRunner().invoke(app, ["run", "render", "-f", "-"], input=text)
        assert result.exit_code == 0, result.output
        assert parse_run(json.loads(result.stdout)) == parse_run(plain_of(GOOD))
    assert "standard input is empty" in refused("-f", "-", stdin="")[0]


def plain_of(text: str) -> Any:
    import yaml

    return plain(yaml.safe_load(text), "text")


def test_yaml_follows_version_1_2(tmp_path: Path) -> None:
    path = written(tmp_path, "a: [yes, off, 1e-6, 2.0e9, 010, 0x10, 2024-01-01, 1:30, ~, true, .5, -3, '']\n")
    assert read_run_file(path) == {
        "a": ["yes", "off", 1e-6, 2.0e9, "010", 16, "2024-01-01", "1:30", None, True, 0.5, -3, ""]
    }


@given(JSON_VALUES)
def test_plain_data_stays_as_it_is(value: object) -> None:
    assert plain(value, "x") == value


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_rubbish_is_read_or_refused_and_never_crashes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("rubbish")
    for name in ("run.yaml", "run.json"):
        try:
            read_run_file(written(folder, data, name))
        except RunFileError as error:
            assert str(folder) in str(error)  # noqa: PT017 - being read is fine too


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("seed=3", "seed", 3),
        ("model.path=other", "model.path", "other"),
        ("sampling.temperature=0.5", "sampling.temperature", 0.5),
        ("engines.0.url=http://x:1/v1?a=b", "engines.0.url", "http://x:1/v1?a=b"),
        ("environments.0.limits.turns=2", "environments.0.limits.turns", 2),
        ("environments=[{id: taxi}]", "environments", [{"id": "taxi"}]),
        ("environments.0.args={digits: 3}", "environments.0.args", {"digits": 3}),
        ("model.path=", "model.path", None),
        ("name='3'", "name", "3"),
    ],
)
def test_set_changes_one_place(change: str, path: str, value: object) -> None:
    before = plain_of(GOOD)
    after: Any = with_change(before, change)
    assert before == plain_of(GOOD)
    for part in path.split("."):
        after = after[int(part)] if isinstance(after, list) else after[part]
    assert after == value


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("seed", "--set seed: write it as path=value"),
        ("=3", "write it as path=value"),
        ("a..b=3", "write it as path=value"),
        ("engines.1.url=x", "--set: engines is a list with items 0 to 0; '1' is none of them"),
        ("engines.url=x", "'url' is none of them"),
        ("engines.-1.url=x", "'-1' is none of them"),
        ("name.first=x", "--set: name is 'demo' and has no field 'first'"),
        ("seed=[", "--set seed, line 1, column 2: it is no YAML"),
        ("sampling.temprature=1", "sampling.temprature: unknown field; did you mean 'temperature'?"),
        ("environments.0.wieght=1", "environments.0.wieght: unknown field; did you mean 'weight'?"),
        ("enviroments.0.weight=1", "enviroments: unknown field; did you mean 'environments'?"),
        ("seed=no", "seed: input should be a valid integer"),
    ],
)
def test_a_bad_set_is_refused_in_one_sentence(tmp_path: Path, change: str, sentence: str) -> None:
    (line,) = refused("-f", written(tmp_path, GOOD), "--set", change)
    assert sentence in line


def test_engines_on_the_command_line_keep_the_settings_of_the_file() -> None:
    document = {"engines": [{"kind": "dev", "url": "http://a", "concurrency": 3}, {"url": "http://b"}]}
    assert with_engines(document, ["http://x", "http://y", "http://z"])["engines"] == [
        {"kind": "dev", "url": "http://x", "concurrency": 3},
        {"url": "http://y"},
        {"url": "http://z"},
    ]
    assert with_engines({}, ["http://x"]) == {"engines": [{"url": "http://x"}]}
    assert with_engines(document, []) is document


def test_the_examples_are_the_same_run_and_valid() -> None:
    assert parse_run(read_run_file(EXAMPLES / "run.yaml")) == parse_run(read_run_file(EXAMPLES / "run.json"))
