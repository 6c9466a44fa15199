"""Reads docker-compose.yml, the Dockerfile and what they refer to, and says what does not fit the code.

Each check takes the documents as values and returns sentences, so that a test can hand it a spoilt copy.
"""

import argparse
import importlib
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import atropos
import typer
import yaml
from atropos.cli import worker
from atropos.cli.main import app, load
from atropos.settings import Settings

ROOT = Path(atropos.__file__).parent
Document = dict[str, Any]
THIRD_PARTY = {
    "TEMPORAL_ADDRESS": "Temporal's envconfig",
    "TEMPORAL_NAMESPACE": "Temporal's envconfig",
    "HF_HOME": "the hub's client",
    "HF_TOKEN": "the hub's client",
    "HF_HUB_OFFLINE": "the hub's client",
    "WANDB_API_KEY": "W&B",
    "ENGINE_API_KEY": "named by run files: api_key_env",
}
"""What our own processes are given besides our settings, and who reads it."""
SERVES = {"postgres": {5432}, "temporal": {7233}, "temporal-ui": {8080}}
"""Ports that images of others listen on without being told so."""
_VARIABLE = re.compile(r"(?<!\$)\$\{([A-Z_]+)(:?[-?][^}]*)?\}")
_PINNED = re.compile(r".+:v?\d+\.\d+[\w.-]*$")


@dataclass(frozen=True)
class Deployment:
    """Everything that has to agree."""

    compose: Document
    text: str
    dockerfile: str
    ignore: str
    example: str
    project: Document
    tracked: frozenset[str]

    @property
    def services(self) -> dict[str, Document]:
        found: dict[str, Document] = self.compose["services"]
        return found

    def ours(self) -> dict[str, Document]:
        """Services that run an image built here."""
        return {name: service for name, service in self.services.items() if "build" in service}

    def changed(self, old: str, new: str) -> "Deployment":
        """With other words in docker-compose.yml."""
        assert old in self.text, old
        text = self.text.replace(old, new)
        return replace(self, text=text, compose=yaml.safe_load(text))


def read() -> Deployment:
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Deployment(
        compose=yaml.safe_load(text),
        text=text,
        dockerfile=(ROOT / "Dockerfile").read_text("utf-8"),
        ignore=(ROOT / ".dockerignore").read_text("utf-8"),
        example=(ROOT / ".env.example").read_text("utf-8"),
        project=tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8")),
        tracked=frozenset(listed.stdout.splitlines()),
    )


# --- commands -------------------------------------------------------------------------------------------------------


def command_problems(deployment: Deployment) -> Iterator[str]:
    """Command lines that our programs would refuse."""
    for name, service in deployment.ours().items():
        words = [_VARIABLE.sub("x", word) for word in (*service.get("entrypoint", []), *service.get("command", []))]
        yield from (f"{name}: {problem}" for problem in _line_problems(words, deployment))
    for words in re.findall(r"^CMD (\[.*\])$", deployment.dockerfile, re.M):
        yield from (f"Dockerfile: {problem}" for problem in _line_problems(json.loads(words), deployment))


def _line_problems(words: list[str], deployment: Deployment) -> Iterator[str]:
    if not words:
        yield "no command"
    elif words[0] == "sh":
        for inner in re.findall(r"\$\$\(([^)]+)\)", words[-1]):
            yield from _line_problems(shlex.split(inner), deployment)
    elif words[0] == "python":
        problem = _module_problem(words[1:])
        yield from [problem] if problem else []
    elif words[0] not in deployment.project["project"]["scripts"]:
        yield f"no program {words[0]!r}"
    else:
        problem = atropos_problem(words[1:]) if words[0] == "atropos" else _worker_problem(words[1:])
        yield from [problem] if problem else []


def atropos_problem(words: list[str]) -> str | None:
    """What `atropos` would say to these words; nothing is run."""
    group: Any = typer.main.get_command(app)
    try:
        name, *words = words
        if name not in group.commands:
            return f"no command {name!r}"
        command: Any = load(name)
        while True:
            context = command.make_context(name, list(words))
            if not hasattr(command, "commands"):
                return None
            name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    except Exception as error:
        return getattr(error, "message", None) or str(error) or type(error).__name__


def _worker_problem(words: list[str]) -> str | None:
    program = typer.Typer()
    program.command()(worker.command)
    command: Any = typer.main.get_command(program)
    try:
        worker._roles(command.make_context("atropos-worker", list(words)).params["roles"])
    except Exception as error:
        return getattr(error, "message", None) or str(error)
    return None


class _Parsed(Exception):
    """The arguments were accepted, and nothing was done."""


