"""Real servers of a stack: they come back with their data, and run with the settings that we rely on."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
import pytest
from atropos.cli.stack import commands
from atropos.cli.stack.addresses import speaks_http2
from atropos.cli.stack.commands import Health, up
from atropos.cli.stack.files import StackHome
from atropos.cli.stack.ports import choose_port
from atropos.cli.stack.postgres_server import copy_programs, installed_programs, unprivileged_user
from atropos.cli.stack.process import command_line, identify
from atropos.cli.stack.running import running_stack
from atropos.cli.stack.state import Kept, read_kept, write_kept
from atropos.cli.stack.temporal_server import installed_temporal
from atropos.contracts.search import SEARCH_ATTRIBUTES
from atropos.settings import load_settings
from temporalio.client import Client

from .homes import BOTH, ONLY_POSTGRES, eventually, process_of, query, restarted


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
