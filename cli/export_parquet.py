"""A part of an export as a Parquet file: the same rows in the same order, in columns.

Invariant: the file is a function of the part alone. What Arrow cannot hold, lone surrogates, becomes U+FFFD and the
row's `lossy` says so. Messages of all rows have one type: `content` is text, or, where any message of the file has
parts, parts everywhere. A row group is in memory at a time.
"""

import base64
import binascii
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .errors import CommandError
from .export_files import Note
from .export_rows import Images, PairLayout, Shape

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS: Final = 1000
GROUP_BYTES: Final = 16 * 2**20
_EPISODE_FIELDS: Final = ("member", "attempt", "reward", "stop", "policy_version", "versions", "scorers", "sampled_at")


def require() -> None:
    """Raise CommandError where pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise CommandError("Parquet needs pyarrow: pip install 'atropos-durable[parquet]'.") from None


def to_parquet(part: Path, made: Path, note: Note, shape: Shape, pairs: bool) -> None:
    """Write the lines of a full part as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = note.counts.get("parts", 0) > 0
    schema = _schema(shape, parts, pairs)
    with pq.ParquetWriter(made, schema, compression="zstd") as writer:
        for rows in _groups(part):
            writer.write_table(pa.Table.from_pylist([_row(one, parts, shape) for one in rows], schema=schema))


def _groups(part: Path) -> Iterator[list[bytes]]:
    held: list[bytes] = []
    size = 0
    with part.open("rb") as lines:
        for one in lines:
            held.append(one)
            size += len(one)
            if len(held) == GROUP_ROWS or size >= GROUP_BYTES:
                yield held
                held, size = [], 0
    if held:
        yield held


def _row(line: bytes, parts: bool, shape: Shape) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(line)
    if b"\\ud" in line:
        from ..db.exports_exact import has_surrogates, readable

        if has_surrogates(row):
            row = readable(row)
            row["lineage"]["lossy"] = True
    if parts:
        for name in ("messages", "prompt", "completion", "chosen", "rejected"):
            for message in _messages(row.get(name)):
                if isinstance(message["content"], str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
    if shape.images is Images.COLUMN:
        row["images"] = [_image(url) for url in row["images"]]
    return row


def _messages(column: Any) -> list[dict[str, Any]]:
    return [column] if isinstance(column, dict) else column or []


def _image(url: str) -> dict[str, Any]:
    """As the feature Image of `datasets` stores it: the bytes of a data URI, or the address."""
    head, _, data = url.partition(",")
    if head.startswith("data:") and head.endswith(";base64"):
        try:
            return {"bytes": base64.b64decode(data, validate=True), "path": None}
        except binascii.Error:
            pass
    return {"bytes": None, "path": url}


def _schema(shape: Shape, parts: bool, pairs: bool) -> "pa.Schema":
    import pyarrow as pa

    message = _message(shape, parts)
    messages = pa.list_(message)
    names = {
        "messages": ("messages",),
        "prompt-completion": ("prompt", "completion"),
        "explicit": ("prompt", "chosen", "rejected"),
        "implicit": ("chosen", "rejected"),
        "axolotl": ("messages", "chosen", "rejected"),
    }[shape.layout.value]
    single = shape.layout is PairLayout.AXOLOTL
    columns = [(name, message if single and name != "messages" else messages) for name in names]
    if shape.images is Images.COLUMN:
        columns.append(("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))))
    columns += [(name, pa.float64()) for name in (("chosen_reward", "rejected_reward") if pairs else ("reward",))]
    return pa.schema([*columns, ("lineage", _lineage(pairs))])


def _message(shape: Shape, parts: bool) -> "pa.DataType":
    import pyarrow as pa

    text = pa.string()
    part = [("type", text), ("text", text)]
    if shape.images is Images.INLINE:
        part.append(("image_url", pa.struct([("url", text)])))
    call = pa.struct([("id", text), ("type", text), ("function", pa.struct([("name", text), ("arguments", text)]))])
    return pa.struct(
        [
            ("role", text),
            ("content", pa.list_(pa.struct(part)) if parts else text),
            ("reasoning_content", text),
            ("tool_calls", pa.list_(call)),
            ("tool_call_id", text),
            ("name", text),
        ]
    )


def _lineage(pairs: bool) -> "pa.DataType":
    import pyarrow as pa

    text, whole = pa.string(), pa.int32()
    types: dict[str, Any] = {
        "member": whole,
        "attempt": whole,
        "reward": pa.float64(),
        "stop": text,
        "policy_version": whole,
        "versions": pa.list_(whole),
        "scorers": pa.list_(pa.struct([("name", text), ("version", text)])),
        "sampled_at": text,
    }
    group = [("run_id", text), ("group_no", whole)]
    group += [(name, text) for name in ("kind", "environment", "environment_version", "split", "task_key")]
    episode = [(name, types[name]) for name in _EPISODE_FIELDS]
    sides = [("chosen", pa.struct(episode)), ("rejected", pa.struct(episode))] if pairs else episode
    return pa.struct([*group, *sides, ("lossy", pa.bool_())])
