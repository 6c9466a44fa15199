"""Who holds the loop: told while it does, by name; who only waits is never blamed; who never ends is ended."""

import asyncio
import subprocess
import sys
import time

import pytest
from atropos.activities.watch import LoopWatch

_STOPPED = """
import asyncio, os, signal, subprocess, sys
from atropos.activities.watch import LoopWatch

async def main():
    told = []
    watch = LoopWatch(told.append, told.append, held_s=0.5)
    watch.start()
    for _ in range(2):
        with watch.running("call"):
            waker = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            for _ in range(60):
                sum(range(50_000))
        waker.wait()
        await asyncio.sleep(0.4)
    print(told, flush=True)

asyncio.run(main())
"""
_STUCK = """
import asyncio, contextlib, re
from atropos.activities.watch import LoopWatch

def loops():
    while True:
        sum(range(1000))

def holds_the_interpreter():
    re.match(r"(a+)+$", "a" * 64 + "b")

async def main():
    watch = LoopWatch(print, print, held_s=0.3)
    watch.start()
    watch.end_process_when_stuck(1.5)
    await asyncio.sleep(2)
    print("alive after a wait", flush=True)
    with AROUND:
        FUNCTION()

asyncio.run(main())
"""


async def test_who_holds_the_loop_is_told_and_who_waits_is_not() -> None:
    at_once: list[str] = []
    told = asyncio.Event()
    afterwards: list[str] = []

    def tell(call: str) -> None:
        afterwards.append(call)
        told.set()

    watch = LoopWatch(at_once.append, tell, held_s=0.3)
    watch.start()

    async def waits() -> None:
        with watch.running("waits"):
            await told.wait()

    def hold() -> None:
        deadline = time.monotonic() + 30
        while not at_once and time.monotonic() < deadline:
            time.sleep(0.01)

    async def holds() -> None:
        with watch.running("holds"):
            await asyncio.sleep(0.5)
            hold()

    await asyncio.wait_for(asyncio.gather(waits(), waits(), holds()), 60)
    watch.close()
    assert at_once == afterwards == ["holds"]


def test_a_process_that_was_stopped_blames_nothing_for_it() -> None:
    ended = subprocess.run([sys.executable, "-c", _STOPPED], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("around", ['watch.running("call")', "contextlib.nullcontext()"])
@pytest.mark.parametrize("function", ["loops", "holds_the_interpreter"])
def test_a_loop_that_is_never_free_again_ends_the_process_and_shows_where(function: str, around: str) -> None:
    program = _STUCK.replace("FUNCTION", function).replace("AROUND", around)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "alive after a wait" in ended.stdout
    assert f"in {function}" in ended.stderr
