"""A task: one prompt with its data, identified by its content.

Invariant: a task's key is the hash of its data, so the same problem drawn twice is the same task, and the splits
`train`, `eval` and `test` can be proven disjoint.
"""

import hashlib
import json
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

DataT = TypeVar("DataT")

SPLITS = ("train", "eval", "test")


def content_hash(value: Any) -> str:
    """SHA-256 over the canonical JSON (sorted keys, no spaces) of plain data, 32 hex digits (128 bits)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Task(BaseModel, Generic[DataT]):
    """One task. `data` is a pydantic model, dataclass or plain JSON value; `info` rides along and is not hashed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: DataT
    info: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        return content_hash(self.plain_data())

    def plain_data(self) -> Any:
        """`data` as JSON-ready plain values."""
        return TypeAdapter(type(self.data)).dump_python(self.data, mode="json")
