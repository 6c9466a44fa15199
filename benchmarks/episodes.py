"""What durability costs: episodes of the product against two baselines, in one run, as ratios.

Groups of eight six-turn episodes, a fake engine, real Temporal and Postgres, every row really written.
* `vs_every_step_scheduled`: turns/s of the product over the same workflows with every step scheduled (rows written).
* `vs_bare_temporal`: turns/s of the product over the same scheduled and local no-ops without rows.
* `steady_wall_ratio`: wall time of 512 episodes, 64 at once, 1 s model and 0.1 s tool, over the ideal 512/64 x 6.6 s.
* `steady_vs_bare_temporal`: the same wall time over that of the same sleeps in bare Temporal without rows: how much of
  the ratio before is the product's, and how much is Temporal on this machine, in this hour.

Each pair is measured in turn and the ratios are medians over `--repeat` rounds. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import RunningStack, running_stack
from atropos.cli.temporal import connect, prepare
from atropos.contracts.messages import user
from atropos.contracts.queues import WORKFLOWS
from atropos.contracts.workflows import RUN_WORKFLOW
from atropos.db.migrate import upgrade
from atropos.environments.registry import load
from atropos.inference.tiny_policy import train_tokenizer
from temporalio.client import Client

from .processes import running

HERE = Path(__file__).parent
GROUP, TURNS, AT_ONCE = 8, 6, 64
STEADY_EPISODES, MODEL_S, TOOL_S = 512, 1.0, 0.1
ROLES = ("workflows", "model,tools,control")


def workers(
    stack: RunningStack, model: Path, variant: str, model_s: float = 0.0, tool_s: float = 0.0
) -> AbstractContextManager[None]:
    """The product's two worker processes (or the bare baseline's), ready."""
    assert stack.temporal_address is not None
    assert stack.database_url is not None
    given = (
        "--temporal", stack.temporal_address, "--database", stack.database_url.get_secret_value(),
        "--model", str(model), "--model-s", str(model_s), "--tool-s", str(tool_s),
    )  # fmt: skip
    roles = ("workflows", "model") if variant == "bare" else ROLES
    return running(
        [("atropos.benchmarks.worker", "--variant", variant, "--roles", role, *given) for role in roles], model
    )


def document(name: str, model: Path, groups: int, tool_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"path": str(model)},
        "engines": [{"kind": "dev", "url": "http://127.0.0.1:1", "concurrency": AT_ONCE}],
        "environments": [
            {"id": f"{HERE / 'environment.py'}:SixTurns", "group_size": GROUP, "args": {"tool_s": tool_s}}
        ],
        "sampling": {"max_tokens": 64},
        "rollout": {"concurrency": AT_ONCE // GROUP},
        "budget": {"groups": groups},
    }


async def product(client: Client, name: str, model: Path, episodes: int, tool_s: float = 0.0) -> float:
    """Seconds for a whole run, from its start to its end."""
    began = time.perf_counter()
    await client.execute_workflow(
        RUN_WORKFLOW, document(name, model, episodes // GROUP, tool_s), id=f"run/{name}", task_queue=WORKFLOWS
    )
    return time.perf_counter() - began


async def bare(client: Client, name: str, episodes: int) -> float:
    """Seconds for as many bare groups, as many at once."""
    window = asyncio.Semaphore(AT_ONCE // GROUP)

    async def group(number: int) -> None:
        async with window:
            group_id = f"{name}/{number}"
            await client.execute_workflow("BareGroup", args=[group_id, GROUP], id=group_id, task_queue="bare")

    began = time.perf_counter()
    await asyncio.gather(*(group(number) for number in range(episodes // GROUP)))
    return time.perf_counter() - began


async def compare(stack: RunningStack, client: Client, model: Path, episodes: int, repeat: int) -> dict[str, float]:
    """Turns/s of each variant, one after another in each round; ratios are medians over rounds."""
    rates: dict[str, list[float]] = {"product": [], "every_step": [], "bare": []}
    for round_no in range(repeat):
        for variant in rates:
            with workers(stack, model, variant):
                if variant == "bare":
                    await bare(client, f"warm-{round_no}", AT_ONCE)
                    seconds = await bare(client, f"bare-{round_no}", episodes)
                else:
                    await product(client, f"warm-{variant}-{round_no}", model, AT_ONCE)
                    seconds = await product(client, f"{variant}-{round_no}", model, episodes)
            rates[variant].append(episodes * TURNS / seconds)
            print(f"round {round_no + 1}: {variant:<11} {rates[variant][-1]:6.1f} turns/s", flush=True)
    pairs = {
        "vs_every_step_scheduled": zip(rates["product"], rates["every_step"], strict=True),
        "vs_bare_temporal": zip(rates["product"], rates["bare"], strict=True),
    }
    ratios = {name: statistics.median(ours / theirs for ours, theirs in pair) for name, pair in pairs.items()}
    return {**ratios, "turns_per_s": statistics.median(rates["product"])}


async def steady(stack: RunningStack, client: Client, model: Path, repeat: int) -> dict[str, float]:
    """512 episodes, 64 at once, with a model and tools that take their time. The median over rounds."""
    walls: dict[str, list[float]] = {"product": [], "bare": []}
    for round_no in range(repeat):
        for variant, seconds in walls.items():
            with workers(stack, model, variant, MODEL_S, TOOL_S):
                if variant == "bare":
                    seconds.append(await bare(client, f"bare-steady-{round_no}", STEADY_EPISODES))
                else:
                    seconds.append(await product(client, f"steady-{round_no}", model, STEADY_EPISODES, TOOL_S))
            print(f"round {round_no + 1}: steady {variant:<8} {seconds[-1]:6.1f} s", flush=True)
    wall = statistics.median(walls["product"])
    ideal = STEADY_EPISODES / AT_ONCE * TURNS * (MODEL_S + TOOL_S)
    against = statistics.median(ours / theirs for ours, theirs in zip(*walls.values(), strict=True))
    return {"steady_wall_ratio": wall / ideal, "steady_wall_s": wall, "steady_vs_bare_temporal": against}


async def measure(stack: RunningStack, model: Path, given: argparse.Namespace) -> dict[str, float]:
    client = await connect(stack.temporal_address)
    await prepare(client)
    figures = await compare(stack, client, model, given.episodes, given.repeat)
    if not given.no_steady:
        figures |= await steady(stack, client, model, given.repeat)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=256, help="episodes a measurement (multiple of 8)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--no-steady", action="store_true", help="leave out the run with a sleeping model")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="atropos-bench-", dir="/tmp"))
    home.chmod(0o755)
    try:
        model = home / "model"
        tools = load(f"{HERE / 'environment.py'}:SixTurns").spec.tool_specs()
        train_tokenizer([([user("Look up 123.")], tools)] * 10, model)
        with running_stack(home, StackOptions(workers=False)) as stack:
            assert stack.database_url is not None
            upgrade(stack.database_url.get_secret_value())
            figures = asyncio.run(measure(stack, model, given))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    shown = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps({"episodes": given.episodes, "rounds": given.repeat, **shown}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
