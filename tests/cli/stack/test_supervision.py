"""A stack with real servers begins once, and whatever ends it ends all of it: nothing is lost, nothing is left over."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from atropos.cli.stack.commands import DownResult, down, up
from atropos.cli.stack.errors import StackError
from atropos.cli.stack.files import StackHome
from atropos.cli.stack.process import ProcessId, is_alive
from atropos.cli.stack.running import AlreadyRunning, running_stack
from atropos.cli.stack.state import Phase, launched, read_state

from .homes import BOTH, ONLY_POSTGRES, eventually, new_folder, process_of, query


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
