"""What the trajectory store costs and holds: `python -m atropos.benchmarks.store`, a Postgres of its own.

* `ingest_ratio`: groups a second that are stored whole, over a bare binary COPY of the same rows.
* `lease_p99_ratio`: the lease of a batch while writers are busy, with a backlog over without one.
* `export_ratio`, `export_rss_growth_mb`: SFT examples as a file, over a bare COPY of the same view.
* `backlog_rss_mb`: what a worker grows by while groups wait for a trainer.
* `kill_lost`, `kill_doubled`: what deaths of Postgres cost writers that are busy.

Every ratio is of one run on one machine. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import running_stack
from atropos.db.migrate import upgrade
from atropos.db.store import open_store

from . import exports, store_backlog, store_ingest, store_kills, store_lease

PARTS: Final = ("ingest", "lease", "export", "backlog", "kills")


async def measure(given: argparse.Namespace, home: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    with running_stack(home / "stack", StackOptions(temporal="backlog" in given.parts, workers=False)) as stack:
        assert stack.database_url is not None
        database = stack.database_url.get_secret_value()
        upgrade(database)
        store = await open_store(database)
        if "ingest" in given.parts:
            figures |= await store_ingest.measure(store, database, given.groups, given.rounds)
        if "lease" in given.parts:
            figures |= await store_lease.measure(store, database, given.backlog, given.leases)
        await store.close()
        if "backlog" in given.parts:
            figures |= await store_backlog.measure(stack, database, home / "backlog", given.waiting)
        if "kills" in given.parts:
            figures |= await store_kills.measure(stack, database, given.kills)
    return figures


def exported(given: argparse.Namespace, home: Path) -> dict[str, float]:
    """In a database of its own, since a view is read whole."""
    with running_stack(home / "exports", StackOptions(temporal=False, workers=False)) as stack:
        assert stack.database_url is not None
        found = exports.measure(stack.database_url.get_secret_value(), home, given.rows, given.rounds)
    return {name: found[name] for name in ("export_ratio", "export_rss_growth_mb")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--groups", type=int, default=200, help="groups that are stored in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backlog", type=int, default=100_000, help="sealed groups that wait")
    parser.add_argument("--leases", type=int, default=200)
    parser.add_argument("--rows", type=int, default=100_000, help="rows that are exported")
    parser.add_argument("--waiting", type=int, default=10_000, help="whole groups that wait for a trainer")
    parser.add_argument("--kills", type=int, default=10)
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="atropos-bench-", dir="/tmp"))
    home.chmod(0o755)
    try:
        figures = asyncio.run(measure(given, home))
        if "export" in given.parts:
            figures |= exported(given, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    for name, value in figures.items():
        print(f"{name:<24} {value:10.3f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
