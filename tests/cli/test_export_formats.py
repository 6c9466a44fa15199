"""Every layout loads with `datasets` from JSON lines and from Parquet, and says the same in both."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from atropos.cli.main import app
from atropos.contracts.messages import ImagePart, TextPart, ToolCall, assistant, user
from atropos.db.store import open_store
from datasets import Image, List, load_dataset
from typer.testing import CliRunner

from ..db.exported import group, trained

DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
Gen = Callable[..., Any]


@pytest.fixture(scope="module")
async def run_id(database_url: str) -> AsyncIterator[str]:
    """Eight groups of two, each of a task of its own: texts, and in the first one a tool call."""
    store = await open_store(database_url)
    made = await trained(store, "sums")
    call = ToolCall(id="call_0_0", name="add", arguments={"a": 1, "é": "x"})
    await group(store, made, "sums", [1.0, 0.5], messages=[assistant("", (call,)), assistant("é\x00")])
    for _ in range(7):
        await group(store, made, "sums", [1.0, 0.5])
    yield made
    await store.close()


@pytest.fixture(scope="module")
async def pictured(database_url: str) -> AsyncIterator[str]:
    """A group that was asked about an image, one that was not, and one that said a lone surrogate."""
    store = await open_store(database_url)
    made = await trained(store, "sums")
    prompt = user((TextPart(text="what?"), ImagePart(url=f"data:image/png;base64,{DOT}")))
    await group(store, made, "sums", [1.0, 0.5], prompt=(prompt,))
    await group(store, made, "sums", [1.0, 0.5])
    await group(store, made, "sums", [1.0, 0.5], messages=[assistant("a\ud800"), assistant("b")])
    yield made
    await store.close()


@pytest.fixture
def gen(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Gen:
    """Run a command: (exit code, standard error)."""
    monkeypatch.setenv("DATABASE_URL", database_url)

    async def run(*arguments: str) -> tuple[int, str]:
        result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
        return result.exit_code, " ".join(result.stderr.split())

    return run


def loaded(path: Path, kind: str = "json") -> list[dict[str, Any]]:
    """As `datasets` reads it, without what is empty."""
    found = load_dataset(kind, data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))
    return [full(dict(row)) for row in found]


def full(value: Any) -> Any:
    """Without fields that are not there: columns have a place for each."""
    if isinstance(value, dict):
        return {name: full(one) for name, one in value.items() if one is not None}
    return [full(one) for one in value] if isinstance(value, list) else value


LAYOUTS = {
    "messages": ("sft-gen", {"messages"}),
    "prompt-completion": ("sft-gen", {"prompt", "completion"}),
    "explicit": ("dpo-gen", {"prompt", "chosen", "rejected"}),
    "implicit": ("dpo-gen", {"chosen", "rejected"}),
    "axolotl": ("dpo-gen", {"messages", "chosen", "rejected"}),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
async def test_a_layout_loads_and_says_the_same_in_both_formats(
    gen: Gen, run_id: str, tmp_path: Path, layout: str
) -> None:
    command, columns = LAYOUTS[layout]
    found = []
    for suffix, kind in (("jsonl", "json"), ("parquet", "parquet")):
        out = tmp_path / f"x.{suffix}"
        code, err = await gen(command, run_id, "--layout", layout, "--out", str(out))
        assert code == 0, err
        found.append(loaded(out, kind))
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text("utf-8").splitlines()]
    assert found[0] == found[1] == [full(line) for line in lines]
    rewards = {"reward"} if command == "sft-gen" else {"chosen_reward", "rejected_reward"}
    assert set(found[0][0]) == columns | rewards | {"lineage"}
    assert len(lines) == {"sft-gen": 16, "dpo-gen": 8}[command] - (layout == "axolotl")


async def test_layouts_are_the_same_conversations_cut_differently(gen: Gen, run_id: str, tmp_path: Path) -> None:
    rows = {}
    for layout, (command, _) in LAYOUTS.items():
        out = tmp_path / f"{layout}.jsonl"
        code, err = await gen(command, run_id, "--layout", layout, "--out", str(out))
        assert code == 0, err
        rows[layout] = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["prompt"] + row["completion"] for row in rows["prompt-completion"]] == [
        row["messages"] for row in rows["messages"]
    ]
    for side in ("chosen", "rejected"):
        assert [row["prompt"] + row[side] for row in rows["explicit"]] == [row[side] for row in rows["implicit"]]
        assert [(row["prompt"], row[side]) for row in rows["explicit"][1:]] == [
            (row["messages"], [row[side]]) for row in rows["axolotl"]
        ]
    assert rows["messages"][1]["messages"][1]["content"] == "é\x00"


async def test_arguments_of_tool_calls_are_objects_where_asked_for(gen: Gen, run_id: str, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    code, err = await gen("sft-gen", run_id, "--tool-arguments", "object", "--out", str(out), "--top", "1")
    assert code == 0, err
    [call] = loaded(out)[0]["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1, "é": "x"}}
    code, err = await gen("sft-gen", run_id, "--tool-arguments", "object", "--out", str(tmp_path / "x.parquet"))
    assert (code, "A column of Parquet has one type" in err) == (1, True)


async def test_both_parts_of_a_split_load_and_share_no_task(gen: Gen, run_id: str, tmp_path: Path) -> None:
    sides = []
    for suffix, kind in (("jsonl", "json"), ("parquet", "parquet")):
        out = tmp_path / f"x.{suffix}"
        code, err = await gen("sft-gen", run_id, "--test", "0.5", "--seed", "1", "--out", str(out))
        assert code == 0, err
        train, test = loaded(out, kind), loaded(tmp_path / f"x-test.{suffix}", kind)
        assert f"{len(train)} rows in {out}, {len(test)} rows in {tmp_path / f'x-test.{suffix}'}" in err
        sides.append((train, test))
    assert sides[0] == sides[1]
    tasks = [{row["lineage"]["task_key"] for row in side} for side in sides[0]]
    assert not tasks[0] & tasks[1]
    assert (len(tasks[0] | tasks[1]), len(sides[0][0]) + len(sides[0][1])) == (8, 16)


async def test_images_are_in_the_messages_or_in_a_column(gen: Gen, pictured: str, tmp_path: Path) -> None:
    url = f"data:image/png;base64,{DOT}"
    inline, column = tmp_path / "inline.jsonl", tmp_path / "column.jsonl"
    for out, images in ((inline, "inline"), (column, "column")):
        code, err = await gen(
            *("sft-gen", pictured, "--images", images, "--out", str(out), "--replace-surrogates", "--top", "1")
        )
        assert code == 0, err
    text = {"type": "text", "text": "what?"}
    first, second, _ = loaded(inline)
    assert first["messages"][0]["content"] == [text, {"type": "image_url", "image_url": {"url": url}}]
    assert second["messages"][0]["content"] == "1 + 1?"
    first, second, _ = loaded(column)
    assert first["messages"][0]["content"] == [text, {"type": "image"}]
    assert (first["images"], second["images"]) == ([url], [])


async def test_images_of_parquet_are_images(gen: Gen, pictured: str, tmp_path: Path) -> None:
    out = tmp_path / "x.parquet"
    code, err = await gen("sft-gen", pictured, "--images", "column", "--out", str(out), "--top", "1")
    assert code == 0, err
    found = load_dataset("parquet", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert found[0]["images"] == [{"bytes": base64.b64decode(DOT), "path": None}]
    assert found.cast_column("images", List(Image()))[0]["images"][0].size == (1, 1)
    assert full(found[1]["messages"])[0]["content"] == [{"type": "text", "text": "1 + 1?"}]


async def test_lone_surrogates_are_exact_or_marked(gen: Gen, pictured: str, tmp_path: Path) -> None:
    exact, readable, columns = (tmp_path / name for name in ("exact.jsonl", "readable.jsonl", "x.parquet"))
    code, err = await gen("sft-gen", pictured, "--out", str(exact))
    assert (code, "1 of them have lone surrogates" in err, "--replace-surrogates" in err) == (0, True, True)
    lines = [json.loads(line) for line in exact.read_text("utf-8").splitlines()]
    assert lines[4]["messages"][1]["content"] == "a\ud800"
    assert not any(line["lineage"]["lossy"] for line in lines)
    code, err = await gen("sft-gen", pictured, "--out", str(readable), "--replace-surrogates")
    assert (code, "1 of them are not exact" in err) == (0, True)
    code, err = await gen("sft-gen", pictured, "--out", str(columns))
    assert (code, "1 of them are not exact" in err) == (0, True)
    for found in (loaded(readable), loaded(columns, "parquet")):
        assert [row["lineage"]["lossy"] for row in found] == [False] * 4 + [True, False]
    assert loaded(readable)[4]["messages"][1]["content"] == "a\ufffd"


async def test_times_are_utc_unless_they_say_otherwise(gen: Gen, run_id: str, tmp_path: Path) -> None:
    for time, fits in (("2000-01-01", True), ("2999-01-01T00:00:00+02:00", False)):
        code, err = await gen("sft-gen", run_id, "--since", time, "--out", str(tmp_path / "x.jsonl"))
        assert (code == 0) == fits, err
        code, err = await gen("sft-gen", run_id, "--until", time, "--out", str(tmp_path / "y.jsonl"))
        assert (code == 0) != fits, err


async def test_a_split_needs_a_file(gen: Gen, run_id: str) -> None:
    assert await gen("sft-gen", run_id, "--out", "-", "--test", "0.5") == (
        1,
        "atropos: --test writes a second file beside the first; name a file with --out.",
    )
