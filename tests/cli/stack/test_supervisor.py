"""The supervisor with small real processes: order, restarts, backoff, and an end that leaves nothing behind."""

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from atropos.cli.stack.files import StackHome
from atropos.cli.stack.part import Part
from atropos.cli.stack.process import identify, is_alive
from atropos.cli.stack.state import PartState, PartStatus, Phase, StackState, read_state
from atropos.cli.stack.supervisor import dependency_levels

PRELUDE = """
import sys, os
from pathlib import Path
from atropos.cli.stack.files import StackHome
from atropos.cli.stack.errors import StackError
from atropos.cli.stack.part import Part
from atropos.cli.stack.plan import Plan
from atropos.cli.stack.state import Kept
from atropos.cli.stack.supervisor import Supervisor
home = StackHome(Path(sys.argv[1]))
home.prepare()
env = dict(os.environ)
def sh(name, script, **more):
    return Part(name=name, argv=("/bin/sh", "-c", script), env=env, cwd=str(home.root), **more)
def exists(name):
    return lambda: None if (home.root / name).exists() else "no file yet"
"""
EPILOGUE = """
try:
    Supervisor(home, Plan(parts=parts, kept=Kept())).run()
except StackError as error:
    sys.exit(str(error))
"""

Hold = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def home(tmp_path: Path) -> StackHome:
    return StackHome(tmp_path)


@pytest.fixture
def hold(home: StackHome) -> Iterator[Hold]:
    started: list[subprocess.Popen[str]] = []

    def start(parts: str) -> "subprocess.Popen[str]":
        script = PRELUDE + textwrap.dedent(parts) + EPILOGUE
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", script, str(home.root)],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)


def eventually(home: StackHome, wanted: Callable[[StackState], object]) -> StackState:
    for _ in range(600):
        state = read_state(home)
        if state is not None and wanted(state):
            return state
        time.sleep(0.05)
    raise AssertionError(f"never came to pass; last state: {state}")


def part_of(state: StackState, name: str) -> PartState:
    return next(part for part in state.parts if part.name == name)


def test_parts_start_after_what_they_depend_on_and_stop_before_it(home: StackHome, hold: Hold) -> None:
    supervisor = hold("""
        trap = ("trap 'echo stop-{0} >> order; exit 0' TERM; echo start-{0} >> order; touch {0}; "
                "while :; do sleep 0.05; done")
        once = sh("once", "echo once >> order", depends_on=("base",), one_shot=True)
        top = sh("top", trap.format("top"), depends_on=("once",), ready=exists("top"))
        base = sh("base", trap.format("base"), ready=exists("base"))
        parts = (top, once, base)
    """)
    state = eventually(home, lambda s: s.phase is Phase.RUNNING)
    assert part_of(state, "once").status is PartStatus.DONE
    supervisor.terminate()
    assert supervisor.wait(timeout=30) == 0
    order = (home.root / "order").read_text().split()
    assert order == ["start-base", "once", "start-top", "stop-top", "stop-base"]
    assert not home.state.exists()


def test_a_killed_part_starts_again_and_its_descendants_are_gone(home: StackHome, hold: Hold) -> None:
    hold("""parts = (sh("a", "sleep 100 & echo $! > grandchild; sleep 100"),)""")
    state = eventually(home, lambda s: s.phase is Phase.RUNNING and (home.root / "grandchild").exists())
    first = part_of(state, "a").process
    while not (text := (home.root / "grandchild").read_text()).endswith("\n"):
        time.sleep(0.01)
    grandchild = identify(int(text))
    assert first is not None
    assert is_alive(grandchild)
    subprocess.run(["kill", "-9", str(first.pid)], check=True)
    state = eventually(home, lambda s: part_of(s, "a").restarts == 1 and part_of(s, "a").status == "ready")
    assert part_of(state, "a").process != first
    assert part_of(state, "a").detail == "it was killed by SIGKILL"
    assert not is_alive(grandchild)


