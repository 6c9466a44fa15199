"""Worker processes of a benchmark: started, ready, and stopped however the measurement ends."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running(modules: Sequence[Sequence[str]], folder: Path, **environment: str) -> Iterator[None]:
    """One process for each `python -m` command line, once all of them poll. Exits where one ends before."""
    started = []
    try:
        for number, arguments in enumerate(modules):
            ready = folder / f"ready-{number}"
            ready.unlink(missing_ok=True)
            env = {**os.environ, "ATROPOS_READY_FILE": str(ready), "ATROPOS_LOG_LEVEL": "WARNING", **environment}
            started.append((subprocess.Popen([sys.executable, "-m", *arguments], env=env), ready))
        for process, ready in started:
            while not ready.exists():
                if process.poll() is not None:
                    sys.exit(f"{process.args!r} ended with status {process.returncode}")
                time.sleep(0.05)
        yield
    finally:
        for process, _ in started:
            process.terminate()
        for process, _ in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
