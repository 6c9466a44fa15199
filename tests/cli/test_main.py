"""`atropos` as a whole: what it loads, how it fails, with which exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from atropos.cli.errors import CommandError, sentences
from atropos.cli.main import _COMMANDS, app, load
from typer.testing import CliRunner


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_help_lists_every_command_and_loads_none() -> None:
    code = (
        "import sys\nfrom atropos.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'temporalio', 'torch', 'sqlalchemy', 'transformers', 'httpx', 'pydantic'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))"
    )
    shown = python(code)
    assert "loaded: []" in shown
    assert all(f"\n  {name} " in shown for name in _COMMANDS)


def test_trying_an_environment_needs_neither_temporal_nor_postgres_nor_torch() -> None:
    code = (
        "import sys\nfrom atropos.cli.main import app\n"
        "try: app(['env', 'try', 'calculator'])\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print('loaded:', sorted({'temporalio', 'torch', 'sqlalchemy', 'psycopg'} & set(sys.modules)))"
    )
    assert python(code).endswith("loaded: []\n")


@pytest.mark.parametrize("name", list(_COMMANDS))
def test_every_command_has_a_help_page(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert load(name).name == name


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "atropos")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rn"], "Did you mean 'run'"),
        (["run", "shw"], "Did you mean 'show'"),
        (["run", "render"], "-f"),
        (["run", "concurrency", "x", "0"], "'groups'"),
        (["demo", "--episodes", "0"], "'--episodes'"),
        (["run", "cancel", "x", "--reason", "y" * 501], "it has 501 characters; 500 at most"),
        (["run", "pause", "x", "--reason", "y" * 100_000], "it has 100000 characters; 500 at most"),
        (["env", "check", "calculator", "-n", "1000000000"], "'-n' / '--tasks'"),
        (["sft-gen", "--top", "1" + "0" * 20], "'--top'"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_settings_and_states_that_cannot_be_used_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DATABASE_URL", "TEMPORAL_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATROPOS_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["run", "list"])
    assert result.stderr == ("atropos: No database is known: start the stack with `atropos up`, or set DATABASE_URL.\n")
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:secret@127.0.0.1:1/db")
    result = CliRunner().invoke(app, ["run", "list"])
    assert result.exit_code == 1
    assert result.stderr == (
        "atropos: Postgres at postgresql://u:***@127.0.0.1:1/db cannot be reached (Connection refused); "
        "start it, or set DATABASE_URL to one that runs.\n"
    )
    monkeypatch.setenv("DATABASE_URL", "mysql://x")
    result = CliRunner().invoke(app, ["run", "list"])
    assert result.stderr.startswith("atropos: DATABASE_URL is not usable")
    (tmp_path / "stack.json").write_text("{")
    for command in (["status"], ["down"], ["run", "list"]):
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr


@pytest.mark.parametrize(
    ("module", "arguments", "variables", "code", "words"),
    [
        ("atropos.cli.worker", ["--roles", "control"], {"ATROPOS_LOG_LEVEL": "loud"}, 1, "atropos-worker: ATROPOS_LOG"),
        ("atropos.cli.worker", ["--roles", "conrtol"], {}, 2, "no role 'conrtol'"),
        ("atropos.cli.worker", ["--import", "no_such_module"], {}, 1, "ModuleNotFoundError: No module named"),
        ("atropos.cli.worker", ["--help"], {}, 0, ""),
        ("atropos.cli.main", ["run", "list"], {"DATABASE_URL": "mysql://x"}, 1, "atropos: DATABASE_URL is not usable"),
        ("atropos.cli.main", ["worker", "--import", "no_such_module"], {}, 1, "ModuleNotFoundError: No module named"),
        ("atropos.cli.main", ["worker"], {"ATROPOS_LOG_LEVEL": "loud"}, 1, "atropos-worker: ATROPOS_LOG_LEVEL"),
        ("atropos.cli.main", ["rn"], {}, 2, "Did you mean 'run'"),
        ("atropos.cli.main", ["--version"], {}, 0, ""),
    ],
)
def test_the_process_itself_ends_with_its_exit_code(
    module: str, arguments: list[str], variables: dict[str, str], code: int, words: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "ATROPOS_HOME": str(tmp_path), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr


def test_errors_of_others_are_printed_without_their_control_characters() -> None:
    assert sentences(CommandError("a\x1b[2J\nb")) == ["a␛[2J b"]
    assert sentences(KeyError("x")) is None
