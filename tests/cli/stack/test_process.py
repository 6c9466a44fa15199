"""A process is its pid and its start time; a recycled number is somebody else."""

import os
import signal
import subprocess
import time

from atropos.cli.stack.process import ProcessId, identify, is_alive, send, stop_process


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"], start_new_session=True)


def test_a_running_process_is_recognised_and_a_dead_one_is_not() -> None:
    process = sleeper()
    try:
        name = identify(process.pid)
        assert name is not None
        assert is_alive(name)
    finally:
        process.kill()
    while identify(process.pid) is not None:  # ended but not reaped: a zombie counts as gone
        time.sleep(0.01)
    assert not is_alive(name)
    process.wait()
    assert not is_alive(name)


def test_a_recycled_pid_is_never_signalled() -> None:
    process = sleeper()
    try:
        stranger = ProcessId(pid=process.pid, started="another boot:1")
        send(stranger, signal.SIGKILL)
        stop_process(stranger, signal.SIGKILL, 0.1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_stopping_falls_back_to_sigkill() -> None:
    process = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    name = identify(process.pid)
    assert name is not None
    stop_process(name, signal.SIGTERM, 0.2)
    assert process.wait() == -signal.SIGKILL


def test_we_can_identify_ourselves() -> None:
    assert is_alive(identify(os.getpid()))
