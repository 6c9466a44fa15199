"""Metrics to Weights & Biases, which can never hurt a run.

Invariant: `Tracker` raises nothing and never waits for W&B. Whatever W&B does, it does in a child process
(`python -m atropos.trainer.tracking`); a thread hands it one row at a time and takes the next when the child has said
that this one is logged. A child that dies, hangs or refuses is ended and started again, ever more rarely, and what it
had not acknowledged is handed over again. Rows wait in a bounded queue, out of which the oldest fall.

A step is logged once: the child keeps the last one in `last_step.json` and skips what is not after it, so whoever
starts again may simply hand over every row there ever was; a lock lets one child at a time do so. The W&B run has an id
made from ours and is continued, not begun.

W&B reads its own environment. The key enters no message and no file of ours.
"""

import faulthandler
import fcntl
import hashlib
import importlib
import importlib.util
import json
import logging
import netrc
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO
from urllib.parse import urlsplit

LAST_STEP: Final = "last_step.json"
CHILD_LOG: Final = "tracking.log"
LOCK: Final = "tracking.lock"
HOSTS: Final = ("api.wandb.ai", "api.forge.coreweave.com")
"""W&B's own servers, by the names under which a netrc file knows them."""
PATIENCE_S: Final = 150.0
"""Longest time for one thing W&B does. Its own limit for starting a run is 90 s."""
RESTS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0)
"""Pauses before the next child; the last one repeats."""
QUEUE: Final = 20_000
"""Rows that wait at most, some 10 MB."""
_TRIES: Final = 3
"""Children that may be lost over one row before it is given up."""
_GRACE_S: Final = 5.0
"""What the parent waits longer than the child's own watchdog."""

_log = logging.getLogger(__name__)
Message = dict[str, Any]


class Tracker:
    """Where the metrics of one run go. Used by one process; every method returns at once and raises nothing."""

    def __init__(
        self,
        folder: Path,
        run_id: str,
        name: str,
        project: str,
        mode: str,
        config: dict[str, Any],
        *,
        patience_s: float = PATIENCE_S,
        rests_s: Sequence[float] = RESTS_S,
        queue: int = QUEUE,
    ) -> None:
        """`folder`: the run's own, kept between processes. `mode`: auto, online, offline or disabled."""
        self._folder = folder
        self._patience_s = patience_s
        self._rests_s = rests_s
        self._mode = resolved_mode(mode)
        self._off = self._mode == "disabled" or _missing()
        self._start: Message = {"id": wandb_id(run_id), "name": name, "project": project, "config": config}
        self._start |= {"mode": self._mode, "folder": str(folder), "patience_s": patience_s}
        self._rows: deque[Message] = deque()
        self._limit = queue
        self._dropped = 0
        self._news = threading.Condition()
        self._closing = False
        self._child: _Child | None = None
        self._thread: threading.Thread | None = None
        self._warned = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics of a step. Steps come in ascending order; one that was logged before is skipped."""
        if self._off:
            return
        row: Message = {"step": step, "metrics": {name: value for name, value in metrics.items() if _number(value)}}
        with self._news:
            if self._closing:
                return
            if len(self._rows) >= self._limit:
                self._rows.popleft()
                self._count_dropped()
            self._rows.append(row)
            if self._thread is None:
                self._thread = threading.Thread(target=self._feed, name="wandb", daemon=True)
                self._thread.start()
            self._news.notify()

    def close(self, timeout_s: float) -> None:
        """Take no more rows; wait that long for those there are. A child that is sending the rest goes on by itself;
        one that is stuck is ended, and one that is lost is not started again: the next process hands its rows over."""
        with self._news:
            self._closing = True
            self._news.notify()
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        child = self._child
        if self._thread.is_alive() and child is not None and not child.ending:
            child.strike()  # and the thread, which waits for it, finds it dead

    def _feed(self) -> None:
        """The thread: hand over row after row until closed."""
        failures = tries = 0
        while (row := self._next()) is not None:
            started = self._child is not None
            try:
                if self._child is None:
                    self._child = self._begin()
                    started = True
                self._child.ask(row)
            except Exception as error:
                tries += started
                self._lost(error)
                if tries < _TRIES:
                    self._put_back(row)
                else:
                    tries = 0
                    self._count_dropped()
                if self._rest(self._rests_s[min(failures, len(self._rests_s) - 1)]):
                    return
                failures += 1
            else:
                failures, tries, self._warned = 0, 0, False
        if self._child is not None:
            try:
                self._child.end()
            except Exception as error:
                self._lost(error)

    def _begin(self) -> "_Child":
        self._folder.mkdir(parents=True, exist_ok=True)
        child = _Child(self._folder / CHILD_LOG, self._patience_s + _GRACE_S)
        self._child = child
        url = child.ask(self._start).get("url")
        _log.info("W&B run: %s (%s)", url or self._folder, self._mode)
        return child

    def _next(self) -> Message | None:
        with self._news:
            self._news.wait_for(lambda: self._rows or self._closing)
            return self._rows.popleft() if self._rows else None

    def _put_back(self, row: Message) -> None:
        with self._news:
            self._rows.appendleft(row)

    def _rest(self, seconds: float) -> bool:
        """True where we are closing: what waits is handed over by the next process."""
        with self._news:
            return self._news.wait_for(lambda: self._closing, seconds)

    def _lost(self, error: Exception) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None
        if not self._warned:
            self._warned = True
            _log.warning("W&B is not reached; the run goes on and it is tried again: %s", error)

    def _count_dropped(self) -> None:
        self._dropped += 1
        if str(self._dropped).strip("0") == "1":
            _log.warning("W&B is too slow or refuses; steps not sent to it so far: %d", self._dropped)


def wandb_id(run_id: str) -> str:
    """The id of the W&B run: the same for the same run wherever it goes on."""
    return hashlib.sha256(run_id.encode()).hexdigest()[:16]


def resolved_mode(mode: str) -> str:
    """`auto` is what W&B's own WANDB_MODE says, else online where a key is found, else offline."""
    if mode != "auto":
        return mode
    said = os.environ.get("WANDB_MODE", "")
    if said in ("online", "offline", "disabled"):
        return said
    return "online" if _keys() else "offline"


