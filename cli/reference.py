"""`python -m atropos.cli.reference`: write the pages that are made from code, docs/run-file.md and docs/cli.md.

Invariant: a generated page is a function of the code alone (no paths, no widths of terminals, no environment), so
that a test can demand that the committed page is what this writes.
"""

import ast
import difflib
import enum
import inspect
import json
import textwrap
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..contracts.runfile import _PATTERNS, RunConfig
from ..settings import Settings
from .main import _COMMANDS, app, load

_NOTE: Final = "<!-- Written by `python -m atropos.cli.reference`: change the code instead. -->\n\n"
_BOUNDS: Final = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}", "min_length": "at least {} long"}
_PLAIN: Final[dict[Any, str]] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    Any: "any",
}


# --- what the source says about a field -----------------------------------------------------------------------------


@cache
def field_notes(model: type) -> dict[str, str]:
    """Name of a field or member → the text below it in the source, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    assert isinstance(tree.body[0], ast.ClassDef)
    found, last = {}, ""
    for node in tree.body[0].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            last = node.targets[0].id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            found[last] = _line(str(node.value.value))
        else:
            last = ""
    return found


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- the run file ---------------------------------------------------------------------------------------------------


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every mapping of the run file as a person writes it, with its model: `trainer.optim`, `engines[]`, …"""
    yield path, model
    for name, field in model.model_fields.items():
        inner, suffix = _inner(field.annotation)
        if inner is not None:
            yield from sections(inner, f"{path}.{name}{suffix}".lstrip("."))


def _inner(annotation: Any, suffix: str = "") -> tuple[type[BaseModel] | None, str]:
    """The model in an annotation, and how its place is written."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, suffix
    origin = get_origin(annotation)
    within = {tuple: "[]", list: "[]", dict: ".NAME"}.get(origin, "") if origin is not None else ""
    for argument in get_args(annotation):
        found, place = _inner(argument, suffix + within)
        if found is not None:
            return found, place
    return None, ""


def run_file() -> str:
    """docs/run-file.md."""
    known: dict[type[BaseModel], str] = {}
    lines = [
        _NOTE + "# The run file\n",
        "A run is described by one file of YAML or JSON. `atropos run check -f FILE` says what it will be; an unknown "
        "field is refused with the name it may have meant; `--set trainer.optim.lr=3e-4` changes a field on the "
        "command line. Only the fields marked *required* must be there. Secrets never stand in it: `api_key_env` names "
        "the variable that holds one, in the environment of the workers.\n",
    ]
    for path, model in sections(RunConfig):
        title = f"`{path}`" if path else "The top"
        lines.append(f"## {title}\n")
        if model in known:
            lines.append(f"The same fields as [`{known[model]}`](#{_anchor(known[model])}).\n")
            continue
        known[model] = path
        lines += [_line(inspect.getdoc(model) or "") + "\n", *_table(model, path), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(model: type[BaseModel], path: str) -> Iterator[str]:
    yield "| field | what it is | default | meaning |\n|---|---|---|---|"
    notes = field_notes(model)
    for name, field in model.model_fields.items():
        inner, suffix = _inner(field.annotation)
        where = f"{path}.{name}{suffix}".lstrip(".")
        kind = _kind(field.annotation, where if inner else None)
        bounds = "; ".join(_bounds(field))
        meaning = " ".join([*([notes[name]] if name in notes else []), *_members(field.annotation)])
        yield f"| `{name}` | {_cell(kind + (f', {bounds}' if bounds else ''))} | {_default(field)} | {_cell(meaning)} |"


def _kind(annotation: Any, link: str | None = None) -> str:
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    arguments = [one for one in get_args(annotation) if one is not type(None)]
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind(arguments[0], link)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(one, link) for one in arguments)
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    if origin is tuple and Ellipsis not in arguments:
        return f"list of {len(arguments)} {_kind(arguments[0])}s"
    if origin in (tuple, list):
        return f"list: {_kind(arguments[0], link)}"
    if origin is dict:
        return f"mapping of names: {_kind(arguments[1], link)}"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " or ".join(f"`{one.value}`" for one in annotation)
    if isinstance(annotation, type) and issubclass(annotation, Path):
        return "path"
    if link is not None:
        return f"[`{link}`](#{_anchor(link)})"
    return "text, secret" if "Secret" in str(annotation) else str(annotation)


def _anchor(path: str) -> str:
    """As MkDocs and GitHub make it from a heading."""
    return "".join(letter for letter in path.lower() if letter.isalnum() or letter in "-_")


def _bounds(field: FieldInfo) -> Iterator[str]:
    constraints = [
        field.metadata,
        *(getattr(one, "__metadata__", ()) for one in (field.annotation, *get_args(field.annotation))),
    ]
    for constraint in (one for several in constraints for one in several):
        for name, words in _BOUNDS.items():
            if getattr(constraint, name, None) is not None:
                yield words.format(getattr(constraint, name))
        pattern = getattr(constraint, "pattern", None)
        if pattern is not None:
            yield _PATTERNS.get(pattern, f"matching `{pattern}`")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "see there"
    if value is None:
        return "none"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, Path):
        value = str(value)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _members(annotation: Any) -> Iterator[str]:
    """What the values of an enum mean, where the source says so."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, enum.Enum):
            notes = field_notes(one)
            yield from (f"`{member.value}`: {notes[member.name]}" for member in one if member.name in notes)