def _module_problem(words: list[str]) -> str | None:
    words = [word for word in words if word != "-P"]
    if words[:1] != ["-m"]:
        return None
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> None:
        parse(self, *arguments, **named)
        raise _Parsed

    name = "atropos.inference.engine.__main__" if words[1] == "atropos.inference.engine" else words[1]
    try:
        argparse.ArgumentParser.parse_args = only_parse  # type: ignore[method-assign,assignment]
        importlib.import_module(name).main(words[2:])
    except _Parsed:
        return None
    except ImportError as error:
        return f"no module: {error}"
    except SystemExit:
        return f"{words[1]} refuses {' '.join(words[2:])}"
    finally:
        argparse.ArgumentParser.parse_args = parse  # type: ignore[method-assign]
    return f"{words[1]} parses nothing"


# --- variables ------------------------------------------------------------------------------------------------------


def variable_problems(deployment: Deployment) -> Iterator[str]:
    """Variables that nobody reads, secrets with a default, and names that .env.example does not explain."""
    settings = {"DATABASE_URL", *(f"ATROPOS_{name.upper()}" for name in Settings.model_fields)}
    for service, described in deployment.ours().items():
        for name in described.get("environment", {}):
            if name not in settings | set(THIRD_PARTY):
                yield f"{service}: nobody reads {name}"
    used = {name: rule or "" for name, rule in _VARIABLE.findall(deployment.text)}
    explained = set(re.findall(r"^#?([A-Z_]+)=", deployment.example, re.M))
    yield from (f".env.example does not explain {name}" for name in sorted(set(used) - explained))
    yield from (f".env.example explains {name}, which is not used" for name in sorted(explained - set(used)))
    for name, rule in used.items():
        if re.search(r"PASSWORD|KEY|TOKEN", name) and not (rule.startswith(":?") or rule == ":-"):
            yield f"{name} is a secret with a default"
    for name, value in re.findall(r"^([A-Z_]+)=(.*)$", deployment.example, re.M):
        if value:
            yield f".env.example sets {name}"


# --- ports and paths ------------------------------------------------------------------------------------------------


def served(deployment: Deployment) -> dict[str, set[int]]:
    """Ports that each service listens on."""
    found = {name: set(ports) for name, ports in SERVES.items()}
    for name, service in deployment.services.items():
        words = " ".join(service.get("command") or [])
        found.setdefault(name, set()).update(int(port) for port in re.findall(r"--port[ =](\d+)", words))
    return found


def port_problems(deployment: Deployment) -> Iterator[str]:
    """Ports that are spoken to where nobody listens, and ports open to the network."""
    ports = served(deployment)
    for name, service in deployment.services.items():
        for published in service.get("ports", []):
            host, _, target = published.rpartition(":")
            if not host.startswith("127.0.0.1:"):
                yield f"{name}: {published} is open to the network"
            if int(target) not in ports[name]:
                yield f"{name}: publishes {target}, listens on {sorted(ports[name])}"
        check = " ".join(service.get("healthcheck", {}).get("test", []))
        for port in re.findall(r"127\.0\.0\.1[ :](?:-p )?(\d+)", check):
            if int(port) not in ports[name]:
                yield f"{name}: its check asks port {port}, it listens on {sorted(ports[name])}"
        spoken = _VARIABLE.sub("x", json.dumps([service.get("environment", {}), service.get("command", [])]))
        for other, port in re.findall(r"\b([a-z][a-z-]*):(\d{2,5})\b", spoken):
            if other in ports and int(port) not in ports[other]:
                yield f"{name}: speaks to {other}:{port}, which listens on {sorted(ports[other])}"
            elif other not in ports:
                yield f"{name}: speaks to {other}, which is no service"


