"""A model folder becomes a model in memory, or one sentence that says why not."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from .batching import PAGE, BatchLimits, Unsupported, check_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to serve: its longest context in tokens and the ids that end its answers."""

    model: Any
    context: int
    eos_ids: frozenset[int]


def pick_device(name: str) -> torch.device:
    """`auto` is the best that this machine has. Raises Unsupported for one that it has not."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, there in available.items() if there)
    if not available[name]:
        raise Unsupported(f"There is no {name} device here; start with --device cpu or --device auto.")
    return torch.device(name)


def load(folder: Path, device: torch.device, dtype: str, max_model_len: int | None) -> Loaded:
    """Raises Unsupported with one sentence if `folder` does not hold a model that can be served."""
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=DTYPES[dtype], local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise Unsupported(f"{folder} cannot be loaded as a model: {' '.join(str(error).split())}") from error
    config = model.config.get_text_config()
    check_model(config)
    longest = int(config.max_position_embeddings)
    if max_model_len is not None and max_model_len > longest:
        raise Unsupported(f"--max-model-len {max_model_len} is more than the model's {longest} positions.")
    return Loaded(model.to(device).eval(), max_model_len or longest, _eos_ids(folder, config))


def limits(loaded: Loaded, sequences: int, cache_mb: int) -> BatchLimits:
    """Sizes for `sequences` at once and at most `cache_mb` MiB of keys and values. Raises Unsupported if that is too
    little for a single context."""
    config = loaded.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = 2 * config.num_hidden_layers * heads * head * loaded.model.dtype.itemsize
    # A page more than needed for each sequence, and a fifth spare: the scheduler holds back when the cache is 85% full.
    one = loaded.context + PAGE
    tokens = min(cache_mb * 2**20 // width, sequences * one * 5 // 4)
    if tokens < one * 5 // 4:
        raise Unsupported(
            f"--kv-cache-mb {cache_mb} holds {tokens} tokens, too few for a context of {loaded.context};"
            " raise it or lower --max-model-len."
        )
    return BatchLimits(sequences=sequences, step_tokens=max(1024, 2 * sequences), cache_tokens=tokens)


def _eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """The generation settings' ids if there are any, else the model's."""
    ids: Any = config.eos_token_id
    settings = folder / "generation_config.json"
    if settings.is_file():
        ids = json.loads(settings.read_text()).get("eos_token_id", ids)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
