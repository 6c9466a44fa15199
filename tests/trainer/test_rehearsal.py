"""After a rehearsal nothing is left to load for a first step, and nothing else is left."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from atropos.trainer.rehearsal import rehearse

from .batches import tiny_folder

FIRST_STEP = """
import sys
from pathlib import Path
from atropos.contracts.training import TrainerConfig
from atropos.trainer.learner import Learner
from atropos.trainer.rehearsal import rehearse

rehearse()
loaded = set(sys.modules)
learner = Learner.fresh(Path(sys.argv[1]), TrainerConfig(), seed=0)
learner.logprobs([[1, 2, 3]])
learner.save(Path(sys.argv[1], "saved"))
print("\\n".join(set(sys.modules) - loaded))
"""


def test_behind_a_rehearsal_a_model_loads_its_own_code_only(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIRST_STEP, str(tiny_folder(tmp_path / "model"))]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [name for name in ended.stdout.split() if not name.startswith("transformers.models.llama")] == []
    assert ended.stderr == ""


def test_a_rehearsal_leaves_no_file_and_no_trace_in_what_is_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    rehearse()
    assert torch.equal(torch.get_rng_state(), before)
    assert list(tmp_path.iterdir()) == []
