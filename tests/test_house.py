"""The rules of the house: who imports whom, what stays light, who reads the process environment, who serves what."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import atropos
import pytest
from atropos.activities.catalogue import activities_of
from atropos.activities.services import Services
from atropos.contracts import activities as contract
from atropos.contracts import activities_training as contract_of_training
from atropos.contracts import rescoring as contract_of_rescoring
from atropos.contracts.activities import Activity
from atropos.contracts.queues import QUEUE_OF, WorkerRole
from temporalio import activity

ROOT = Path(atropos.__file__).parent
BESIDE = {"tests", "benchmarks", "deploy", "examples", "docs", "build", "dist"}
"""Folders that are no part of the package."""
ABOVE = {"contracts", "environments", "inference", "trainer", "db", "activities", "workflows", "settings"}
MAY_IMPORT = {
    "contracts": set(),
    "workflows": {"contracts"},
    "environments": {"contracts"},
    "inference": {"contracts"},
    "trainer": {"contracts"},
    "db": {"contracts"},
    "activities": {"contracts", "environments", "inference", "trainer", "db"},
    "settings": set(),
    "gateway": ABOVE,
    "dashboard": ABOVE,
    "cli": ABOVE | {"dashboard", "gateway"},
}
COMMAND_LINES = {("db/migrate.py", "settings"), ("inference/engine/__main__.py", "settings")}
"""What a module needs only when it is run as a program."""
WITHOUT_TEMPORAL = {"contracts", "environments", "inference", "trainer", "db"}


def modules() -> Iterator[tuple[Path, str]]:
    """Every module of the package with its room; those at the root are rooms of their own."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if not (parts[0].startswith(".") or parts[0] in BESIDE or parts == ("__init__.py",)):
            yield path, parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Absolute names of what a module imports, wherever it does so."""
    here = ["atropos", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_imports_between_rooms_run_one_way() -> None:
    wrong = []
    for path, room in modules():
        for name in imports(path):
            first, _, rest = name.partition(".")
            other = rest.split(".")[0]
            place = path.relative_to(ROOT).as_posix()
            if first != "atropos" or other == room or (place, other) in COMMAND_LINES:
                continue
            if other not in MAY_IMPORT[room]:
                wrong.append(f"{place} imports {name}")
    assert wrong == []


def test_the_floors_below_do_not_know_temporal() -> None:
    found = [
        path for path, room in modules() if room in WITHOUT_TEMPORAL for name in imports(path) if "temporal" in name
    ]
    assert found == []


def test_imports_inside_the_package_are_relative() -> None:
    wrong = [
        path.relative_to(ROOT).as_posix()
        for path, _ in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "atropos")
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "atropos" for alias in node.names))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("atropos", ["temporalio", "sqlalchemy", "httpx", "torch", "transformers", "renderers", "pydantic_settings"]),
        (
            "atropos.workflows.plugin",
            ["sqlalchemy", "psycopg", "httpx", "torch", "transformers", "renderers", "openai"],
        ),
        ("atropos.contracts.activities", ["temporalio", "sqlalchemy", "httpx", "torch", "transformers"]),
        ("atropos.cli.worker", ["torch"]),
        ("atropos.cli.main", ["torch", "transformers"]),
    ],
)
def test_a_module_is_imported_without_what_is_heavy(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print(*sorted(set({heavy!r}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_the_packages_listed_are_the_folders_that_exist() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for path, _ in modules() if path.name == "__init__.py"}
    found = {"atropos", *(".".join(["atropos", *folder.relative_to(ROOT).parts]) for folder in folders)}
    assert sorted(listed) == sorted(found)


def test_every_folder_with_modules_is_a_package() -> None:
    assert {path.parent for path, _ in modules()} - {ROOT} == {
        path.parent for path, _ in modules() if path.name == "__init__.py"
    }


def test_only_settings_reads_our_settings() -> None:
    """Elsewhere the process environment is asked for literal names alone, and none of ours."""
    wrong = [
        f"{path.relative_to(ROOT)}: {line}"
        for path, room in modules()
        if room != "settings"
        for line in environment_uses(path.read_text())
        if not _FOREIGN.search(line)
    ]
    assert wrong == []


_FOREIGN = re.compile(r"""^os\.(getenv|environ(\.\w+)?)[([]'(?!ATROPOS_|DATABASE_URL)\w+'""")


def environment_uses(source: str) -> Iterator[str]:
    """Each use of `os.environ` or `os.getenv` with what is asked of it, as normalised code."""
    parents = {child: node for node in ast.walk(ast.parse(source)) for child in ast.iter_child_nodes(node)}
    for node in parents:
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (f"from os import {alias.name}" for alias in node.names if alias.name in ("environ", "getenv"))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            use: ast.AST = node
            while isinstance(parents[use], ast.Attribute | ast.Subscript | ast.Call) and _asked(parents[use]) is use:
                use = parents[use]
            yield ast.unparse(use)


def _asked(node: ast.AST) -> ast.AST:
    """What an attribute, an index or a call is of."""
    return node.func if isinstance(node, ast.Call) else node.value  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("import os\nos.environ['ATROPOS_HOME']", True),
        ("import os\nos.environ.get('DATABASE_URL', '')", True),
        ("import os\nos.getenv(name)", True),
        ("import os\ndict(os.environ)", True),
        ("from os import environ", True),
        ("import os\nos.environ.setdefault('OMP_WAIT_POLICY', 'passive')", False),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES']", False),
    ],
)
def test_reading_our_settings_elsewhere_would_be_seen(source: str, refused: bool) -> None:
    assert [not _FOREIGN.search(line) for line in environment_uses(source)] == [refused]


# --- who serves what ------------------------------------------------------------------------------------------------


def known() -> list[Activity[Any, Any]]:
    tables = vars(contract) | vars(contract_of_training) | vars(contract_of_rescoring)
    return [value for value in tables.values() if isinstance(value, Activity)]


def served(role: WorkerRole) -> set[str]:
    """Names of the activities a worker of that role registers. Nothing is opened to find out."""
    services: Services = object.__new__(Services)
    return {activity._Definition.must_from_callable(one).name or "" for one in activities_of(role, services)}


def test_every_activity_is_served_on_its_queue() -> None:
    on_queue = {QUEUE_OF[role]: served(role) for role in WorkerRole if role is not WorkerRole.WORKFLOWS}
    assert on_queue == {
        queue: {one.name for one in known() if one.queue == queue} for queue in {one.queue for one in known()}
    }


def test_activities_that_may_run_locally_are_served_beside_the_workflows() -> None:
    assert served(WorkerRole.WORKFLOWS) == {one.name for one in known() if one.local is not None}


def test_an_activity_takes_and_returns_what_its_contract_says() -> None:
    for role in WorkerRole:
        for one in activities_of(role, object.__new__(Services)):
            definition = activity._Definition.must_from_callable(one)
            promised = next(entry for entry in known() if entry.name == definition.name)
            assert (definition.arg_types, definition.ret_type) == ([promised.input], promised.result)
