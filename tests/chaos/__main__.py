"""Replay cells of the fault bench: `python -m atropos.tests.chaos [--cell COMPONENT/MOMENT | --cell all] [--seed N]`.

Without a cell, the cells are listed. Each is played with the seed and judged in one line.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path

from .cells import CELLS, Cell


async def play(cells: list[Cell], seed: int, folder: Path) -> int:
    """How many failed."""
    from transformers.utils.logging import disable_progress_bar

    from .bench import bench  # the list of cells needs no torch

    disable_progress_bar()
    failed = 0
    async with bench(folder) as made:
        for cell in cells:
            verdict = await made.play(cell, seed)
            failed += bool(verdict.problems)
            print(verdict, flush=True)
    return failed


def chosen_by(text: str) -> list[Cell]:
    if text in CELLS:
        return [CELLS[text]]
    return [cell for name, cell in CELLS.items() if text == "all" or name.startswith(text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", default="", help="a cell, the beginning of several, or `all`")
    parser.add_argument(
        "--seed", type=int, default=0, help="which pass of the point is struck, and which tasks are played"
    )
    given = parser.parse_args()
    if not given.cell:
        print("\n".join(CELLS))
        return
    chosen = chosen_by(given.cell)
    if not chosen:
        sys.exit(f"There is no cell {given.cell!r}; without CELL they are listed.")
    folder = Path(tempfile.mkdtemp(prefix="atropos-chaos-", dir="/tmp"))
    folder.chmod(0o755)
    failed = asyncio.run(play(chosen, given.seed, folder))
    if failed:
        print(f"{failed} of {len(chosen)} failed; logs are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()