def _keys() -> list[str]:
    """W&B's keys as W&B finds them: its variable, and the netrc file's entry for its server."""
    found = [os.environ.get("WANDB_API_KEY", "")]
    own = urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc
    path = Path(os.environ.get("NETRC", "") or "~/.netrc")
    with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError, RuntimeError):
        hosts = netrc.netrc(path.expanduser()).hosts
        found += [hosts[host][2] or "" for host in ((own,) if own else HOSTS) if host in hosts]
    return [key for key in found if key]


def _missing() -> bool:
    """Whether W&B is not installed. A folder of that name is no package."""
    with suppress(ValueError, ImportError):
        spec = importlib.util.find_spec("wandb")
        if spec is not None and spec.origin is not None:
            return False
    _log.warning('Metrics do not go to W&B, which is not installed: pip install "atropos-durable[wandb]"')
    return True


def _number(value: object) -> bool:
    return isinstance(value, int | float)


class _LostChild(Exception):
    """Why the child is of no more use, in words."""


class _Child:
    """The process that runs W&B, asked one thing at a time. Leads a group of its own, W&B's helpers included."""

    def __init__(self, log: Path, patience_s: float) -> None:
        self.ending = False
        self._patience_s = patience_s
        self._rest = b""
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                bufsize=0,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)

    def ask(self, message: Message) -> Message:
        """Send a line and wait for the answer to it. Raises _LostChild or OSError."""
        deadline = time.monotonic() + self._patience_s
        data = memoryview(json.dumps(message, default=str).encode() + b"\n")
        while data:
            self._wait(self._to, selectors.EVENT_WRITE, deadline)
            data = data[os.write(self._to, data) :]
        while b"\n" not in self._rest:
            self._wait(self._from, selectors.EVENT_READ, deadline)
            more = os.read(self._from, 65536)
            if not more:
                raise _LostChild("its process ended")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        answer: Message = json.loads(line)
        if "failed" in answer:
            raise _LostChild(answer["failed"])
        return answer

    def end(self) -> None:
        """Let it send what it has, and end."""
        self.ending = True
        self.ask({"end": True})
        self._process.wait(self._patience_s)
        self._close()

    def strike(self) -> None:
        """End it and its helpers now. While it was not waited for, its id is its own."""
        if self._process.returncode is None:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        self.strike()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _wait(self, handle: int, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(handle, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise _LostChild(f"it did not answer within {self._patience_s:g} s")


# --- the child ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Follow the parent's lines and answer each with one; an end of the input is an end of the run."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what W&B prints is no answer
    try:
        _follow(sys.stdin, answers)
    except BaseException as error:
        _answer(answers, {"failed": _without_keys(f"{type(error).__name__}: {error}")})
        os._exit(1)  # W&B's threads must not keep us
    return 0


def _follow(lines: TextIO, answers: int) -> None:
    start = json.loads(lines.readline())
    folder, patience_s = Path(start["folder"]), start["patience_s"]
    with (folder / LOCK).open("w") as lock:
        _take(lock)
        with _watched(patience_s):
            run = _init(start)
        last = max(_last_step(folder, start["id"]), int(getattr(run, "starting_step", 0) or 0) - 1)
        _answer(answers, {"url": getattr(run, "url", None)})
        for line in lines:
            row = json.loads(line)
            if "end" in row:
                break
            if row["step"] > last:
                with _watched(patience_s):
                    run.log(row["metrics"], step=row["step"], commit=True)
                last = row["step"]
                _keep_step(folder, start["id"], last)
            _answer(answers, {})
        faulthandler.dump_traceback_later(patience_s, exit=True)  # and never disarmed: leaving may hang, too
        run.finish()
    _answer(answers, {})


def _answer(answers: int, message: Message) -> None:
    """A parent that died is no reason to lose what W&B has not sent yet."""
    with suppress(OSError):
        os.write(answers, json.dumps(message).encode() + b"\n")


def _take(lock: TextIO) -> None:
    """Hold the run's lock until the file is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError("another process still tracks this run") from None


def _init(start: Message) -> Any:
    wandb = importlib.import_module("wandb")
    return wandb.init(
        id=start["id"],
        resume="allow",
        project=start["project"],
        name=start["name"],
        config=start["config"],
        dir=start["folder"],
        mode=start["mode"],
        settings={"console": "off", "silent": True},
    )


@contextmanager
def _watched(limit_s: float) -> Iterator[None]:
    """End this process if the block takes longer: W&B may hang inside code that no exception reaches."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _last_step(folder: Path, run: str) -> int:
    """The last step logged to this W&B run; -1 where there is none or nobody knows."""
    try:
        found = json.loads((folder / LAST_STEP).read_text("utf-8"))
        return int(found["step"]) if found["run"] == run else -1
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _keep_step(folder: Path, run: str, step: int) -> None:
    fresh = folder / f"{LAST_STEP}.new"
    fresh.write_text(json.dumps({"run": run, "step": step}), "utf-8")
    os.replace(fresh, folder / LAST_STEP)


def _without_keys(text: str) -> str:
    for key in _keys():
        text = text.replace(key, "***")
    return text[:300]


if __name__ == "__main__":
    sys.exit(main())
