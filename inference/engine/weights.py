"""Weights on disk and in memory: reading, checking, replacing, digesting.

Invariant: a reload is all or nothing. Everything that can go wrong (a missing, torn or foreign file, a wrong name or
shape, a value that is not a number) goes wrong while reading, before the first tensor in memory changes.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

RANK = "dp0:pp0:pcp0:tp0"
"""How vLLM names the only rank of an engine that is not split."""


class WeightsError(Exception):
    """Weights that cannot be loaded, as one sentence."""


def read(path: Path, model: Any) -> dict[str, Tensor]:
    """The tensors under `path` (a model folder or one safetensors file), checked against `model`.

    Raises WeightsError without having touched the model.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files(path):
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file} cannot be read as safetensors: {error}") from error
    _check(path, tensors, model)
    return tensors


def replace(model: Any, tensors: dict[str, Tensor]) -> None:
    """Copy tensors that `read` returned into the model."""
    with torch.no_grad():
        for name, target in model.state_dict().items():
            if name in tensors:
                target.copy_(tensors[name])


def checksums(model: Any) -> dict[str, str]:
    """The SHA-256 of every parameter's bytes in memory, under vLLM's names."""
    return {f"{RANK}:{name}": _digest(parameter.detach()) for name, parameter in model.named_parameters()}


def _digest(tensor: Tensor) -> str:
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise WeightsError(f"{path} does not exist on the engine's machine.")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"{index} is not an index of shards: {error!r}") from error
        return [path / name for name in sorted(names)]
    single = path / "model.safetensors"
    if not single.is_file():
        raise WeightsError(f"{path} holds no model.safetensors.")
    return [single]


def _check(path: Path, tensors: dict[str, Tensor], model: Any) -> None:
    current: dict[str, Tensor] = model.state_dict()
    own = {name for name, _ in model.named_parameters()}
    problems = [f"{name} is missing" for name in sorted(own - tensors.keys())]
    problems += [f"{name} is unknown to the model" for name in sorted(tensors.keys() - current.keys())]
    for name in sorted(tensors.keys() & current.keys()):
        problems += _differences(name, tensors[name], current[name])
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise WeightsError(f"{path} does not fit the model: {_listed(problems[:3])}{more}.")


def _differences(name: str, new: Tensor, old: Tensor) -> list[str]:
    if new.shape != old.shape:
        return [f"{name} has shape {tuple(new.shape)} instead of {tuple(old.shape)}"]
    if new.is_floating_point() != old.is_floating_point():
        return [f"{name} has type {new.dtype} instead of {old.dtype}"]
    if new.is_floating_point() and not bool(torch.isfinite(new).all()):
        return [f"{name} holds values that are not finite"]
    return []


def _listed(parts: Iterable[str]) -> str:
    return "; ".join(parts)
