"""An export that was stopped anywhere goes on to the file that an undisturbed one writes; two at once are refused."""

import asyncio
import hashlib
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from atropos.cli import export_files, export_rows, export_write
from atropos.cli.errors import CommandError
from atropos.cli.export_files import note_of, part_of
from atropos.cli.export_rows import ExampleLayout, Shape
from atropos.cli.export_write import Request, export
from atropos.contracts.messages import ImagePart, TextPart, assistant, user
from atropos.db.exports import Wanted
from atropos.db.store import open_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..db.exported import group, trained

SLOW = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
async def run_id(database_url: str) -> AsyncIterator[str]:
    """Twelve groups of three, some with images and with what no column of text can hold."""
    store = await open_store(database_url)
    made = await trained(store, "sums")
    for number in range(12):
        said = [assistant(f"é\x00{number}"), assistant("\ud800"), assistant(f"{number}")]
        prompt = user((TextPart(text="?"), ImagePart(url="https://x/y.png"))) if number % 3 == 0 else user("?")
        await group(store, made, "sums", [1.0, 0.5, 0.25], messages=said, prompt=(prompt,))
    yield made
    await store.close()


@pytest.fixture(autouse=True)
def _configured(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)


def asked(run_id: str, out: Path, *, force: bool = False, **wanted: Any) -> Request:
    shape = Shape(ExampleLayout.MESSAGES)
    return Request("sft-gen", [run_id], str(out), Wanted(**wanted), shape, out.suffix == ".parquet", force)


def digests(folder: Path) -> dict[str, str]:
    """What is in a folder, but for the note, which knows inodes."""
    return {
        one.name: hashlib.sha256(one.read_bytes()).hexdigest()
        for one in folder.iterdir()
        if not one.name.endswith(".json")
    }


class Killed(BaseException):
    """As a signal that nothing can catch: what the process held is lost."""


