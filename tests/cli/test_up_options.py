"""Options of `atropos up` that cannot hold are refused or answered, never dropped in silence."""

import io
import json
import os
from pathlib import Path

import pytest
from atropos.cli import progress
from atropos.cli.errors import CommandError
from atropos.cli.main import app
from atropos.cli.stack.files import StackHome
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.plan import _Ports
from atropos.cli.stack.ports import choose_port
from atropos.cli.stack.process import identify
from atropos.cli.stack.render import show_progress
from atropos.cli.stack.state import PartState, PartStatus, Phase, StackState, write_state
from pydantic import SecretStr
from rich.console import Console
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("TEMPORAL_", "DATABASE_URL", "ATROPOS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", "/nonexistent/temporal.toml")
    monkeypatch.setenv("ATROPOS_HOME", str(tmp_path / "home"))


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """The folder of a stack that runs, as others see it: a state whose supervisor is alive (it is this process)."""
    home = StackHome(tmp_path / "home")
    home.prepare()
    me = identify(os.getpid())
    assert me is not None
    policy = home.root / "policy" / "key"
    policy.mkdir(parents=True)
    (policy / "policy.json").write_text(json.dumps({"seed": 3}))
    (home.root / "model").symlink_to(policy)

    def part(name: str, address: str) -> PartState:
        return PartState(name=name, status=PartStatus.READY, address=address, stop_signal=15, grace_s=1.0)

    write_state(
        home,
        StackState(
            supervisor=me,
            phase=Phase.RUNNING,
            temporal_address="127.0.0.1:7001",
            temporal_ui="http://127.0.0.1:7002",
            database_url=SecretStr("postgresql://u:hidden@127.0.0.1:7003/atropos"),
            engine_url="http://127.0.0.1:7004",
            parts=(
                part("temporal", "127.0.0.1:7001"),
                part("postgres", "127.0.0.1:7003"),
                part("engine", "http://127.0.0.1:7004"),
                part("worker-workflows", "roles workflows"),
            ),
        ),
    )
    return home.root


def up(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["up", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--engine-port", "8000"], "--engine-port is 7004, not 8000"),
        (["--temporal-port", "8000"], "--temporal-port is 7001, not 8000"),
        (["--ui-port", "8000"], "--ui-port is 7002, not 8000"),
        (["--postgres-port", "8000"], "--postgres-port is 7003, not 8000"),
        (["--seed", "4"], "--seed is 3, not 4"),
        (["--no-workers"], "not --no-workers, since it was started with"),
        (["--no-engine"], "not --no-engine, since it was started with"),
        (["--dashboard"], "not --dashboard, since it was started without"),
        (["--dashboard-port", "8000"], "not --dashboard-port 8000, since it has no such part"),
        (["--ui-port", "7002", "--seed", "4", "--engine-port", "8000"], "--seed is 3, not 4; --engine-port is 7004"),
    ],
)
def test_a_running_stack_keeps_its_own_and_says_so(running: Path, arguments: list[str], kept: str) -> None:
    code, out, err = up(*arguments)
    assert code == 0, err
    assert out.startswith("The stack is already running.")
    assert err.startswith(f"Note: The stack was running already and keeps what it has: {kept}")
    assert "To change that: `atropos down`, then `atropos up` with these options again." in err
    assert "hidden" not in err
    assert "--ui-port" not in err or "--ui-port is 7002, not 8000" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--engine-port", "7004", "--seed", "3"],
        ["--workers", "--engine", "--no-dashboard", "--temporal-port", "7001"],
    ],
)
def test_a_running_stack_that_is_as_asked_for_needs_no_note(running: Path, arguments: list[str]) -> None:
    code, out, err = up(*arguments)
    assert (code, err) == (0, "")
    assert out.startswith("The stack is already running.")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--temporal-port", "8000", "--engine-port", "8000"], "--temporal-port and --engine-port are both 8000; each"),
        (["--ui-port", "8000", "--dashboard-port", "8000"], "--ui-port and --dashboard-port are both 8000; each part"),
        (["--no-engine", "--engine-port", "8000"], "--engine-port is about the engine and --no-engine starts none"),
        (
            ["--no-engine", "--model", "/m"],
            "--model is about the engine and --no-engine starts none; leave one of them",
        ),
        (["--no-engine", "--seed", "1"], "--seed is about the engine and --no-engine starts none; leave one of them"),
        (["--no-dashboard", "--dashboard-port", "8000"], "--dashboard-port is about the dashboard and --no-dashboard"),
        (["--model", "/m", "--seed", "1"], "--seed is for making a tiny policy and --model names another one"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name_and_start_nothing(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    code, out, err = up(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"atropos: {sentence}"), err
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("variable", "value", "option", "sentence"),
    [
        ("TEMPORAL_ADDRESS", "127.0.0.1:1", "--ui-port", "Temporal at 127.0.0.1:1 is used (TEMPORAL_ADDRESS)"),
        (
            "DATABASE_URL",
            "postgresql://u:hidden@h:1/d",
            "--postgres-port",
            "Postgres at postgresql://u:***@h:1/d is used",
        ),
        ("ATROPOS_ENGINE_URL", "http://h:1", "--engine-port", "the engine at http://h:1 is used (ATROPOS_ENGINE_URL)"),
        ("ATROPOS_ENGINE_URL", "http://h:1", "--seed", "the engine at http://h:1 is used (ATROPOS_ENGINE_URL)"),
    ],
)
def test_an_option_about_a_server_that_is_elsewhere_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, option: str, sentence: str
) -> None:
    monkeypatch.setenv(variable, value)
    code, out, err = up(option, "8000")
    assert (code, out) == (1, "")
    assert err.startswith(f"atropos: {option} would have no effect: {sentence}"), err
    assert "hidden" not in err