def test_a_part_that_keeps_dying_is_reported_and_started_ever_more_rarely(home: StackHome, hold: Hold) -> None:
    hold("""
        script = "echo x >> starts; [ -e broken ] && { echo FATAL: out of luck; exit 3; }; touch up; sleep 100"
        parts = (sh("bad", script, ready=exists("up")),)
    """)
    state = eventually(home, lambda s: s.phase is Phase.RUNNING)
    (home.root / "broken").touch()
    process = part_of(state, "bad").process
    assert process is not None
    subprocess.run(["kill", str(process.pid)], check=True)
    state = eventually(home, lambda s: part_of(s, "bad").restarts >= 3 and part_of(s, "bad").status == "backoff")
    assert part_of(state, "bad").detail == "it ended with status 3: FATAL: out of luck"
    assert state.phase is Phase.RUNNING
    assert len((home.root / "starts").read_text().split()) <= part_of(state, "bad").restarts + 2


def test_a_part_that_cannot_start_ends_the_attempt_with_its_last_log_line(home: StackHome, hold: Hold) -> None:
    supervisor = hold("""
        good = sh("good", "echo $$ > pid; sleep 100")
        parts = (good, sh("bad", "echo FATAL: no luck; exit 3", depends_on=("good",)))
    """)
    _, message = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 1
    assert "bad did not start: it ended with status 3: FATAL: no luck" in message
    state = read_state(home)
    assert state is not None
    assert state.phase is Phase.FAILED
    assert state.error is not None
    assert state.error in message
    assert identify(int((home.root / "pid").read_text())) is None


def test_a_part_that_says_that_it_refuses_is_not_asked_again(home: StackHome, hold: Hold) -> None:
    supervisor = hold("""parts = (sh("bad", "echo x >> starts; echo It cannot be.; exit 2", refuses_with=2),)""")
    _, message = supervisor.communicate(timeout=30)
    assert (supervisor.returncode, message.splitlines()[-1]) == (1, "It cannot be.")
    assert (home.root / "starts").read_text() == "x\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_parts_end_when_the_supervisor_is_killed(home: StackHome, hold: Hold) -> None:
    supervisor = hold("""parts = (sh("a", "exec sleep 100"),)""")
    state = eventually(home, lambda s: s.phase is Phase.RUNNING)
    supervisor.kill()
    supervisor.wait()
    while state.orphans():
        time.sleep(0.02)
    assert read_state(home) is not None


def test_a_second_signal_shortens_the_grace(home: StackHome, hold: Hold) -> None:
    supervisor = hold("""
        parts = (sh("deaf", "trap '' TERM; touch up; while :; do sleep 0.1; done", ready=exists("up"), grace_s=600.0),)
    """)
    eventually(home, lambda s: s.phase is Phase.RUNNING)
    supervisor.send_signal(signal.SIGINT)
    eventually(home, lambda s: s.phase is Phase.STOPPING)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(timeout=60) == 0


def test_a_log_is_bounded_while_its_part_keeps_writing(home: StackHome, hold: Hold) -> None:
    hold("""parts = (sh("chatty", "head -c 17000000 /dev/zero; while :; do echo more; sleep 0.05; done"),)""")
    eventually(home, lambda s: s.phase is Phase.RUNNING)
    log = home.log("chatty")
    for _ in range(600):
        if log.with_suffix(".log.1").exists() and 0 < log.stat().st_size < 100_000:
            break
        time.sleep(0.05)
    assert log.read_text().startswith("more")


def test_dependencies_that_cannot_be_met_are_refused() -> None:
    a = Part(name="a", argv=("true",), depends_on=("b",))
    b = Part(name="b", argv=("true",), depends_on=("a",))
    with pytest.raises(ValueError, match="circle"):
        dependency_levels((a, b))
    assert dependency_levels((a, Part(name="b", argv=("true",)))) == [{"b"}, {"a"}]
