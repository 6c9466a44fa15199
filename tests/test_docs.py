"""The pages are one site: each link leads somewhere, to the heading it names."""

import shutil
import subprocess
import sys
from pathlib import Path

import atropos
import pytest

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
