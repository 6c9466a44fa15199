"""Exports from the command line load with `datasets`, say what they wrote, and go on where they were stopped."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import IO

import pytest
from atropos.db.store import open_store
from datasets import load_dataset

from ..db.samples import closed, training_run
from .conftest import Atropos


@pytest.fixture(scope="module")
async def run_id(database_url: str) -> str:
    """A run with rewards 0, ½ and 1 in its first group, and 0 and 1 in its second."""
    store = await open_store(database_url)
    try:
        run_id = await training_run(store)
        await closed(store, run_id, (0.0, 1.0, 0.5))
        await closed(store, run_id, (1.0, 0.0))
    finally:
        await store.close()
    return run_id


async def test_supervised_examples_load_with_their_lineage(atropos: Atropos, run_id: str, tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    code, _, err = await atropos("sft-gen", run_id, "--out", str(path), "--top", "1")
    assert code == 0, err
    assert f"2 rows in {path}" in err
    loaded = load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path))
    assert loaded["reward"] == [1.0, 1.0]
    assert [one["member"] for one in loaded["lineage"]] == [1, 0]
    assert [message["role"] for message in loaded[0]["messages"]] == ["user", "assistant"]
    assert loaded[0]["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 0}'}


async def test_prompt_and_completion_are_two_columns_where_asked_for(atropos: Atropos, run_id: str) -> None:
    code, out, _ = await atropos("sft-gen", run_id, "--out", "-", "--layout", "prompt-completion", "--top", "1")
    row, _ = (json.loads(line) for line in out.splitlines())
    assert (code, sorted(row)) == (0, ["completion", "lineage", "prompt", "reward"])
    assert row["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    assert row["lineage"]["run_id"] == run_id


async def test_preference_pairs_load(atropos: Atropos, run_id: str, tmp_path: Path) -> None:
    path = tmp_path / "dpo.jsonl"
    code, _, err = await atropos("dpo-gen", run_id, "--out", str(path), "--pairs", "2", "--min-difference", "0.5")
    assert code == 0, err
    loaded = load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path))
    assert list(zip(loaded["chosen_reward"], loaded["rejected_reward"], strict=True)) == [(1, 0), (1, 0.5), (1, 0)]
    assert loaded[0]["prompt"][0]["content"] == "1 + 1?"
    assert loaded[0]["lineage"]["chosen"]["member"] == 1


async def test_a_file_is_not_overwritten_unasked_and_no_half_one_is_left(
    atropos: Atropos, run_id: str, tmp_path: Path
) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text("mine\n")
    code, out, err = await atropos("sft-gen", run_id, "--out", str(path))
    assert (code, out) == (1, "")
    assert "is there already" in err
    assert path.read_text() == "mine\n"
    code, _, err = await atropos("sft-gen", run_id, "--out", str(path), "--min-reward", "7", "--force")
    assert code == 1
    assert "Nothing fits" in err
    assert path.read_text() == "mine\n"
    assert (await atropos("sft-gen", run_id, "--out", str(path), "--force"))[0] == 0
    assert json.loads(path.read_text().splitlines()[0])["reward"] == 1.0
    code, _, err = await atropos("sft-gen", run_id, "--out", str(tmp_path / "nowhere" / "x.jsonl"))
    assert (code, err.count("\n")) == (1, 1)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["kept.jsonl", "kept.jsonl.export.json"]


async def test_an_unknown_run_is_one_sentence(atropos: Atropos, run_id: str) -> None:
    code, out, err = await atropos("dpo-gen", "run/nobody", "--out", "-")
    assert (code, out) == (1, "")
    assert "There is no run" in err
    assert err.count("\n") == 1


async def export(database_url: str, out: int | IO[bytes], *arguments: str) -> tuple[int | None, str]:
    """Exit code and standard error of a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atropos.cli.main", *arguments),
        stdout=out,
        stderr=PIPE,
        env=os.environ | {"DATABASE_URL": database_url},
    )
    _, err = await process.communicate()
    return process.returncode, err.decode()


async def test_what_is_no_file_is_not_replaced(atropos: Atropos, run_id: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target, words in (
        (str(pipe), "is no file that could be replaced"),
        (str(tmp_path), "is a folder; --out names a file in it, or - for standard output"),
        ("", "--out is empty; name a file, or - for standard output"),
    ):
        code, _, err = await atropos("sft-gen", run_id, "--out", target, "--force")
        assert (code, err.count("\n")) == (1, 1)
        assert words in err
    assert pipe.is_fifo()


@pytest.mark.parametrize("command", ["sft-gen", "dpo-gen"])
async def test_a_full_standard_output_is_one_sentence(database_url: str, command: str) -> None:
    store = await open_store(database_url)
    try:
        run_id = await training_run(store)
        for _ in range(3):  # more than standard output holds back, and than one page of rows that is fetched
            await closed(store, run_id, tuple(1.0 + index for index in range(128)))
    finally:
        await store.close()
    with Path("/dev/full").open("wb") as full:  # noqa: ASYNC230 - opening a device takes no time
        most = ("--pairs", "128") if command == "dpo-gen" else ()
        found = await export(database_url, full, command, run_id, "--out", "-", *most)
    assert found == (1, "atropos: Standard output cannot be written: No space left on device.\n")
