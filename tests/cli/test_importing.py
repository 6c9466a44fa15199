"""`atropos import` judges a file before it writes, says what is wrong where, and can be repeated."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from atropos.db.store import open_store

from ..db.samples import rows
from ..support.scripted import make_model
from ..support.world import World
from .conftest import Atropos

ASK = {"role": "user", "content": "2 + 3?"}


def chat(number: int) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", "content": f"it is {number}"}], "reward": number}


def write(path: Path, *documents: Any) -> Path:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in documents]
    path.write_text("\n".join(lines) + "\n")
    return path


async def test_a_file_is_imported_once_and_its_new_lines_later(atropos: Atropos, tmp_path: Path) -> None:
    path = write(tmp_path / "small talk.jsonl", chat(1), chat(2), "", chat(2))
    code, out, err = await atropos("import", str(path))
    assert (code, out) == (0, "run/import-small-talk\n")
    assert "2 groups imported; 1 lines were there already." in err
    write(path, chat(1), chat(2), chat(3))
    code, _, err = await atropos("import", str(path))
    assert (code, "1 groups imported; 2 lines were there already." in err) == (0, True)
    code, _, err = await atropos("import", str(path))
    assert (code, "0 groups imported; 3 lines were there already." in err) == (0, True)
    code, out, err = await atropos("audit", "run/import-small-talk", "--store-only")
    assert code == 0, out
    code, out, _ = await atropos("sft-gen", "run/import-small-talk", "--out", "-")
    assert [json.loads(line)["reward"] for line in out.splitlines()] == [1.0, 2.0, 3.0]
    code, out, _ = await atropos("run", "list")
    assert "run/import-small-talk" in out
    assert "completed" in out
    code, out, _ = await atropos("episode", "show", "run/import-small-talk/group/0/episode/0")
    assert (code, "it is 1" in out) == (0, True)
    code, _, err = await atropos("view", "run/import-small-talk", "--html", str(tmp_path / "pages"))
    assert (code, "3 episodes in" in err) == (0, True)


async def test_nothing_of_a_file_with_a_bad_line_is_imported_unless_that_is_asked_for(
    atropos: Atropos, tmp_path: Path
) -> None:
    path = write(tmp_path / "bad.jsonl", chat(1), "{", {"messages": []}, chat(2))
    code, out, err = await atropos("import", str(path), "--run", "mixed")
    assert (code, out) == (1, "")
    assert "bad.jsonl:2: it is not JSON" in err
    assert "bad.jsonl:3: no assistant speaks in it" in err
    assert "2 of 4 lines cannot be imported, so nothing was" in err
    assert (await atropos("audit", "run/mixed", "--store-only"))[0] == 2
    code, out, err = await atropos("import", str(path), "--run", "mixed", "--skip-bad")
    assert (code, out) == (0, "run/mixed\n")
    assert "bad.jsonl:2: it is not JSON" in err
    assert "2 groups imported; 2 bad lines left out." in err


async def test_an_imported_run_is_marked_and_over(atropos: Atropos, world: World, tmp_path: Path) -> None:
    path = tmp_path / "zipped.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(chat(1)).encode()))
    code, _, err = await atropos("import", str(path), "--environment", "sums")
    assert code == 0, err
    store = await open_store(world.database)
    try:
        run = "run/import-zipped"
        assert await rows(store, "SELECT state, reason FROM runs WHERE run_id = %s", run) == [
            ("completed", "it was imported from files")
        ]
        assert await rows(store, "SELECT label, ref FROM environments WHERE run_id = %s", run) == [("sums", "import")]
        [(text,)] = await rows(store, "SELECT text FROM events WHERE run_id = %s AND kind = 'import'", run)
        assert text == "1 groups were imported from zipped.jsonl.gz"
    finally:
        await store.close()


async def test_tokens_without_text_need_their_tokenizer(atropos: Atropos, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(model)
    group = {
        "tokens": [[5, 6, 7, 8]],
        "masks": [[-100, -100, 7, 8]],
        "scores": [1],
        "inference_logprobs": [[1, 1, -1, -1]],
    }
    path = write(tmp_path / "groups.jsonl", group)
    code, _, err = await atropos("import", str(path))
    assert (code, "name its tokenizer with --tokenizer" in err) == (1, True)
    code, _, err = await atropos("import", str(path), "--tokenizer", str(model))
    assert code == 0, err
    assert "Token ids were kept of 1 of 1 episodes." in err


@pytest.mark.parametrize("name", ["nowhere.jsonl", ""])
async def test_what_is_no_file_is_one_sentence(atropos: Atropos, tmp_path: Path, name: str) -> None:
    code, _, err = await atropos("import", str(tmp_path / name))
    assert (code, err.count("\n")) == (1, 1)
    assert "There is no file" in err


async def test_a_damaged_archive_is_one_sentence(atropos: Atropos, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(chat(1)).encode())[:-9])
    code, _, err = await atropos("import", str(path))
    assert (code, "cut.jsonl.gz cannot be read" in err) == (1, True)
