"""Files of a stack: whole or absent, readable by their owner, held by one; unusable places in one sentence."""

import stat
from pathlib import Path

import pytest
from atropos.cli.stack import files
from atropos.cli.stack.errors import StackError
from atropos.cli.stack.files import StackHome, hold_lock, write_atomically
from atropos.cli.stack.ports import choose_port, explicit_port, is_free
from atropos.cli.stack.process import ProcessId
from atropos.cli.stack.state import (
    Kept,
    Phase,
    StackState,
    read_kept,
    read_state,
    write_kept,
    write_state,
)
from pydantic import SecretStr


@pytest.fixture
def home(tmp_path: Path) -> StackHome:
    place = StackHome(tmp_path / "home")
    place.prepare()
    return place


def a_state() -> StackState:
    return StackState(
        supervisor=ProcessId(pid=2**22 + 1, started="never"),
        phase=Phase.RUNNING,
        database_url=SecretStr("postgresql://u:secret@h/d"),
    )


def test_state_comes_back_as_written_for_its_owner_only(home: StackHome) -> None:
    write_state(home, a_state())
    assert read_state(home) == a_state()
    assert stat.S_IMODE(home.state.stat().st_mode) == 0o600
    assert [path.name for path in home.root.glob(".stack*")] == []


def test_the_password_is_only_in_the_file(home: StackHome) -> None:
    assert "secret" not in a_state().model_dump_json()
    assert "secret" not in repr(a_state())


def test_a_damaged_state_file_is_one_sentence(home: StackHome) -> None:
    home.state.write_text('{"supervisor": ')
    with pytest.raises(StackError, match=r"damaged.*remove the file"):
        read_state(home)


def test_a_failed_write_leaves_the_old_text(home: StackHome) -> None:
    write_atomically(home.state, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(home.state, "new \ud800")
    assert home.state.read_text() == "old"
    assert {path.name for path in home.root.iterdir() if path.is_file()} == {"stack.json"}


def test_damaged_kept_values_are_made_anew(home: StackHome) -> None:
    kept = Kept(ports={"temporal": 20_001}, postgres_password=SecretStr("pw"))
    write_kept(home, kept)
    assert read_kept(home) == kept
    home.kept.write_text("nonsense")
    assert read_kept(home) == Kept()


def test_one_holder_of_a_home(home: StackHome) -> None:
    with hold_lock(home) as first, hold_lock(home) as second:
        assert (first, second) == (True, False)
    with hold_lock(home) as again:
        assert again


def test_a_home_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StackError, match="set ATROPOS_HOME"):
        StackHome(tmp_path / "file" / "home").prepare()


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MIN_FREE_MB", 10**12)
    with pytest.raises(StackError, match=r"MB are free .* make room"):
        StackHome(tmp_path / "home").prepare()


def test_chosen_ports_are_free_distinct_and_outside_the_ephemeral_range() -> None:
    taken: set[int] = set()
    ports = [choose_port(None, taken) for _ in range(20)]
    assert len(set(ports)) == 20
    assert all(20_000 <= port < 32_768 and is_free(port) for port in ports)
    assert choose_port(ports[0], set()) == ports[0]


def test_an_explicit_port_that_is_taken_is_one_sentence() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StackError, match=f"Port {port}, asked for as temporal, is already in use"):
            explicit_port(port, "temporal", set())
        assert choose_port(port, set()) != port