# --- the command line -----------------------------------------------------------------------------------------------


def command_line() -> str:
    """docs/cli.md."""
    lines = [
        _NOTE + "# Commands and settings\n",
        "Every command has `--help`. A command ends with 0, or with 1 and one sentence that says what to do, with 2 "
        "where it was called wrongly, with 130 after Ctrl-C. `atropos-worker` is `atropos worker`.\n",
        *[
            f"- [`atropos {name}`](#{_anchor(f'atropos {name}'.replace(' ', '-'))}): {line}"
            for name, (_, line) in _COMMANDS.items()
        ],
        "",
    ]
    root: Any = typer.main.get_command(app)
    for name in _COMMANDS:
        with root.make_context("atropos", [name, "--help"], resilient_parsing=True) as context:
            lines += _command(load(name), name, context, 2)
    lines += [
        "## Settings\n",
        "Read once, by each process, from its environment. Temporal's own (`TEMPORAL_ADDRESS`, `TEMPORAL_NAMESPACE`, "
        "`TEMPORAL_PROFILE`, …) hold as well.\n",
        "| variable | what it is | default | meaning |\n|---|---|---|---|",
    ]
    notes = field_notes(Settings)
    for name, field in Settings.model_fields.items():
        variable = "DATABASE_URL" if name == "database_url" else f"ATROPOS_{name.upper()}"
        bounds = "; ".join(_bounds(field))
        kind = _kind(field.annotation) + (f", {bounds}" if bounds else "")
        lines.append(f"| `{variable}` | {_cell(kind)} | {_default(field)} | {_cell(notes.get(name, ''))} |")
    return "\n".join(lines).rstrip() + "\n"


def _command(command: Any, name: str, above: Any, depth: int) -> Iterator[str]:
    context = command.make_context(name, [], parent=above, resilient_parsing=True)
    yield f"{'#' * min(depth, 4)} `{context.command_path}`\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    if hasattr(command, "commands"):
        for inner, one in command.commands.items():
            yield from _command(one, inner, context, depth + 1)
        return
    yield f"```\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    records = [record for parameter in command.params if (record := parameter.get_help_record(context)) is not None]
    shown = [(names, told) for names, told in records if "--help" not in names]
    if shown:
        yield "| | |\n|---|---|"
        yield from (f"| `{names.strip().replace('|', '/')}` | {_cell(_line(told))} |" for names, told in shown)
        yield ""


# --- writing --------------------------------------------------------------------------------------------------------


PAGES: Final = {"run-file.md": run_file, "cli.md": command_line}
CHECK: Final = typer.Option(help="Write nothing; fail where a page is not what it would be.")
FOLDER: Final = typer.Option(help="Where; default: docs/ of this checkout.")


def main(check: Annotated[bool, CHECK] = False, folder: Annotated[Path | None, FOLDER] = None) -> None:
    """Write docs/run-file.md and docs/cli.md from the code."""
    write_pages({name: written() for name, written in PAGES.items()}, check, folder, "atropos.cli.reference")


def write_pages(pages: Mapping[str, str], check: bool, folder: Path | None, module: str) -> None:
    """Write the pages that changed, or say how they would; `module` writes them. Raises Exit."""
    folder = folder or Path(__file__).parent.parent / "docs"
    if not folder.is_dir():
        typer.echo(f"There is no folder {folder}: pages are written in a checkout, not in an installation.", err=True)
        raise typer.Exit(1)
    stale = False
    for name, text in pages.items():
        page = folder / name
        old = page.read_text("utf-8") if page.exists() else ""
        if old == text:
            continue
        if not check:
            page.write_text(text, "utf-8")
            continue
        stale = True
        changed = difflib.unified_diff(old.splitlines(), text.splitlines(), name, "from the code", lineterm="", n=0)
        typer.echo("\n".join(changed))
    if stale:
        typer.echo(f"Run `python -m {module}` and commit the pages.", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
