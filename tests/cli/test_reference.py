"""Pages made from code say what the code says now."""

import inspect
from pathlib import Path

import pytest
import typer
from atropos.cli.main import _COMMANDS
from atropos.cli.reference import _inner, _members, command_line, field_notes, main, run_file, sections
from atropos.contracts.runfile import RunConfig
from atropos.settings import Settings
from typer.testing import CliRunner

program = typer.Typer()
program.command()(main)


def test_the_committed_pages_are_what_the_code_writes() -> None:
    result = CliRunner().invoke(program, ["--check"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("page", ["run-file.md", "cli.md"])
def test_a_page_that_was_changed_by_hand_is_seen(page: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(program, ["--folder", str(tmp_path), *arguments])
        return result.exit_code, result.output

    assert run("--check")[0] == 1
    assert run() == (0, "")
    assert run("--check")[0] == 0
    (tmp_path / page).write_text((tmp_path / page).read_text().replace("number", "numeral", 1))
    code, shown = run("--check")
    assert code == 1
    assert "numeral" in shown


def test_every_field_of_the_run_file_has_its_line() -> None:
    page = run_file()
    for path, model in sections(RunConfig):
        assert f"## {f'`{path}`' if path else 'The top'}\n" in page
        assert all(f"\n| `{name}` | " in page for name in model.model_fields)
    assert "| `lr` | number, ≥ 0 | `1e-06` |" in page
    assert "`external`: Somebody else leases batches" in page


def test_every_field_of_the_run_file_says_what_it_means() -> None:
    silent = [
        f"{path}.{name}"
        for path, model in sections(RunConfig)
        for name, field in model.model_fields.items()
        if not (field_notes(model).get(name) or list(_members(field.annotation)) or _inner(field.annotation)[0])
    ]
    assert silent == [], "a text below each field; a section has that of its model"
    assert all(inspect.getdoc(model) for _, model in sections(RunConfig))


def test_every_command_and_every_setting_has_its_place() -> None:
    page = command_line()
    assert all(f"\n## `atropos {name}`\n" in page for name in _COMMANDS)
    assert all(f"ATROPOS_{name.upper()}` | " in page for name in Settings.model_fields if name != "database_url")
    assert "\n### `atropos run start`\n" in page
