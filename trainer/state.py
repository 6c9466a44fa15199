"""What a trainer holds in memory: model, optimiser, random state, version; from a folder and back into one.

Invariant: a folder written from a state and read again gives that state bit for bit, and the same state gives the same
files, so that two attempts at one checkpoint agree on its hash. The folder is also an ordinary model folder: an engine
loads it as it is. The small files of the model's folder (tokenizer, renderer, generation settings) travel along in
memory, because the folder they came from may be gone by the next save.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from ..contracts.training import OptimConfig, TrainerConfig
from .checkpoint import MANIFEST
from .heads import has_head, write_head
from .problem import TrainerProblem

FOLDER: Final = "trainer"
"""Inside a checkpoint, what only a trainer reads."""
_STATE: Final = "state.json"
_OPTIMIZER: Final = "optimizer.safetensors"
_WEIGHTS: Final = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz"}
_WRITTEN: Final = {"config.json", MANIFEST}
_SMALL: Final = 64 * 2**20


@dataclass
class State:
    """Everything the next step depends on, beside its batch."""

    model: Any
    optimizer: torch.optim.Optimizer
    rng: Tensor
    """Of torch's CPU generator; each step continues it."""
    version: int
    """Steps taken."""
    beside: dict[str, bytes]
    """Small files of the model's folder."""
    head_apart: bool
    """The folder has the head of a tied model as a tensor of its own, and so have the folders made from it."""

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])


def fresh(folder: Path, optim: OptimConfig, seed: int, device: str) -> State:
    """Version 0: the weights of a model folder."""
    model = _load(folder, device)
    rng = torch.Generator().manual_seed(seed).get_state()
    return State(model, _optimizer(model, optim), rng, 0, _beside(folder), has_head(folder))


def read(folder: Path, optim: OptimConfig, device: str) -> State:
    """The state that `fill` wrote."""
    model = _load(folder, device)
    try:
        saved = json.loads((folder / FOLDER / _STATE).read_text("utf-8"))
        version = int(saved["version"])
        rng = torch.frombuffer(bytearray(base64.b64decode(saved["rng"])), dtype=torch.uint8)
        tensors = load_file(folder / FOLDER / _OPTIMIZER)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise TrainerProblem(f"{folder} holds no trainer's state that can be read: {_line(error)}.") from error
    return State(model, _optimizer(model, optim, tensors), rng, version, _beside(folder), has_head(folder))


def fill(state: State, config: TrainerConfig, folder: Path) -> None:
    """Write model, small files, optimiser and the rest into an empty folder."""
    with quiet():
        state.model.save_pretrained(str(folder))
    if state.head_apart:
        write_head(folder)
    for name, content in state.beside.items():
        (folder / name).write_bytes(content)
    (folder / FOLDER).mkdir()
    save_file(_moments(state), folder / FOLDER / _OPTIMIZER)
    saved = {
        "version": state.version,
        "config": config.model_dump(mode="json"),
        "rng": base64.b64encode(bytes(state.rng.tolist())).decode(),
    }
    (folder / FOLDER / _STATE).write_text(json.dumps(saved, indent=1, sort_keys=True) + "\n", "utf-8")


def checksums(model: Any) -> dict[str, str]:
    """The SHA-256 of every parameter's bytes in memory."""
    return {name: _digest(parameter.detach()) for name, parameter in model.named_parameters()}


def _digest(tensor: Tensor) -> str:
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def _load(folder: Path, device: str) -> Any:
    """In float32, whatever the folder's type: updates of 1e-6 are lost in half precision. Without dropout, so that the
    policy that trains is the one that sampled."""
    if not (folder / "config.json").is_file():
        raise TrainerProblem(f"{folder} is no model folder: it holds no config.json.")
    try:
        with quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        model = model.to(device).eval()
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise TrainerProblem(f"{folder} cannot be loaded as a model: {_line(error)}") from error
    if lacking := sorted(found["missing_keys"]):
        raise TrainerProblem(f"{folder} lacks weights of its model: {', '.join(lacking[:3])}.")
    return model


def _optimizer(model: Any, optim: OptimConfig, tensors: dict[str, Tensor] | None = None) -> torch.optim.Optimizer:
    """AdamW over all parameters, with the moments that `_moments` returned."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    optimizer = torch.optim.AdamW(
        parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )
    moments: dict[int, dict[str, Tensor]] = {}
    for key, tensor in (tensors or {}).items():
        name, _, kind = key.rpartition(".")
        if name not in names:
            raise TrainerProblem(f"the optimiser's state knows {name}, which the model has not.")
        moments.setdefault(names.index(name), {})[kind] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return optimizer


def _moments(state: State) -> dict[str, Tensor]:
    return {
        f"{name}.{kind}": value.detach().cpu().contiguous()
        for name, parameter in state.model.named_parameters()
        for kind, value in state.optimizer.state.get(parameter, {}).items()
    }


def _beside(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in _WRITTEN
        and path.suffix not in _WEIGHTS
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= _SMALL
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's progress bars, which are for a person who waits."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