def path_problems(deployment: Deployment) -> Iterator[str]:
    """Files that are not in the repository, and folders that are not where the code looks."""
    folders = {parent.as_posix() for path in deployment.tracked for parent in Path(path).parents}
    created = set(re.findall(r"(?<= )/[\w/]+", "".join(re.findall(r"install -d .*", deployment.dockerfile))))
    volumes = set(deployment.compose["volumes"])
    for name, service in deployment.services.items():
        mounts = {mount.split(":")[1]: mount.split(":")[0] for mount in _without_defaults(service.get("volumes", []))}
        for target, source in mounts.items():
            if source.startswith("./") and source[2:] not in deployment.tracked | folders:
                yield f"{name}: {source} is not in the repository"
            elif not source.startswith("./") and source not in volumes:
                yield f"{name}: no volume {source}"
            if "build" in service and target not in created:
                yield f"{name}: the image has no folder {target} of its user's"
        home = service.get("environment", {}).get("ATROPOS_HOME")
        if home and (home not in mounts or f"{home}/checkpoints" not in mounts):
            yield f"{name}: {home} and its checkpoints are not kept in volumes"
    for line in re.findall(r"^COPY (?!--from)(.+)$", deployment.dockerfile, re.M):
        for source in line.split()[:-1]:
            if source not in deployment.tracked | folders:
                yield f"Dockerfile: {source} is not in the repository"
    sent = set(re.findall(r"^!(.+)$", deployment.ignore, re.M))
    packages = {name.split(".")[1] for name in deployment.project["tool"]["setuptools"]["packages"] if "." in name}
    modules = {path for path in deployment.tracked if path.endswith(".py") and "/" not in path}
    for needed in sorted(packages | modules | {"py.typed", "README.md", "LICENSE", "pyproject.toml"}):
        if needed not in sent:
            yield f".dockerignore keeps {needed} out"
    yield from (f".dockerignore lets {path} in, which does not exist" for path in sent - deployment.tracked - folders)


def _without_defaults(mounts: list[str]) -> list[str]:
    return [re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", mount) for mount in mounts]


# --- images and order -----------------------------------------------------------------------------------------------


def image_problems(deployment: Deployment) -> Iterator[str]:
    """Images that may change under us, stages and extras that do not exist, and images that run as root."""
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n((?:(?!FROM ).*\n?)*)", deployment.dockerfile, re.M))
    arguments = set(re.findall(r"^ARG (\w+)=", deployment.dockerfile, re.M))
    for name, service in deployment.services.items():
        build = service.get("build")
        if build is None:
            if not _PINNED.fullmatch(service["image"]):
                yield f"{name}: {service['image']} is not pinned to a version"
            continue
        if build["target"] not in stages:
            yield f"{name}: the Dockerfile has no stage {build['target']!r}"
        elif not re.search(r"^USER [1-9]\d*", stages[build["target"]], re.M):
            yield f"{name}: its image runs as root"
        yield from (f"{name}: the Dockerfile has no argument {arg}" for arg in set(build["args"]) - arguments)
    if not re.search(r"^ARG PYTHON=\d+\.\d+\.\d+-", deployment.dockerfile, re.M):
        yield "Dockerfile: Python is not pinned to a version"
    extras = deployment.project["project"]["optional-dependencies"]
    for line in re.findall(r"requirements\.py ([\w ]+) >", deployment.dockerfile):
        yield from (f"Dockerfile: no extra {extra!r}" for extra in line.split() if extra not in extras)


def order_problems(deployment: Deployment) -> Iterator[str]:
    """Waits that could never end."""
    for name, service in deployment.services.items():
        for other, how in service.get("depends_on", {}).items():
            waited = deployment.services.get(other)
            if waited is None:
                yield f"{name}: waits for {other}, which is no service"
            elif how["condition"] == "service_healthy" and "healthcheck" not in waited:
                yield f"{name}: waits for {other} to be healthy, which has no check"
            elif how["condition"] == "service_completed_successfully" and waited.get("restart") == "unless-stopped":
                yield f"{name}: waits for {other} to end, which is started again for ever"


def problems(deployment: Deployment) -> list[str]:
    checks = (command_problems, variable_problems, port_problems, path_problems, image_problems, order_problems)
    return [problem for check in checks for problem in check(deployment)]


# --- what pages tell people to type ---------------------------------------------------------------------------------


def told(page: str) -> list[str]:
    """The lines with `docker compose` in a page's code blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S)
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if "docker compose" in line]


def told_problems(lines: list[str], deployment: Deployment) -> Iterator[str]:
    """Commands for people that name no service, or that `atropos` would refuse."""
    for line in lines:
        words = shlex.split(line[line.index("docker compose") :])[2:]
        if words[:1] in (["run"], ["exec"]) and re.search(r" [<>] ", line) and "-T" not in words:
            yield f"{line}: bytes go through a terminal without -T"
        for scaled in re.findall(r"--scale ([\w-]+)=", line):
            if scaled not in deployment.services:
                yield f"{line}: no service {scaled}"
        if "run" in words and "cli" in words and "--entrypoint" not in words:
            problem = atropos_problem(words[words.index("cli") + 1 :])
            if problem:
                yield f"{line}: {problem}"
        for verb in ("logs", "exec", "restart", "stop"):
            if words[:1] == [verb]:
                named = [word for word in words[1:] if not word.startswith("-")]
                named = named[:1] if verb == "exec" else named
                yield from (f"{line}: no service {name}" for name in named if name not in deployment.services)
