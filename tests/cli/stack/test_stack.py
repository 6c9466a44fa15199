"""The stack with a real Temporal and a real Postgres: nothing is lost, nothing is left over."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from atropos.cli.main import app
from atropos.cli.stack import commands
from atropos.cli.stack.addresses import Origin, resolve_addresses, speaks_http2
from atropos.cli.stack.commands import DownResult, Health, down, only_missing, up
from atropos.cli.stack.errors import StackError
from atropos.cli.stack.files import StackHome
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.ports import choose_port
from atropos.cli.stack.postgres_server import copy_programs, installed_programs, unprivileged_user
from atropos.cli.stack.process import ProcessId, command_line, identify, is_alive
from atropos.cli.stack.running import AlreadyRunning, running_stack
from atropos.cli.stack.state import Kept, Phase, StackState, launched, read_kept, read_state, write_kept
from atropos.cli.stack.temporal_server import installed_temporal
from atropos.contracts.search import SEARCH_ATTRIBUTES
from atropos.settings import load_settings
from pydantic import SecretStr
from temporalio.client import Client
from typer.testing import CliRunner

BOTH = StackOptions(migrate=False, workers=False)
ONLY_POSTGRES = BOTH.model_copy(update={"temporal": False})


def new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="atropos-stack-", dir="/tmp"))
    folder.chmod(0o755)
    return folder


@pytest.fixture
def empty_home() -> Iterator[Path]:
    folder = new_folder()
    yield folder
    down(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def seed() -> Iterator[Path]:
    """A home whose Postgres is initialised, to be copied: initdb is most of what a first start costs."""
    folder = new_folder()
    with running_stack(folder, ONLY_POSTGRES):
        pass
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def home(empty_home: Path, seed: Path) -> Path:
    """A home that was up before."""
    subprocess.run(["cp", "-a", str(seed / "postgres"), str(empty_home)], check=True)
    kept = read_kept(StackHome(seed)).model_copy(update={"ports": {}})
    write_kept(StackHome(empty_home), kept)
    return empty_home


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("TEMPORAL_", "DATABASE_URL", "ATROPOS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", "/nonexistent/temporal.toml")


def query(url: SecretStr | None, statement: str) -> object:
    assert url is not None
    with psycopg.connect(url.get_secret_value(), autocommit=True) as connection:
        cursor = connection.execute(statement)
        row = cursor.fetchone() if cursor.description else None
    return row[0] if row else None


def process_of(state: StackState, name: str) -> ProcessId:
    process = next(part.process for part in state.parts if part.name == name)
    assert process is not None
    return process


def eventually(home: Path, wanted: Callable[[StackState], bool]) -> StackState:
    for _ in range(600):
        state = read_state(StackHome(home))
        if state is not None and wanted(state):
            return state
        time.sleep(0.05)
    raise AssertionError(f"never came to pass; last state: {state}")


def restarted(name: str) -> Callable[[StackState], bool]:
    return lambda state: any(p.name == name and p.restarts and p.status == "ready" for p in state.parts)


async def test_killed_servers_come_back_at_their_addresses_with_their_data(home: Path) -> None:
    state = up(home, BOTH).state
    assert state.temporal_address is not None
    query(state.database_url, "CREATE TABLE kept AS SELECT 42 AS answer")
    client = await Client.connect(state.temporal_address)
    await client.start_workflow("Waiting", id="kept", task_queue="nobody")

    for name in ("postgres", "temporal"):
        os.kill(process_of(state, name).pid, signal.SIGKILL)
        again = eventually(home, restarted(name))
        assert again.database_url == state.database_url
        assert again.temporal_address == state.temporal_address

    assert query(state.database_url, "SELECT answer FROM kept") == 42
    again_client = await Client.connect(state.temporal_address)
    assert (await again_client.get_workflow_handle("kept").describe()).workflow_type == "Waiting"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which processes are in a folder")
def test_postgres_comes_back_beside_a_process_of_its_own_that_outlived_it(home: Path) -> None:
    state = up(home, ONLY_POSTGRES).state
    server = process_of(state, "postgres")
    query(state.database_url, "CREATE TABLE kept AS SELECT 42 AS answer")
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    orphan = next(int(pid) for pid in children if "walwriter" in command_line(int(pid)))
    os.kill(orphan, signal.SIGSTOP)  # as one that waits for a lock of a dead process: it notices nothing
    os.kill(server.pid, signal.SIGKILL)
    eventually(home, restarted("postgres"))
    assert query(state.database_url, "SELECT answer FROM kept") == 42
    assert identify(orphan) is None


def make_temporal_file_without_search_attributes(home: Path) -> None:
    (home / "temporal").mkdir()
    port = choose_port(None, set())
    command = [str(installed_temporal()), "server", "start-dev", "--headless", f"--port={port}", "--ip=127.0.0.1"]
    server = subprocess.Popen(
        [*command, f"--db-filename={home / 'temporal' / 'temporal.db'}"], stdout=subprocess.DEVNULL
    )
    while not speaks_http2("127.0.0.1", port):
        assert server.poll() is None
        time.sleep(0.05)
    server.terminate()
    server.wait()


async def test_servers_run_with_the_settings_we_rely_on_on_an_old_file_too(home: Path) -> None:
    make_temporal_file_without_search_attributes(home)
    state = up(home, BOTH).state
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        assert query(state.database_url, f"SHOW {setting}") == "on"
    assert query(state.database_url, "SHOW password_encryption") == "scram-sha-256"
    assert state.database_url is not None
    refused = state.database_url.get_secret_value().replace("atropos:", "atropos:wrong", 1)
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(refused)

    from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest

    assert state.temporal_address is not None
    client = await Client.connect(state.temporal_address)
    known = await client.operator_service.list_search_attributes(ListSearchAttributesRequest(namespace="default"))
    assert set(SEARCH_ATTRIBUTES) <= set(known.custom_attributes)
    namespace = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))
    assert namespace.config.workflow_execution_retention_ttl.ToTimedelta().days == 30


def test_a_killed_supervisor_leaves_a_home_that_starts_again_at_the_same_addresses(home: Path) -> None:
    state = up(home, BOTH).state
    query(state.database_url, "CREATE TABLE kept AS SELECT 7 AS answer")
    os.kill(state.supervisor.pid, signal.SIGKILL)
    while is_alive(state.supervisor):
        time.sleep(0.01)
    again = up(home, BOTH)
    assert not again.already_running
    assert again.state.database_url == state.database_url
    assert again.state.temporal_address == state.temporal_address
    assert query(again.state.database_url, "SELECT answer FROM kept") == 7
    assert not is_alive(process_of(state, "postgres"))
    assert not is_alive(process_of(state, "temporal"))


def test_servers_that_outlived_everything_are_stopped_first(home: Path) -> None:
    """As after a kill where the kernel tells no child: both servers run, and nobody supervises them."""
    state = up(home, BOTH).state
    servers = [process_of(state, name) for name in ("postgres", "temporal")]
    for server in servers:
        os.kill(server.pid, signal.SIGSTOP)  # the parent's death reaches them only when they go on
    os.kill(state.supervisor.pid, signal.SIGKILL)
    while is_alive(state.supervisor):
        time.sleep(0.02)
    assert all(is_alive(server) for server in servers)
    assert down_soon(home, servers) == ("postgres", "temporal")
    assert not any(is_alive(server) for server in servers)


def down_soon(home: Path, servers: list[ProcessId]) -> tuple[str, ...]:
    command = (
        "import sys, time, os, signal\ntime.sleep(0.5)\nfor pid in sys.argv[1:]: os.kill(int(pid), signal.SIGCONT)"
    )
    with subprocess.Popen([sys.executable, "-c", command, *(str(server.pid) for server in servers)]):
        return down(home).stopped


def test_up_from_two_shells_is_one_stack_and_two_successes(empty_home: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from atropos.cli.stack.commands import up;"
        "from atropos.cli.stack.options import StackOptions;"
        "r = up(Path(sys.argv[1]), StackOptions(temporal=False, migrate=False, workers=False));"
        "print(r.already_running, r.state.supervisor.pid)"
    )
    shells = [
        subprocess.Popen([sys.executable, "-P", "-c", script, str(empty_home)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [shell.communicate(timeout=60)[0].split() for shell in shells]
    assert [shell.returncode for shell in shells] == [0, 0]
    assert sorted(already for already, _ in answers) == ["False", "True"]
    assert answers[0][1] == answers[1][1]
    assert up(empty_home, ONLY_POSTGRES).already_running


def test_down_stops_its_own_stack_and_no_other(home: Path) -> None:
    other = new_folder()
    try:
        only_temporal = BOTH.model_copy(update={"postgres": False})
        kept, gone = up(other, only_temporal).state, up(home, ONLY_POSTGRES).state
        assert down(home).stopped == ("postgres",)
        assert not is_alive(gone.supervisor)
        assert not is_alive(process_of(gone, "postgres"))
        assert not StackHome(home).state.exists()
        assert is_alive(process_of(kept, "temporal"))
        assert down(home).stopped == ()
    finally:
        down(other)
        shutil.rmtree(other)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_foreground_stack_ends_with_its_owner(home: Path, how: signal.Signals) -> None:
    script = (
        "import sys, time; from pathlib import Path; from atropos.cli.stack.running import running_stack;"
        "from atropos.cli.stack.options import StackOptions\n"
        "with running_stack(Path(sys.argv[1]), StackOptions(temporal=False, migrate=False, workers=False)):\n"
        "    print('up', flush=True); time.sleep(100)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-P", "-c", script, str(home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    state = read_state(StackHome(home))
    assert state is not None
    os.killpg(owner.pid, how)  # as a terminal does: the whole foreground group
    assert owner.wait(timeout=60) != 0
    owner.stdout.close()
    while is_alive(state.supervisor):
        time.sleep(0.05)
    assert not is_alive(process_of(state, "postgres"))
    assert not StackHome(home).state.exists()


def test_a_failing_block_stops_its_stack_and_one_home_holds_one(home: Path) -> None:
    supervisors: list[ProcessId] = []

    def work_that_fails() -> None:
        with running_stack(home, ONLY_POSTGRES) as stack:
            supervisors.append(stack.state.supervisor)
            with pytest.raises(AlreadyRunning, match="atropos down"), running_stack(home, ONLY_POSTGRES):
                raise AssertionError("there cannot be a second one")
            assert query(stack.database_url, "SELECT 1") == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work_that_fails()
    assert not is_alive(supervisors[0])


def test_status_probes_every_part_and_says_where_its_address_came_from(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(home=home)
    before = commands.status(settings)
    assert not before.running
    assert before.healthy

    state = up(home, BOTH).state
    report = commands.status(settings)
    assert report.running
    assert report.temporal_ui == state.temporal_ui
    lines = {part.name: part for part in report.parts}
    assert {name: line.health for name, line in lines.items()} == {
        "temporal": Health.OK,
        "postgres": Health.OK,
        "engine": Health.NOT_STARTED,
    }
    assert str(home) in lines["postgres"].source
    assert state.database_url is not None
    password = state.database_url.get_secret_value().split(":")[2].split("@")[0]
    assert password not in report.model_dump_json()

    monkeypatch.setenv("DATABASE_URL", "postgresql://u:hidden@127.0.0.1:1/x")
    elsewhere = commands.status(load_settings(home=home))
    lines = {part.name: part for part in elsewhere.parts if part.source == "DATABASE_URL"}
    assert lines["postgres"].health is Health.FAILING
    assert not elsewhere.healthy
    assert "hidden" not in elsewhere.model_dump_json()


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


def test_a_stack_that_is_still_starting_is_stopped_and_whoever_waits_is_told(empty_home: Path) -> None:
    told: list[BaseException] = []

    def wait_for_it() -> None:
        try:
            up(empty_home, ONLY_POSTGRES)
        except StackError as error:
            told.append(error)

    for early in (True, False):
        waiting = threading.Thread(target=wait_for_it)
        waiting.start()
        while launched(StackHome(empty_home)) is None:
            time.sleep(0.005)
        if not early:
            eventually(empty_home, lambda state: state.phase is Phase.STARTING)
        assert down(empty_home).starting
        waiting.join(timeout=60)
        assert "was stopped while it was starting; `atropos up` starts it again." in str(told.pop())
    assert down(empty_home) == DownResult(home=empty_home, stopped=())


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


def test_a_forgotten_password_is_replaced_and_the_data_stay(home: Path) -> None:
    with running_stack(home, ONLY_POSTGRES) as stack:
        query(stack.database_url, "CREATE TABLE kept AS SELECT 3 AS answer")
    place = StackHome(home)
    write_kept(place, Kept())
    with running_stack(home, ONLY_POSTGRES) as stack:
        assert query(stack.database_url, "SELECT answer FROM kept") == 3


def test_a_pid_file_that_names_an_unrelated_process_does_not_keep_postgres_down(home: Path) -> None:
    data = home / "postgres" / "data"
    stranger = subprocess.Popen(["sleep", "100"])
    try:
        (data / "postmaster.pid").write_text(f"{stranger.pid}\n{data}\n1700000000\n5432\n\n127.0.0.1\n")
        with running_stack(home, ONLY_POSTGRES) as stack:
            assert query(stack.database_url, "SELECT 1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to hand Postgres to another user")
def test_as_root_a_home_that_others_cannot_enter_gets_its_data_elsewhere() -> None:
    private = Path(tempfile.mkdtemp(prefix="atropos-stack-", dir="/tmp"))  # mode 0700
    copy = private / "copy"
    try:
        with running_stack(private, ONLY_POSTGRES) as stack:
            folder = read_kept(stack.home).postgres_outside
            assert folder is not None
            assert not folder.is_relative_to(private)
            assert any(str(folder) in note for note in stack.notes)
            query(stack.database_url, "CREATE TABLE kept AS SELECT 5 AS answer")
        with running_stack(private, ONLY_POSTGRES) as stack:
            assert query(stack.database_url, "SELECT answer FROM kept") == 5
        copy.mkdir()
        shutil.copy(private / "kept.json", copy)
        with running_stack(copy, ONLY_POSTGRES) as stack:  # it must not take the original's data
            copied = read_kept(stack.home).postgres_outside
            assert query(stack.database_url, "SELECT to_regclass('kept') IS NULL") is True
        assert copied is not None
        shutil.rmtree(copied)
        shutil.rmtree(folder)
    finally:
        shutil.rmtree(private)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to hand Postgres to another user")
def test_as_root_programs_that_others_cannot_enter_are_copied(home: Path) -> None:
    user = unprivileged_user(None)
    assert user is not None
    programs = copy_programs(installed_programs(), home)
    assert programs.is_relative_to(home)
    shown = subprocess.run(
        [programs / "postgres", "--version"],
        user=user[0],
        group=user[1],
        extra_groups=(),
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.startswith("postgres (PostgreSQL) 18")
    assert copy_programs(installed_programs(), home) == programs


def test_something_that_is_no_grpc_server_on_the_usual_port_is_not_taken_for_temporal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not speaks_http2("127.0.0.1", server.getsockname()[1], timeout_s=0.2)
    assert not speaks_http2("127.0.0.1", 1)
