"""Starting the dashboard: as a command that refuses to be open to all, and as a part of the stack."""

import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from atropos.cli import dashboard
from atropos.cli.main import app
from atropos.cli.stack import commands
from atropos.cli.stack.commands import Health
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import running_stack
from atropos.dashboard.server import is_loopback
from atropos.settings import load_settings
from typer.testing import CliRunner


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["dashboard", *arguments])
    assert result.exit_code == 1
    return result.stderr


def test_it_is_not_opened_to_others_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_DASHBOARD_TOKEN", raising=False)
    assert "set ATROPOS_DASHBOARD_TOKEN, or listen on 127.0.0.1" in refused("--address", "0.0.0.0")
    monkeypatch.setenv("ATROPOS_DASHBOARD_TOKEN", "short")
    assert refused() == "atropos: ATROPOS_DASHBOARD_TOKEN is not usable: it needs at least 8 characters.\n"


@pytest.mark.parametrize("short", ["", "short", "7 chars"])
def test_a_token_that_is_too_short_is_refused_by_the_name_it_was_given_under(
    monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    monkeypatch.setenv("ATROPOS_DASHBOARD_TOKEN", "long enough")
    assert refused("--token", short) == "atropos: --token is not usable: it needs at least 8 characters.\n"


def test_what_is_missing_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "installed", lambda: False)
    assert "pip install 'atropos-durable[dashboard]'" in refused()


def test_an_address_of_the_ui_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    assert "--temporal-ui must look like" in refused("--temporal-ui", "javascript:alert(1)//")


@pytest.mark.parametrize(
    ("address", "own"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("host", False)],
)
def test_loopback_is_what_nobody_else_reaches(address: str, own: bool) -> None:
    assert is_loopback(address) is own


@pytest.fixture
def home() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="atropos-dashboard-", dir="/tmp"))
    made.chmod(0o755)  # Postgres must get through when the tests run as root
    yield made
    with suppress(OSError):
        shutil.rmtree(made)


def test_the_stack_serves_it_and_says_where(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "ATROPOS_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with running_stack(home, StackOptions(temporal=False, workers=False, dashboard=True)):
        [part] = [one for one in commands.status(load_settings(home=home)).parts if one.name == "dashboard"]
        assert part.health is Health.OK
        with urllib.request.urlopen(part.address) as answer:
            assert (answer.status, b"Atropos: runs" in answer.read()) == (200, True)
