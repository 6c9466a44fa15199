"""The pages are one site: each link leads somewhere, to the heading it names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import atropos
import pytest

from .support.scripted import make_model

ROOT = Path(atropos.__file__).parent


def complaints(folder: Path) -> list[str]:
    """What a strict build warns of; it fails for that alone. (With `--quiet` it would warn of nothing.)"""
    shutil.copytree(ROOT / "docs", folder / "docs", dirs_exist_ok=True)
    shutil.copy(ROOT / "mkdocs.yml", folder)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=folder, capture_output=True, text=True, check=False
    )
    found = [line for line in done.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert (done.returncode == 0) == (not found), done.stderr
    return found


def test_every_link_between_pages_leads_somewhere(tmp_path: Path) -> None:
    assert complaints(tmp_path) == []


@pytest.mark.parametrize("link", ["nowhere.md", "run-file.md#no-such-field"])
def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "new.md").write_text(f"[there]({link})\n")
    assert link in "".join(complaints(tmp_path))


@pytest.mark.parametrize("home", [".atropos", "elsewhere/of mine"])
@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_the_example_of_a_run_finds_the_model_wherever_the_stack_lives(page: str, home: str, tmp_path: Path) -> None:
    make_model(tmp_path / home / "model")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = re.findall(r"^(?:MODEL=|atropos run check ).*$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert [line.split("=")[0].split(" -f")[0] for line in lines] == ["MODEL", "atropos run check"]
    shell = f'atropos() {{ "{sys.executable}" -m atropos.cli.main "$@"; }}\n' + "\n".join(lines)
    named = {} if home == ".atropos" else {"ATROPOS_HOME": str(tmp_path / home)}
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("ATROPOS_", "DATABASE_URL"))}
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env=plain | named, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Nothing was started." in done.stdout
