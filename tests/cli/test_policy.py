"""The tiny policy is made once, whole, and found again; a killed or failed creation leaves nothing half-made."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from atropos.cli import policy_recipe
from atropos.cli.policy import PolicyError, PolicyProgress, app, ensure_policy
from atropos.contracts.messages import user
from atropos.contracts.runfile import ModelConfig
from atropos.inference.tokens import load_renderer
from typer.testing import CliRunner

QUICK = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "feed_forward": 16,
    "batch": 4,
    "measure_below": 99.0,
    "measure_every": 4,
    "episodes": 4,
    "band": [-1.0, 2.0],
    "max_steps": 8,
}
"""A policy that knows nothing: only how it is made is tested here."""
PROGRAM = f"""
import os, sys, time
from pathlib import Path
from atropos.cli import policy, policy_recipe
policy_recipe._DEMONSTRATIONS = 20
def report(progress):
    if sys.argv[2] == "hang":
        print("making", flush=True)
        time.sleep(600)
print(policy.ensure_policy(Path(sys.argv[1]), 0, report, {QUICK!r}), flush=True)
"""


@pytest.fixture(autouse=True)
def _few_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_recipe, "_DEMONSTRATIONS", 20)


def program(home: Path, mode: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(home), mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_policy_is_made_once_and_found_again(tmp_path: Path) -> None:
    seen: list[PolicyProgress] = []
    folder = ensure_policy(tmp_path, 0, seen.append, QUICK)
    assert folder.parent == tmp_path / "policy"
    assert seen[-1].done > seen[0].done
    seen.clear()
    assert ensure_policy(tmp_path, 0, seen.append, QUICK) == folder
    assert seen == []
    assert {"config.json", "model.safetensors", "tokenizer.json", "renderer.json", "policy.json"} <= {
        file.name for file in folder.iterdir()
    }
    assert json.loads((folder / "policy.json").read_text())["seed"] == 0

    renderer = load_renderer(ModelConfig(path=str(folder), renderer="qwen3"))
    assert (renderer.name, renderer.context_limit) == ("qwen3", 512)
    assert renderer.decode(renderer.open([user("What is 12 + 34?")])).endswith("<think>\n\n</think>\n\n")


def test_seed_and_settings_name_the_policy() -> None:
    keys = [
        policy_recipe.Recipe(0, QUICK).key,
        policy_recipe.Recipe(0, QUICK).key,
        policy_recipe.Recipe(1, QUICK).key,
        policy_recipe.Recipe(0, {**QUICK, "batch": 5}).key,
    ]
    assert len(set(keys)) == 3
    assert keys[0] == keys[1]


def test_two_processes_make_one_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    killed = program(tmp_path, "hang")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "making\n"
    assert list((tmp_path / "policy").glob(".making-*"))
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)

    both = [program(tmp_path, "go") for _ in range(2)]
    answers = [one.communicate(timeout=180) for one in both]
    assert [(one.returncode, warned) for one, (_, warned) in zip(both, answers, strict=True)] == [(0, ""), (0, "")]
    said = {out.strip() for out, _ in answers}
    assert len(said) == 1
    assert [file.name for file in (tmp_path / "policy").iterdir() if file.is_dir()] == [Path(said.pop()).name]


def test_a_policy_that_does_not_learn_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="took 8 steps"):
        ensure_policy(tmp_path, 0, None, {**QUICK, "band": [0.9, 1.0]})
    assert not [file for file in (tmp_path / "policy").iterdir() if file.is_dir()]


def test_a_home_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "policy").write_text("in the way")
    with pytest.raises(PolicyError, match="cannot be written"):
        ensure_policy(tmp_path, 0, None, QUICK)
    result = CliRunner().invoke(app, ["make", "--home", str(tmp_path)])
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
