"""The page of the schema says what a migrated database says now."""

from pathlib import Path

import psycopg
import typer
from atropos.cli.schema import main, schema_page
from atropos.db.models import Base
from typer.testing import CliRunner

program = typer.Typer()
program.command()(main)


def test_the_committed_page_is_what_the_database_says(database_url: str) -> None:
    result = CliRunner().invoke(program, ["--check", "--url", database_url])
    assert result.exit_code == 0, result.output


def test_a_page_that_was_changed_by_hand_is_seen(database_url: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(program, ["--folder", str(tmp_path), "--url", database_url, *arguments])
        return result.exit_code, result.output

    assert run("--check")[0] == 1
    assert run() == (0, "")
    page = tmp_path / "schema.md"
    page.write_text(page.read_text().replace("The run", "A walk", 1))
    code, shown = run("--check")
    assert code == 1
    assert "A walk" in shown
    assert "atropos.cli.schema" in shown


def test_every_table_view_and_column_has_its_place(database_url: str) -> None:
    page = schema_page(database_url)
    for table in Base.metadata.tables.values():
        part = page.split(f"\n### `{table.name}`\n")[1].split("\n### ")[0]
        assert part.startswith(f"\n{table.comment}.\n")
        for column in table.columns:
            assert f"\n| `{column.name}` | " in part
            assert (column.comment or "").replace("|", "\\|") in part
    with psycopg.connect(database_url) as connection:
        views = connection.execute("SELECT viewname FROM pg_views WHERE schemaname = 'public'").fetchall()
    assert all(f"\n### `{view}`\n" in page for (view,) in views)
    assert "| `atropos_ids(packed bytea)` → `integer[]` |" in page
    assert not [line for line in page.splitlines() if line.startswith("|") and line.endswith("|  |")]
