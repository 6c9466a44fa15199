"""Our own processes in the stack: the migration, the dev engine, the workers and the dashboard.

Invariant: they see the stack's addresses and no others. Whatever `TEMPORAL_*`, `DATABASE_URL` or engine the
user's environment names is replaced where the stack has a part of its own.
"""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ...settings import child_environment, temporal_variables
from .errors import StackError
from .files import StackHome
from .part import Part
from .ports import HOST
from .probes import check_http

WORKERS: Final[Mapping[str, str]] = {
    "worker-workflows": "workflows",
    "worker-activities": "model,tools,control",
    "worker-trainer": "trainer",
}
"""Part name → roles. Workflow code is apart from I/O, so that no busy activity delays a workflow task."""


_NEEDED: Final = {
    "config.json": ("config.json",),
    "weights": ("*.safetensors", "*.bin"),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.*"),
}


def workers() -> tuple[str, ...]:
    """The workers that can serve here: without torch nothing is trained."""
    trains = find_spec("torch") is not None
    return tuple(name for name, roles in WORKERS.items() if trains or roles != "trainer")


def app_environment(
    home: StackHome, *, own_temporal: bool, temporal: str | None, database: str | None, engine: str | None
) -> dict[str, str]:
    """The environment of our own processes: the user's, with the stack's addresses over it."""
    changes: dict[str, str | None] = {"ATROPOS_HOME": str(home.root)}
    if own_temporal:
        changes |= dict.fromkeys(temporal_variables())
        changes["TEMPORAL_CONFIG_FILE"] = str(home.temporal_profile)
    if temporal is not None:
        changes["TEMPORAL_ADDRESS"] = temporal
    if database is not None:
        changes |= {"DATABASE_URL": database, "ATROPOS_DATABASE_URL": None}
    if engine is not None:
        changes["ATROPOS_ENGINE_URL"] = engine
    return child_environment(changes, inherit=True)


def migration(env: dict[str, str]) -> Part:
    """Bring the schema up to date, once, before any worker looks at it."""
    return Part(
        name="migrate",
        argv=_module("atropos.db.migrate", "upgrade"),
        env=env,
        depends_on=("postgres",),
        one_shot=True,
        start_timeout_s=300.0,
    )


def check_model(folder: Path) -> None:
    """Raise `StackError` where a folder is plainly no model. The engine itself looks closer once it runs."""
    if folder.exists() and not folder.is_dir():
        raise StackError(f"{folder} is a file; --model names the folder that a model was saved to.")
    if not folder.is_dir():
        raise StackError(f"There is no model in {folder}; name a folder made by training, or leave --model out.")
    missing = [what for what, names in _NEEDED.items() if not any(any(folder.glob(name)) for name in names)]
    if missing:
        raise StackError(
            f"{folder} holds no {' and no '.join(missing)}; name a folder that a model was saved to, "
            "or leave --model out."
        )


def engine(home: StackHome, model: Path, port: int, env: dict[str, str]) -> Part:
    """The dev engine serving `model` under the name `policy`."""

    url = f"http://{HOST}:{port}"
    return Part(
        name="engine",
        argv=_module(
            "atropos.inference.engine", "--model", str(model.absolute()), "--host", HOST, "--port", str(port),
            "--served-model-name", "policy", "--journal", str(home.engine_journal),
        ),
        env=env,
        ready=lambda: check_http(url, timeout_s=1.0),
        address=url,
        ports=(port,),
        refuses_with=2,
        start_timeout_s=300.0,
    )  # fmt: skip


def worker(home: StackHome, name: str, env: dict[str, str], depends_on: tuple[str, ...]) -> Part:
    """One worker process; it is ready once it has created its ready file, that is, once it polls."""
    ready_file = home.run / f"{name}.ready"

    def forget() -> None:
        ready_file.unlink(missing_ok=True)

    def check() -> str | None:
        return None if ready_file.exists() else "it does not poll yet"

    return Part(
        name=name,
        # No -P here: environments of the user are imported from the working directory.
        argv=(sys.executable, "-m", "atropos.cli.worker", "--roles", WORKERS[name]),
        env=env | {"ATROPOS_READY_FILE": str(ready_file)},
        depends_on=depends_on,
        ready=check,
        prepare=forget,
        address=f"roles {WORKERS[name]}",
        start_timeout_s=120.0,
        grace_s=25.0,
    )


def dashboard(port: int, temporal_ui: str | None, env: dict[str, str], depends_on: tuple[str, ...]) -> Part:
    """The dashboard, on loopback."""
    url = f"http://{HOST}:{port}"
    ui = () if temporal_ui is None else ("--temporal-ui", temporal_ui)
    return Part(
        name="dashboard",
        argv=_module("atropos.cli.main", "dashboard", "--address", HOST, "--port", str(port), *ui),
        env=env,
        depends_on=depends_on,
        ready=lambda: check_http(url, timeout_s=1.0),
        address=f"{url}/runs",
        ports=(port,),
        start_timeout_s=120.0,
    )


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", name, *arguments)
