"""What stands between episodes and engines: `python -m atropos.benchmarks.engines`.

* `pool_slots_busy`: part of the time that 256 places are taken by calls of a second through the pool alone.
* `slots_busy`: the same for 48 places and whole episodes on a fake engine.
* `reload_stall_ratio`: the stall of generation for one reload through `publish`, over that of the bare calls.
* `probe_missed`, `probe_false_alarms`: wrong weights that were called verified, and right ones that were called wrong.

An outage of all engines is `make bench-outage`. The last line is one JSON object.
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
from atropos.contracts.messages import user
from atropos.db.migrate import upgrade
from atropos.environments.registry import load
from atropos.inference.tiny_policy import train_tokenizer

from . import engines_pool, engines_probe, engines_reload
from .engine import save_tiny_llama, serving
from .episodes import HERE

PARTS: Final = ("pool", "slots", "reload", "probe")


def slots(home: Path) -> float:
    model = home / "tokenizer"
    tools = load(f"{HERE / 'environment.py'}:SixTurns").spec.tool_specs()
    train_tokenizer([([user("Look up 123.")], tools)] * 10, model)
    with running_stack(home / "stack", StackOptions(workers=False)) as stack:
        assert stack.database_url is not None
        upgrade(stack.database_url.get_secret_value())
        return asyncio.run(engines_pool.slots_busy(stack, model))


def measure(given: argparse.Namespace, home: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    if "pool" in given.parts:
        figures["pool_slots_busy"] = asyncio.run(engines_pool.pool_slots_busy())
    if "slots" in given.parts:
        figures["slots_busy"] = slots(home)
    if {"reload", "probe"} & set(given.parts):
        folder = home / "model"
        save_tiny_llama(folder)
        with serving(folder, None) as url:
            if "reload" in given.parts:
                figures |= asyncio.run(engines_reload.measure(folder, url, given.rounds))
            if "probe" in given.parts:
                figures |= asyncio.run(engines_probe.measure(folder, url, given.good, given.bad))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=9, help="reloads of each way")
    parser.add_argument("--good", type=int, default=200, help="good reloads")
    parser.add_argument("--bad", type=int, default=40, help="bad reloads of each kind")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="atropos-bench-", dir="/tmp"))
    home.chmod(0o755)
    try:
        figures = measure(given, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    for name, value in figures.items():
        print(f"{name:<24} {value:10.3f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
