"""What it is worth that rollouts go on while the trainer works: the same run with `staleness.max` 0 and 1.

The model sleeps before each completion, so that rollouts take time and no CPU, as they do with engines of their own;
the trainer's part is real. Both runs begin with the same tiny policy and take the same steps over batches of the same
size, well below what the machine can do. The last line is one JSON object: `async_speedup` (wall time of the
synchronous run over the other's, from the run's start to its last commit), and the mean reward of each on held-out
tasks.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psycopg
from atropos.cli.progress import tiny_policy
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import RunningStack, running_stack
from atropos.cli.temporal import connect, prepare
from atropos.contracts.queues import WORKFLOWS
from atropos.contracts.workflows import RUN_WORKFLOW

from .processes import running

ROLES = ("workflows", "model,tools,control", "trainer")
AT_ONCE = 64


def workers(stack: RunningStack, home: Path, model_s: float) -> AbstractContextManager[None]:
    """One process a role, as the dev stack has them, with a model that sleeps."""
    assert stack.temporal_address is not None
    assert stack.database_url is not None
    given = (
        "--temporal", stack.temporal_address, "--database", stack.database_url.get_secret_value(),
        "--model-s", str(model_s),
    )  # fmt: skip
    commands = [("atropos.benchmarks.sleeping_worker", "--roles", roles, *given) for roles in ROLES]
    return running(commands, home, ATROPOS_HOME=str(home))


def document(policy: Path, engine: str, staleness: int, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": f"staleness-{staleness}",
        "model": {"path": str(policy)},
        "engines": [{"kind": "dev", "url": engine, "concurrency": AT_ONCE}],
        "environments": [{"id": "calculator", "group_size": 8}],
        "sampling": {"temperature": 0.8, "max_tokens": 48},
        "rollout": {"concurrency": given.groups},
        "batch": {"groups": given.groups, "when_short": "train", "resample_cap": 1},
        "staleness": {"max": staleness},
        "trainer": {"kind": "builtin", "steps": given.steps, "optim": {"lr": given.lr, "decay": "linear"}},
        "eval": {"at_end": True, "sets": [{"id": "calculator", "split": "eval", "tasks": given.tasks}]},
    }


async def measure(stack: RunningStack, policy: Path, staleness: int, given: argparse.Namespace) -> dict[str, float]:
    """Seconds from the first lease to the last commit, and the reward at the end."""
    client = await connect(stack.temporal_address)
    await prepare(client)
    run_id = f"run/staleness-{staleness}"
    wanted = document(policy, stack.engine_url or "", staleness, given)
    await client.execute_workflow(RUN_WORKFLOW, wanted, id=run_id, task_queue=WORKFLOWS)
    assert stack.database_url is not None
    with psycopg.connect(stack.database_url.get_secret_value()) as connection:
        seconds, oldest = connection.execute(
            "SELECT extract(epoch FROM max(s.committed_at) - (SELECT created_at FROM runs WHERE run_id = %(run)s))"
            "::float8, max(s.staleness) FROM train_steps s WHERE s.run_id = %(run)s",
            {"run": run_id},
        ).fetchone() or (0.0, 0)
        (reward,) = connection.execute(
            "SELECT mean_reward FROM evaluations WHERE run_id = %s", (run_id,)
        ).fetchone() or (0.0,)
    print(f"staleness {staleness}: {seconds:.1f} s, oldest token {oldest} versions, reward {reward:.3f}", flush=True)
    return {"seconds": seconds, "reward": reward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 episodes a step")
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--tasks", type=int, default=512, help="held-out tasks of the evaluation at the end")
    parser.add_argument("--model-s", type=float, default=1.5, help="seconds each completion sleeps first")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="atropos-bench-", dir="/tmp"))
    home.chmod(0o755)
    try:
        policy = tiny_policy(home, 0)
        options = StackOptions(workers=False, engine_model=policy)
        with running_stack(home, options) as stack, workers(stack, home, given.model_s):
            synchronous = asyncio.run(measure(stack, policy, 0, given))
            asynchronous = asyncio.run(measure(stack, policy, 1, given))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    figures = {
        "async_speedup": synchronous["seconds"] / asynchronous["seconds"],
        "reward_sync": synchronous["reward"],
        "reward_async": asynchronous["reward"],
        "seconds_sync": synchronous["seconds"],
        "seconds_async": asynchronous["seconds"],
    }
    print(json.dumps({"steps": given.steps} | {name: round(value, 3) for name, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