@SLOW
@given(
    row=st.integers(0, 36),
    every=st.sampled_from([0.0, 0.002, 3600.0]),
    suffix=st.sampled_from(["jsonl", "parquet"]),
    test=st.sampled_from([0.0, 0.4]),
    tail=st.binary(max_size=9),
    dies=st.sampled_from([Killed, KeyboardInterrupt]),
)
async def test_stopped_at_any_row_and_gone_on_with_is_the_undisturbed_file(
    run_id: str, row: int, every: float, suffix: str, test: float, tail: bytes, dies: type[BaseException]
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        whole, stopped, left = (Path(name) / part for part in ("whole", "stopped", "left"))
        whole.mkdir()
        stopped.mkdir()
        await asyncio.to_thread(export, asked(run_id, whole / f"x.{suffix}", test=test))
        patch.setattr(export_files, "CHECKPOINT_S", every)
        seen = 0

        def line(*arguments: Any) -> Any:
            nonlocal seen
            if seen == row:
                shutil.copytree(stopped, left)  # what a kill at this moment leaves behind
                raise dies
            seen += 1
            return made(*arguments)

        made = export_rows.line
        with patch.context() as inner:
            inner.setattr(export_write, "line", line)
            try:
                await asyncio.to_thread(export, asked(run_id, stopped / f"x.{suffix}", test=test))
            except (Killed, KeyboardInterrupt):
                assert not (stopped / f"x.{suffix}").exists()
        again = left if dies is Killed and left.exists() else stopped
        part = part_of(again / f"x.{suffix}")
        if part.exists():
            with part.open("ab") as file:
                file.write(tail)  # written, and not known to be
        if not (again / f"x.{suffix}").exists():
            await asyncio.to_thread(export, asked(run_id, again / f"x.{suffix}", test=test))
        assert digests(again) == digests(whole)


@SLOW
@given(place=st.integers(0, 9), suffix=st.sampled_from(["jsonl", "parquet"]), test=st.sampled_from([0.0, 0.4]))
async def test_a_kill_between_the_last_row_and_the_last_rename_costs_nothing(
    run_id: str, place: int, suffix: str, test: float
) -> None:
    """Before or after each step by which full parts get their names."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        whole.mkdir()
        killed.mkdir()
        await asyncio.to_thread(export, asked(run_id, whole / f"x.{suffix}", test=test))
        steps = 0

        def counted(step: Any) -> Any:
            def counting(self: Path, *arguments: Any, **named: Any) -> Any:
                nonlocal steps
                if steps == place and note_is_full(killed / f"x.{suffix}"):
                    raise Killed
                steps += note_is_full(killed / f"x.{suffix}")
                return step(self, *arguments, **named)

            return counting

        with patch.context() as inner:
            for step in ("replace", "unlink"):
                inner.setattr(Path, step, counted(getattr(Path, step)))
            try:
                await asyncio.to_thread(export, asked(run_id, killed / f"x.{suffix}", test=test))
            except Killed:
                steps = -1
        if steps == -1:
            await asyncio.to_thread(export, asked(run_id, killed / f"x.{suffix}", test=test))
        assert digests(killed) == digests(whole)


def note_is_full(out: Path) -> bool:
    note = export_files._read_note(note_of(out))
    return note is not None and note.full


async def test_the_same_command_again_says_that_it_is_complete(
    run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.jsonl"
    await asyncio.to_thread(export, asked(run_id, out))
    before = out.stat()
    await asyncio.to_thread(export, asked(run_id, out))
    assert f"{out} is complete: 36 rows, as of 20" in " ".join(capsys.readouterr().err.split())
    assert out.stat() == before
    with pytest.raises(CommandError, match="is there already"):
        await asyncio.to_thread(export, asked(run_id, out, top=1))
    assert out.stat() == before
    await asyncio.to_thread(export, asked(run_id, out, top=1, force=True))
    assert len(out.read_text("utf-8").splitlines()) == 12


async def test_an_unfinished_export_is_not_mixed_with_another(run_id: str, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    await stop_after(5, asked(run_id, out))
    before = part_of(out).read_bytes()
    with pytest.raises(CommandError, match=r"holds 5 of 36 rows .* repeat that command .* or start anew with --force"):
        await asyncio.to_thread(export, asked(run_id, out, top=1))
    assert part_of(out).read_bytes() == before
    await asyncio.to_thread(export, asked(run_id, out, top=1, force=True))
    assert len(out.read_text("utf-8").splitlines()) == 12


async def test_a_file_that_is_no_export_is_left_alone(run_id: str, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    part_of(out).write_text("mine")
    with pytest.raises(CommandError, match=r"x\.jsonl\.part is there already and no export's"):
        await asyncio.to_thread(export, asked(run_id, out))
    assert part_of(out).read_text() == "mine"


async def test_a_finished_file_that_was_taken_away_is_written_anew(run_id: str, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    await asyncio.to_thread(export, asked(run_id, out))
    text = out.read_text("utf-8")
    out.unlink()
    await asyncio.to_thread(export, asked(run_id, out))
    assert out.read_text("utf-8") == text


async def test_rows_that_are_gone_meanwhile_are_noticed(run_id: str, database_url: str, tmp_path: Path) -> None:
    store = await open_store(database_url)
    try:
        other = await trained(store, "sums")
        for _ in range(3):
            await group(store, other, "sums", [1.0, 0.5])
        out = tmp_path / "x.jsonl"
        await stop_after(3, asked(other, out))
        async with store.direct() as connection:
            await connection.execute(
                "UPDATE groups SET state = 'failed', failure = 'engine' WHERE run_id = %s AND group_no = 1", (other,)
            )
    finally:
        await store.close()
    with pytest.raises(CommandError, match=r"other rows than those .* \(4 instead of 6\); remove that file"):
        await asyncio.to_thread(export, asked(other, out))


async def stop_after(rows: int, request: Request) -> None:
    made, seen = export_rows.line, 0

    def line(*arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen > rows:
            raise KeyboardInterrupt
        return made(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_write, "line", line)
        with pytest.raises(KeyboardInterrupt):
            await asyncio.to_thread(export, request)


# --- processes of their own, as from two shells -----------------------------------------------------------------------


@asynccontextmanager
async def held_up(database_url: str) -> AsyncIterator[None]:
    """No export gets beyond choosing its rows meanwhile."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        await connection.execute("LOCK TABLE scores IN ACCESS EXCLUSIVE MODE")
        yield
        await connection.rollback()


async def shell(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "atropos.cli.main", "sft-gen", *arguments, stdout=PIPE, stderr=PIPE, env=os.environ.copy()
    )


async def begun(out: Path) -> None:
    async with asyncio.timeout(60):
        while not note_of(out).exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
async def test_a_command_that_was_stopped_is_repeated(
    run_id: str, database_url: str, tmp_path: Path, sent: signal.Signals
) -> None:
    out = tmp_path / "x.jsonl"
    async with held_up(database_url):
        process = await shell(run_id, "--out", str(out))
        await begun(out)
        process.send_signal(sent)
        _, err = await process.communicate()
    assert not out.exists()
    if sent is signal.SIGINT:
        assert process.returncode == 130
        assert f"0 of 36 rows are in {part_of(out)}; repeat the command to go on." in err.decode()
    again = await shell(run_id, "--out", str(out))
    _, err = await again.communicate()
    assert again.returncode == 0, err
    assert "going on after 0 of 36 rows" in err.decode()
    assert len(out.read_text("utf-8").splitlines()) == 36
    assert not part_of(out).exists()


async def test_of_two_exports_to_one_file_the_second_is_refused(run_id: str, database_url: str, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    async with held_up(database_url):
        first = await shell(run_id, "--out", str(out))
        await begun(out)
        second = await shell(run_id, "--out", str(out), "--force")
        _, err = await second.communicate()
    assert second.returncode == 1
    assert err.decode() == f"atropos: {out} is being written by another export; wait for it, or name another --out.\n"
    _, err = await first.communicate()
    assert first.returncode == 0, err
    assert len(out.read_text("utf-8").splitlines()) == 36


@pytest.mark.parametrize("name", ["sft", "dpo"])
async def test_the_commands_are_programs_of_their_own(run_id: str, name: str) -> None:
    code = f"import sys; sys.argv[0] = 'atropos-{name}-gen'; from atropos.cli.export import {name}_main; {name}_main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, run_id, "--out", "-", "--top" if name == "sft" else "--pairs", "1"),
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, len(out.splitlines())) == (0, 12), err
