"""The demo with kills, seed after seed: `python -m atropos.benchmarks.kills --seeds 20 --out FILE`.

Each seed is a demo of its own (policy, order of tasks, trainer and kills follow from it); its last line is appended to
the file, and a seed that is there already is not played again, so the series may be interrupted. At the end the table
of all of them is printed as Markdown, and the last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

COLUMNS = (
    "seed", "kills", "reward_first", "reward_last", "eval_reward", "control_reward", "groups_lost",
    "groups_trained_twice", "tokens_in_flight", "tokens_resampled", "slowest recovery", "wall_s", "verdict",
)  # fmt: skip


def played(path: Path) -> dict[int, dict[str, Any]]:
    """Last lines of earlier demos, by seed."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["seed"]: line for line in map(json.loads, lines)}


def play(seed: int, arguments: list[str]) -> dict[str, Any]:
    """One demo. Raises RuntimeError where it ended without its last line."""
    command = [sys.executable, "-m", "atropos.cli.main", "demo", "--chaos", "--seed", str(seed), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    line = done.stdout.strip().splitlines()[-1:]
    if not line or not line[0].startswith("{"):
        raise RuntimeError(f"the demo of seed {seed} ended with status {done.returncode} and no figures")
    found: dict[str, Any] = json.loads(line[0])
    return found | {"exit": done.returncode}


def beyond_start(line: dict[str, Any]) -> tuple[float, str]:
    """The longest recovery beyond the component's own start, in seconds, and whose it was."""
    late = [
        (kill["recovery_s"] - kill["start_s"] if kill["recovery_s"] and kill["start_s"] else float("inf"), kill)
        for kill in line["kills"]
    ]
    seconds, kill = max(late, key=lambda one: one[0])
    return seconds, str(kill["component"])


def cells(line: dict[str, Any]) -> list[str]:
    seconds, whose = beyond_start(line)
    shown = {
        **line,
        "kills": len(line["kills"]),
        "slowest recovery": f"start + {seconds:.1f} s ({whose})",
        "verdict": "clean" if line["exit"] == 0 else "; ".join(line["problems"]),
    }
    return [f"{shown[name]:.3f}" if isinstance(shown[name], float) else str(shown[name]) for name in COLUMNS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("kills.jsonl"))
    given, further = parser.parse_known_args()
    for seed in range(given.first, given.first + given.seeds):
        if seed in played(given.out):
            continue
        line = play(seed, further)
        with given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"seed {seed}: {cells(line)[-1]}", file=sys.stderr, flush=True)
    lines = sorted(played(given.out).values(), key=lambda line: int(line["seed"]))
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for line in lines:
        print("| " + " | ".join(cells(line)) + " |")
    clean = sum(line["exit"] == 0 for line in lines)
    print(json.dumps({"seeds": len(lines), "clean": clean, "worst_beyond_start_s": max(map(beyond_start, lines))[0]}))


if __name__ == "__main__":
    main()
