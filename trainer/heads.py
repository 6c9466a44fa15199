"""The head of a model whose embeddings are tied, written out as a tensor of its own.

vLLM on a CPU may keep a packed copy of the head, which a reload of tied embeddings does not renew: for matrices of some
shapes it was seen to answer that all went well and to compute with the old head. Served *untied* (`--hf-overrides
'{"tie_word_embeddings": false}'`) it takes in the head as any other tensor, provided that what it loads has one. The
policy itself stays tied: whoever knows that it is finds the same tensor twice.

Invariant: the same model gives the same files; the embeddings' own file is never written to. Neither torch nor numpy is
needed: bytes are copied.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from .problem import TrainerProblem

HEAD_FILE: Final = "lm_head.safetensors"
"""Beside the model's other files. Where it is, every checkpoint that a trainer makes of the model has one, too."""
_HEAD: Final = "lm_head.weight"
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight")
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_LONGEST_HEADER: Final = 2**27
_PART: Final = 2**24


@dataclass(frozen=True)
class _Tensor:
    """Where the bytes of a tensor are."""

    file: Path
    begin: int
    size: int
    kind: str
    shape: list[int]


def is_tied(folder: Path) -> bool:
    """Whether the model in a folder has tied embeddings, as far as its files can be read.

    A kind of model that is tied unless it says otherwise need not say so; then it is tied where it has no head.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        text = config.get("text_config") or {}
        said = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
        return bool(said) if said is not None else not any(_HEAD in _header(file)[0] for file in _files(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def has_head(folder: Path) -> bool:
    return (folder / HEAD_FILE).is_file()


def write_head(folder: Path) -> Path:
    """Write the embeddings of the tied model in `folder` once more, as its head. Returns the new file.

    Raises TrainerProblem where it is no such model.
    """
    if not is_tied(folder):
        raise TrainerProblem(
            f"{folder} is no model with tied embeddings (tie_word_embeddings in config.json); vLLM serves it as it is."
        )
    try:
        found = [one for file in _files(folder) for one in _embeddings(file)]
        if len(found) != 1:
            raise TrainerProblem(
                f"{folder} has {len(found)} tensors that look like embeddings; only one can be the head."
            )
        _copy(found[0], folder / HEAD_FILE)
        _list(folder / _INDEX, found[0].size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainerProblem(f"{folder} cannot be untied: {error}.") from error
    return folder / HEAD_FILE


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _WEIGHTS]
    names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    return [folder / name for name in sorted(names - {HEAD_FILE})]


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of its tensors, and where their bytes begin."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 0 < length <= _LONGEST_HEADER:
            raise ValueError(f"{path.name} is no safetensors file")
        return json.loads(file.read(length)), 8 + length


def _embeddings(path: Path) -> Iterator[_Tensor]:
    header, bytes_begin = _header(path)
    for name, entry in header.items():
        if name.endswith(_EMBEDDINGS):
            begin, end = entry["data_offsets"]
            yield _Tensor(path, bytes_begin + begin, end - begin, entry["dtype"], entry["shape"])


def _copy(tensor: _Tensor, target: Path) -> None:
    entry = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": [0, tensor.size]}
    header = json.dumps({"__metadata__": {"format": "pt"}, _HEAD: entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    hidden = target.with_name(f".{target.name}.part")
    with tensor.file.open("rb") as source, hidden.open("wb") as sink:
        source.seek(tensor.begin)
        sink.write(struct.pack("<Q", len(header)) + header)
        _pour(source, sink, tensor.size)
    hidden.rename(target)


def _pour(source: BinaryIO, sink: BinaryIO, left: int) -> None:
    while left:
        part = source.read(min(left, _PART))
        if not part:
            raise ValueError(f"{getattr(source, 'name', 'a file')} ends too early")
        sink.write(part)
        left -= len(part)


def _list(index: Path, size: int) -> None:
    """Name the head in the index of shards, where there is one: vLLM reads no file that the index does not know."""
    if not index.is_file():
        return
    listed = json.loads(index.read_text("utf-8"))
    if _HEAD not in listed["weight_map"]:
        listed["weight_map"][_HEAD] = HEAD_FILE
        metadata = listed.setdefault("metadata", {})
        metadata["total_size"] = int(metadata.get("total_size", 0)) + size
    index.write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n", "utf-8")