def test_a_port_that_was_asked_for_is_given_to_no_other_part() -> None:
    port = choose_port(None, set())
    ports = _Ports({"temporal-http": port}, frozenset(StackOptions(engine_port=port).ports().values()))
    assert ports.get("temporal-http") != port
    assert ports.get("engine", port) == port


def test_status_without_a_stack_fails_with_a_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 1
    assert result.stderr == f"atropos: No stack is running in {tmp_path / 'home'}; `atropos up` starts one.\n"
    result = CliRunner().invoke(app, ["status", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["running"]) == (1, False)


def test_the_first_thing_said_is_that_it_starts_and_then_that_a_policy_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(home: Path, seed: int) -> Path:
        raise CommandError("no policy today")

    monkeypatch.setattr(progress, "tiny_policy", made)
    result = CliRunner().invoke(app, ["up"])
    assert (result.exit_code, result.stderr.splitlines()) == (
        1,
        [
            f"Starting the stack in {tmp_path / 'home'} …",
            "  the tiny policy is looked for, and made on first use …",
            "atropos: no policy today",
        ],
    )


@pytest.mark.usefixtures("running")
def test_of_a_running_stack_nothing_is_said_to_start() -> None:
    result = CliRunner().invoke(app, ["up"])
    assert (result.exit_code, "already running" in result.stdout, "Starting" in result.stderr) == (0, True, False)


def test_each_part_is_said_to_start_and_to_be_ready_once() -> None:
    me = identify(os.getpid())
    assert me is not None
    out = io.StringIO()
    show = show_progress(Console(file=out, width=200))
    for statuses in ("waiting starting", "starting starting", "ready starting", "ready ready", "ready ready"):
        parts = [
            PartState(name=name, status=PartStatus(status), stop_signal=15, grace_s=1.0)
            for name, status in zip(("one", "two"), statuses.split(), strict=True)
        ]
        show(StackState(supervisor=me, phase=Phase.STARTING, parts=tuple(parts)))
    assert out.getvalue().splitlines() == [
        "  two is starting …", "  one is starting …", "  one is ready", "  two is ready",
    ]  # fmt: skip
