"""How fast examples are exported, beside a bare COPY of the same rows, and what memory that takes.

Run: python -m atropos.benchmarks.exports [--rows 100000] [--rounds 3]. Starts and stops a Postgres of its own. Prints
one JSON line last: `export_ratio`, rows a second of `atropos sft-gen` (its start included) over those of a bare `COPY
(SELECT * FROM sft_examples) TO STDOUT`, the median of the rounds; and `export_rss_growth_mb`, how much more memory the
command takes at its peak for all rows than for a thousand.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import running_stack
from atropos.db.store import open_store
from atropos.tests.support.many import many_episodes

RUN = "run/many"
FEW = 1000
_SENT = "COPY (SELECT * FROM sft_examples) TO STDOUT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="atropos-bench-", dir="/tmp"))
    home.chmod(0o755)
    try:
        with running_stack(home, StackOptions(temporal=False, workers=False)) as stack:
            assert stack.database_url is not None
            figures = measure(stack.database_url.get_secret_value(), home, options.rows, options.rounds)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(json.dumps(figures))


def measure(database: str, home: Path, rows: int, rounds: int) -> dict[str, float]:
    asyncio.run(filled(database, rows))
    few = min(sft_gen(database, home, FEW)[0] for _ in range(rounds))
    ratios, peaks = [], []
    for number in range(rounds):
        count, copied = copy(database)
        peak, exported = sft_gen(database, home, None)
        peaks.append(peak)
        ratios.append(copied / exported)
        rates = f"COPY {count / copied:.0f} rows/s, sft-gen {count / exported:.0f} rows/s"
        print(f"round {number}: {count} rows, {rates}, {peak:.1f} MB", file=sys.stderr)
    return {
        "rows": count,
        "export_ratio": round(statistics.median(ratios), 3),
        "export_rss_growth_mb": round(max(peaks) - few, 1),
    }


async def filled(database: str, rows: int) -> None:
    """A few episodes of each fifty fail, so it takes some more to have so many examples."""
    store = await open_store(database)
    try:
        await many_episodes(store, database, RUN, -(-rows * 50 // (49 * 8)) * 8)
    finally:
        await store.close()


def copy(database: str) -> tuple[int, float]:
    """Rows of the view as Postgres sends them, thrown away, and the seconds that took."""
    began, count = time.perf_counter(), 0
    with psycopg.connect(database) as connection, connection.cursor().copy(_SENT) as sent:
        for _ in sent:
            count += 1
    return count, time.perf_counter() - began


def sft_gen(database: str, home: Path, limit: int | None) -> tuple[float, float]:
    """Peak memory of the command in MB, and the seconds it took, its start included."""
    out = home / "export.jsonl"
    arguments = ["sft-gen", RUN, "--out", str(out), "--allow-negative-scores", "--force"]
    if limit is not None:
        arguments += ["--limit", str(limit)]
    began, peak = time.perf_counter(), 0
    process = subprocess.Popen(
        [sys.executable, "-m", "atropos.cli.main", *arguments],
        env=os.environ | {"DATABASE_URL": database},
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None:
        peak = max(peak, highest_kb(process.pid))
        time.sleep(0.02)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"sft-gen ended with {process.returncode}")
    out.unlink()
    return peak / 1024, seconds


def highest_kb(process: int) -> int:
    """The kernel's own high-water mark of a process, which only grows."""
    try:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
