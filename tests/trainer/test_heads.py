"""The head of a tied model, written apart: the same numbers under vLLM's name, and the policy stays tied."""

import json
from pathlib import Path

import pytest
import torch
from atropos.contracts.training import TrainerConfig
from atropos.trainer import checkpoint
from atropos.trainer.heads import HEAD_FILE, has_head, is_tied, write_head
from atropos.trainer.learner import Learner
from atropos.trainer.problem import TrainerProblem
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def made(folder: Path, *, tied: bool = True, shard: str = "1GB", dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(str(folder), max_shard_size=shard)
    return folder


@pytest.mark.parametrize("shard", ["1GB", "5KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_is_the_embeddings_once_more(tmp_path: Path, shard: str, dtype: torch.dtype) -> None:
    folder = made(tmp_path, shard=shard, dtype=dtype)
    head = load_file(write_head(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    assert list(head) == ["lm_head.weight"]
    assert torch.equal(head["lm_head.weight"], model.get_input_embeddings().weight)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    index = folder / "model.safetensors.index.json"
    assert index.is_file() is (shard == "5KB")
    if index.is_file():
        assert json.loads(index.read_text())["weight_map"]["lm_head.weight"] == HEAD_FILE


def test_writing_it_again_changes_nothing(tmp_path: Path) -> None:
    folder = made(tmp_path, shard="5KB")
    write_head(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_head(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_model_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, tied=False)
    with pytest.raises(TrainerProblem, match="is no model with tied embeddings"):
        write_head(folder)
    assert not has_head(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_that_does_not_say_is_read_by_whether_there_is_a_head(tmp_path: Path, tied: bool) -> None:
    folder = made(tmp_path, tied=tied)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert is_tied(folder) is tied


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x10" + b"\0" * 7 + b"{} "])
def test_what_is_no_file_of_weights_is_refused_with_a_sentence(tmp_path: Path, content: bytes) -> None:
    folder = made(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(TrainerProblem, match=r"cannot be untied|0 tensors that look like embeddings"):
        write_head(folder)
    assert not has_head(folder)


def test_checkpoints_of_a_model_whose_head_is_apart_have_theirs_and_the_policy_stays_tied(tmp_path: Path) -> None:
    folder, config = made(tmp_path / "model"), TrainerConfig()
    write_head(folder)
    first = Learner.fresh(folder, config, 0)
    digest = first.save(tmp_path / "first")
    again = Learner.restore(tmp_path / "first", config)
    assert again.save(tmp_path / "second") == digest == checkpoint.verify(tmp_path / "second")
    head, weights = load_file(tmp_path / "second" / HEAD_FILE), load_file(tmp_path / "second" / "model.safetensors")
    assert torch.equal(head["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert "lm_head.weight" not in again.checksums()


def test_checkpoints_of_other_models_have_no_head_apart(tmp_path: Path) -> None:
    Learner.fresh(made(tmp_path / "model"), TrainerConfig(), 0).save(tmp_path / "checkpoint")
    assert not has_head(tmp_path / "checkpoint")
