"""Whatever W&B does, the run goes on, and each step reaches it once."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from atropos.trainer.tracking import LAST_STEP, Tracker, resolved_mode, wandb_id

WAIT_S = 60.0
KEY = "0123456789abcdef0123456789abcdef01234567"

STAND_IN = """
import json, os, pathlib, sys, time

HERE = pathlib.Path(__file__).parent

def write(entry):
    with (HERE / "seen.jsonl").open("a") as out:
        out.write(json.dumps(entry) + "\\n")

def misbehave(where):
    order = HERE / f"{where}.order"
    if not order.exists():
        return
    how, times = order.read_text().split()
    if times == "once":
        order.unlink()
    if how == "raise":
        raise RuntimeError("refused " + os.environ.get("WANDB_API_KEY", ""))
    if how == "hang":
        time.sleep(3600)
    if how == "exit":
        os._exit(0)
    if how == "leave":
        sys.exit(3)
    print("noise that is no answer", flush=True)

class Run:
    url = "https://wandb.example/run"

    def log(self, metrics, step, commit):
        misbehave("log")
        write({"step": step, "metrics": metrics})

    def finish(self):
        misbehave("finish")
        write({"finished": True})

def init(**given):
    misbehave("init")
    write({"init": given})
    return Run()
"""


@dataclass(frozen=True)
class StandIn:
    """A module named wandb that does as it is told and writes down what it was asked."""

    folder: Path

    def order(self, where: str, how: str, times: str = "once") -> None:
        (self.folder / f"{where}.order").write_text(f"{how} {times}")

    def seen(self, what: str) -> list[Any]:
        path = self.folder / "seen.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry[what] for entry in map(json.loads, lines) if what in entry]


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    return StandIn(folder)


def tracker(folder: Path, mode: str = "offline", **changes: Any) -> Tracker:
    options: dict[str, Any] = {"patience_s": WAIT_S, "rests_s": (0.01,)} | changes
    return Tracker(folder / "tracked", "run/1", "a run", "atropos", mode, {"lr": 1e-3}, **options)


def log(to: Tracker, *steps: int) -> None:
    for step in steps:
        to.log(step, {"loss": 1.0 / (step + 1), "reward": float("nan")})


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_each_step_is_logged_once_however_often_a_worker_starts_again(wandb: StandIn, tmp_path: Path) -> None:
    for last in (3, 3, 8):
        one = tracker(tmp_path)
        log(one, *range(last))
        one.close(WAIT_S)
    assert wandb.seen("step") == list(range(8))
    assert wandb.seen("metrics")[1]["loss"] == 0.5
    assert wandb.seen("finished") == [True] * 3
    first, *again = wandb.seen("init")
    assert again == [first, first]
    assert (first["id"], first["resume"], first["project"]) == (wandb_id("run/1"), "allow", "atropos")
    assert (first["name"], first["config"], first["mode"]) == ("a run", {"lr": 1e-3}, "offline")
    assert json.loads((tmp_path / "tracked" / LAST_STEP).read_text())["step"] == 7


@pytest.mark.parametrize("how", ["raise", "hang", "exit", "leave", "print"])
@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_child_that_is_lost_once_loses_no_step(
    where: str, how: str, wandb: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.order(where, how)
    one = tracker(tmp_path, patience_s=2.0 if how == "hang" else WAIT_S)
    log(one, *range(4))
    until(lambda: len(wandb.seen("step")) >= 4)
    one.close(WAIT_S)
    assert wandb.seen("step") == [0, 1, 2, 3]
    assert caplog.text.count("W&B is not reached") == (how != "print")
    assert len(wandb.seen("finished")) == (how == "print" or where != "finish")


@pytest.mark.parametrize("how", ["raise", "hang", "exit"])
@pytest.mark.parametrize("where", ["init", "log"])
def test_a_child_that_is_always_lost_is_reported_once_and_without_the_key(
    where: str, how: str, wandb: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wandb.order(where, how, "always")
    one = tracker(tmp_path, patience_s=0.3, rests_s=(0.01, 0.01, 3600.0))
    log(one, 0, 1)
    until(lambda: "W&B is not reached" in caplog.text)
    log(one, *range(2, 50))
    one.close(WAIT_S)
    log(one, 50)
    one.close(WAIT_S)
    assert wandb.seen("step") == []
    assert caplog.text.count("W&B is not reached") == 1
    assert KEY not in caplog.text
    assert all(KEY not in path.read_text() for path in (tmp_path / "tracked").iterdir())


def test_a_row_that_is_never_taken_is_given_up_for_the_next(
    wandb: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.order("log", "raise", "always")
    one = tracker(tmp_path)
    log(one, 0)
    until(lambda: "not sent to it so far: 1" in caplog.text)
    (wandb.folder / "log.order").unlink()
    log(one, 1)
    until(lambda: wandb.seen("step") == [1])
    one.close(WAIT_S)


def test_what_does_not_fit_the_queue_falls_out_oldest_first(
    wandb: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.order("init", "hang")
    one = tracker(tmp_path, queue=3, patience_s=2.0)
    log(one, *range(40))
    until(lambda: 39 in wandb.seen("step"))
    one.close(WAIT_S)
    assert wandb.seen("step")[-3:] == [37, 38, 39]
    assert len(wandb.seen("step")) <= 5
    assert "not sent to it so far: 10" in caplog.text
    assert caplog.text.count("not sent to it so far") == 2


def test_closing_ends_a_child_that_is_stuck(wandb: StandIn, tmp_path: Path) -> None:
    wandb.order("log", "hang", "always")
    one = tracker(tmp_path, patience_s=3600.0)
    log(one, 0)
    until(lambda: bool(wandb.seen("init")))
    one.close(0.2)
    thread = one._thread
    assert thread is not None
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert one._child is None


def test_two_processes_never_log_to_one_run_at_once(wandb: StandIn, tmp_path: Path) -> None:
    first, second = tracker(tmp_path), tracker(tmp_path)
    log(first, *range(3))
    until(lambda: wandb.seen("step") == [0, 1, 2])
    log(second, *range(5))
    until(lambda: second._warned)
    assert len(wandb.seen("init")) == 1
    first.close(WAIT_S)
    until(lambda: wandb.seen("step") == [0, 1, 2, 3, 4])
    second.close(WAIT_S)
    assert wandb.seen("finished") == [True, True]


def test_what_was_handed_over_is_finished_after_the_parent_was_killed(wandb: StandIn, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from atropos.trainer.tracking import Tracker\n"
        "one = Tracker(Path(sys.argv[1]), 'run/1', 'a', 'p', 'offline', {})\n"
        "one.log(0, {'loss': 1.0})\n"
        "time.sleep(3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "tracked")])
    until(lambda: bool(wandb.seen("step")))
    parent.kill()
    parent.wait()
    until(lambda: bool(wandb.seen("finished")))


def test_disabled_starts_nothing(wandb: StandIn, tmp_path: Path) -> None:
    one = tracker(tmp_path, "disabled")
    log(one, 0)
    one.close(WAIT_S)
    assert wandb.seen("init") == []
    assert not (tmp_path / "tracked").exists()


def test_without_wandb_there_is_one_line_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    one = tracker(tmp_path)
    log(one, 0, 1)
    one.close(WAIT_S)
    (record,) = caplog.records
    assert 'pip install "atropos-durable[wandb]"' in record.message
    assert not (tmp_path / "tracked").exists()


def test_a_folder_that_cannot_be_made_hurts_nobody(
    wandb: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tracked").write_text("a file")
    one = tracker(tmp_path)
    log(one, 0)
    until(lambda: "W&B is not reached" in caplog.text)
    one.close(WAIT_S)
    assert wandb.seen("init") == []


NETRC = f"machine api.wandb.ai login user password {KEY}\n"


@pytest.mark.parametrize(
    ("variables", "netrc", "mode"),
    [
        ({}, None, "offline"),
        ({"WANDB_API_KEY": KEY}, None, "online"),
        ({}, NETRC, "online"),
        ({}, NETRC.replace("api.wandb.ai", "api.forge.coreweave.com"), "online"),
        ({}, NETRC.replace("api.wandb.ai", "example.org"), "offline"),
        ({"WANDB_BASE_URL": "https://wandb.example"}, NETRC.replace("api.wandb.ai", "wandb.example"), "online"),
        ({}, "machine", "offline"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, None, "offline"),
    ],
)
def test_auto_is_online_where_a_key_is_found(
    variables: dict[str, str], netrc: str | None, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if netrc is not None:
        (tmp_path / "netrc").write_text(netrc)
    assert resolved_mode("auto") == mode
    assert resolved_mode("online") == "online"


def test_an_offline_run_is_written_and_continued_under_the_same_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra [wandb]")
    for last in (2, 4):
        one = tracker(tmp_path)
        log(one, *range(last))
        one.close(WAIT_S)
    files = sorted((tmp_path / "tracked" / "wandb").glob(f"offline-run-*/run-{wandb_id('run/1')}.wandb"))
    assert files
    assert all(b"loss" in file.read_bytes() for file in files)
    assert json.loads((tmp_path / "tracked" / LAST_STEP).read_text()) == {"run": wandb_id("run/1"), "step": 3}
