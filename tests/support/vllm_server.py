"""A real vLLM for a CPU as a process that a test may kill, and start again where it was.

It lives in a virtual environment of its own, which `make test-vllm` makes: its dependencies are not ours. A server
is a group of processes: it starts as a group, and ends or dies as one.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import atropos
import httpx

from .dev_engine import free_port

ROOT: Final = Path(atropos.__file__).parent
PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
COMPLETE: Final = ROOT / ".venv-vllm" / ".complete"
"""Written when everything is installed; half a virtual environment has none."""
START_S: Final = 1800.0
"""Half a minute on an idle machine; one on which much else runs takes ten minutes."""
_TELL_EVERY_S: Final = 10.0
_END_S: Final = 30.0
_FLAGS: Final = (
    *("--served-model-name", "policy", "--host", "127.0.0.1", "--logprobs-mode", "processed_logprobs"),
    *("--enable-scale-out", "--dtype", "float32", "--enforce-eager"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),  # for the chat route, which training does not use
)
_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class VllmServer:
    """A server of one model, on one port whenever it runs. `say` is told while it starts."""

    def __init__(
        self, model: Path, folder: Path, context: int, *arguments: str, say: Callable[[str], None] = print
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"vllm-{port}.log"
        """Of all its lives."""
        self._folder, self._say = folder, say
        self._command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *_FLAGS]
        self._command += ["--max-model-len", str(context), "--port", str(port), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return once it answers."""
        # Nothing of ours may be imported there: the checkout's own folders are packages of other names, too.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=inherited | _ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._until_healthy(self._process)

    def kill(self) -> None:
        """End it at once, every process of it."""
        if self._process is not None:
            _signal(self._process, signal.SIGKILL)
            self._process.wait()

    def end(self) -> None:
        """End it as a supervisor does."""
        if self._process is None:
            return
        _signal(self._process, signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._say("vLLM did not end by itself")
        self.kill()  # and what its group left behind

    def _until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        began = told = time.monotonic()
        while not self._healthy():
            now = time.monotonic()
            if process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {process.returncode} while it started:\n{_end_of(self.log)}")
            if now - began > START_S:
                raise RuntimeError(f"vLLM did not answer within {START_S:.0f} s:\n{_end_of(self.log)}")
            if now - told >= _TELL_EVERY_S:
                told = now
                self._say(f"vLLM is starting, {now - began:.0f} s: {_end_of(self.log, 1)[:120]}")
            time.sleep(0.5)
        self._say(f"vLLM answers after {time.monotonic() - began:.0f} s")

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def vllm_server(
    model: Path, folder: Path, context: int, *arguments: str, say: Callable[[str], None] = print
) -> Iterator[VllmServer]:
    """A server that runs until the block ends; its log is in `folder`."""
    server = VllmServer(model, folder, context, *arguments, say=say)
    try:
        server.start()
        yield server
    finally:
        server.end()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_of(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:])
