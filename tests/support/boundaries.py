"""Places where a process dies once.

Invariant: a boundary kills once, whatever process reaches it. Who makes its file (O_EXCL) dies at once by SIGKILL,
and everyone after passes. So a run whose worker is started again after each death walks through all its boundaries
and ends, and the files say which were reached.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ABRUPT: Final = 70
"""Exit code of a process that code of a test environment ends without notice."""


@dataclass(frozen=True)
class Boundaries:
    """Places to die at, each a file in `folder` once reached."""

    folder: Path

    def reach(self, boundary: str) -> None:
        """Die here, unless somebody did before."""
        try:
            os.close(os.open(self.folder / boundary, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # nothing after this line runs while the signal is on its way

    @property
    def reached(self) -> set[str]:
        return set(os.listdir(self.folder))
