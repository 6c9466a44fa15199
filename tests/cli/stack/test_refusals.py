"""What a stack does not start, or leaves to others, and the sentence that says so."""

import socket
from pathlib import Path

import pytest
from atropos.cli.main import app
from atropos.cli.stack import commands
from atropos.cli.stack.addresses import Origin, resolve_addresses, speaks_http2
from atropos.cli.stack.commands import only_missing, up
from atropos.cli.stack.errors import StackError
from atropos.cli.stack.files import StackHome
from atropos.cli.stack.options import StackOptions
from atropos.settings import load_settings
from typer.testing import CliRunner

from .homes import ONLY_POSTGRES


def test_up_leaves_out_what_the_settings_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.example:7233")
    monkeypatch.setenv("DATABASE_URL", "postgresql://db/x")
    addresses = resolve_addresses(load_settings(home=home))
    assert addresses.temporal.origin is addresses.database.origin is Origin.SETTINGS
    options = only_missing(StackOptions(), addresses)
    assert not options.temporal
    assert not options.postgres


def test_a_taken_port_is_one_sentence_and_nothing_is_left(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StackError, match=f"Port {port}, asked for as postgres, is already in use"):
            up(home, ONLY_POSTGRES.model_copy(update={"postgres_port": port}))
    report = commands.status(load_settings(home=home))
    assert report.error is not None
    assert not report.running
    assert up(home, ONLY_POSTGRES).already_running is False


def test_a_start_that_is_refused_leaves_no_empty_folders(empty_home: Path) -> None:
    home = empty_home / "home"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StackError, match="already in use"):
            up(home, ONLY_POSTGRES.model_copy(update={"postgres_port": port}))
    assert [path for path in home.rglob("*") if path.is_dir() and not any(path.iterdir())] == []
    (home / "stack.json").write_text("{")
    with pytest.raises(StackError, match="damaged"):
        up(home, ONLY_POSTGRES)
    (home / "stack.json").unlink()


def test_what_is_no_model_is_refused_before_anything_starts(
    empty_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_HOME", str(empty_home / "home"))
    rubbish = tmp_path / "rubbish"
    rubbish.mkdir()
    (rubbish / "config.json").write_text("{}")
    for model, sentence in (
        (tmp_path / "none", f"There is no model in {tmp_path / 'none'}; name a folder made by training"),
        (rubbish, f"{rubbish} holds no weights and no tokenizer; name a folder that a model was saved to"),
    ):
        result = CliRunner().invoke(app, ["up", "--model", str(model)])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr
        assert result.stderr.startswith(f"atropos: {sentence}")
    assert list(empty_home.iterdir()) == []


def test_a_home_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for home, sentence in (
        (file, f"atropos: {file} is a file; set ATROPOS_HOME to a folder.\n"),
        (file / "a" / "b", f"atropos: {file} is a file, so nothing can lie in {file / 'a' / 'b'}; set ATROPOS_HOME"),
    ):
        monkeypatch.setenv("ATROPOS_HOME", str(home))
        for command in (["up"], ["down"], ["status"], ["run", "list"]):
            result = CliRunner().invoke(app, command)
            assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr
            assert result.stderr.startswith(sentence)


def test_postgres_that_refuses_to_start_is_one_sentence_with_its_reason(home: Path) -> None:
    data = home / "postgres" / "data"
    (data / "postgresql.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(StackError, match=r"postgres did not start: .*(FATAL|unrecognized)"):
        up(home, ONLY_POSTGRES)


def test_a_damaged_state_file_stops_up_before_it_starts_anything(home: Path) -> None:
    StackHome(home).state.write_text("{")
    with pytest.raises(StackError, match="damaged"):
        up(home, ONLY_POSTGRES)
    StackHome(home).state.unlink()


def test_something_that_is_no_grpc_server_on_the_usual_port_is_not_taken_for_temporal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not speaks_http2("127.0.0.1", server.getsockname()[1], timeout_s=0.2)
    assert not speaks_http2("127.0.0.1", 1)
