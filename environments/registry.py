"""Finding environments: an entry point's name, `module:Class`, or a file.

Invariant: a reference means the same class in every process: a file's is made absolute and its module gets a name
derived from its path, so the process pool and another worker load what was meant. Loading is cached per (reference,
arguments), since one instance serves all episodes.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pydantic import ValidationError

from .base import EnvConfig, Environment
from .faults import BadEnvironment, BadEnvironmentArgs, UnknownEnvironment, author_line, nearest, said
from .loaded import LoadedEnvironment

GROUP: Final = "atropos.environments"

_loaded: dict[str, LoadedEnvironment] = {}


def available() -> list[str]:
    """Names of the installed environments, sorted."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load(ref: str, args: Mapping[str, Any] | None = None, base: Path | None = None) -> LoadedEnvironment:
    """The environment `ref` configured with `args`; paths are relative to `base` (default: the current folder).

    Raises UnknownEnvironment, BadEnvironmentArgs or BadEnvironment, each one sentence.
    """
    fixed = _absolute(ref, base or Path.cwd())
    key = json.dumps([fixed, dict(args or {})], sort_keys=True, default=repr)
    if key not in _loaded:
        cls = find_class(fixed)
        environment = cls(_configure(ref, cls.config_type, args or {}))
        _loaded[key] = LoadedEnvironment(fixed, args or {}, environment)
    return _loaded[key]


def _absolute(ref: str, base: Path) -> str:
    path, separator, name = ref.partition(":")
    return f"{(base / path).resolve()}{separator}{name}" if path.endswith(".py") else ref


def find_class(ref: str) -> type[Environment[Any, Any]]:
    """The class a reference names."""
    path, _, name = ref.partition(":")
    if path.endswith(".py"):
        return _in_file(Path(path), name)
    if not name:
        return _by_entry_point(ref)
    module = _import(path, f"environment {ref}")
    return _member(ref, module, name)


def import_module(name: str) -> None:
    """Import a module that environments come from. Raises UnknownEnvironment or BadEnvironment."""
    _import(name, f"module {name}")


def _import(path: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise _broken(what, error) from error
        hint = "is it installed, or on PYTHONPATH?"
        raise UnknownEnvironment(f"no module {path!r} for {what}; {hint}") from None
    except Exception as error:
        raise _broken(what, error) from error


def _by_entry_point(name: str) -> type[Environment[Any, Any]]:
    for point in entry_points(group=GROUP):
        if point.name == name:
            return find_class(point.value.replace(" ", ""))
    known = available()
    file = f" (for the file write {name}.py)" if Path(f"{name}.py").is_file() else ""
    advice = nearest(name, known) or f"; installed: {', '.join(known) or 'none'}; or name module:Class or file.py"
    raise UnknownEnvironment(f"no environment {name!r}{file}{advice}")


def _in_file(path: Path, name: str) -> type[Environment[Any, Any]]:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownEnvironment(f"no file {path}{hint}")
    module = _import_file(path)
    if name:
        return _member(str(path), module, name)
    found = [cls for cls in _environments_in(module) if cls.__module__ == module.__name__]
    if len(found) != 1:
        names = ", ".join(cls.__name__ for cls in found) or "none"
        raise UnknownEnvironment(
            f"{path.name} defines {len(found)} environments ({names}); name one as {path.name}:Class"
        )
    return found[0]


def _import_file(path: Path) -> ModuleType:
    name = f"atropos_env_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownEnvironment(f"{path} cannot be imported as Python")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, BadEnvironment) or not isinstance(error, Exception | SystemExit):
            raise
        raise _broken(path.name, error) from error
    return module


def _broken(ref: str, error: BaseException) -> BadEnvironment:
    if isinstance(error, BadEnvironment):
        return error
    where = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else author_line(error)
    return BadEnvironment(f"{ref} cannot be imported: {said(error)} ({where})")


def _member(ref: str, module: ModuleType, name: str) -> type[Environment[Any, Any]]:
    found = getattr(module, name, None)
    if found is None:
        known = [cls.__name__ for cls in _environments_in(module)]
        raise UnknownEnvironment(
            f"{ref} has no {name!r}{nearest(name, known)} (environments in it: {', '.join(known) or 'none'})"
        )
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise BadEnvironment(f"{ref}: {name} is no Environment; derive it from atropos.Environment")
    return found


def _environments_in(module: ModuleType) -> list[type[Environment[Any, Any]]]:
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    return [cls for cls in classes if issubclass(cls, Environment) and cls is not Environment]


def _configure(ref: str, config_type: type[EnvConfig], args: Mapping[str, Any]) -> EnvConfig:
    try:
        return config_type.model_validate(dict(args))
    except ValidationError as error:
        problems = [_problem(config_type, problem) for problem in error.errors(include_url=False)]
        raise BadEnvironmentArgs(f"environment {ref}: {'; '.join(problems)}") from None


def _problem(config_type: type[EnvConfig], problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"]) or "args"
    if problem["type"] == "extra_forbidden":
        known = list(config_type.model_fields)
        return f"unknown argument {field!r}{nearest(field, known) or ' (known: ' + (', '.join(known) or 'none') + ')'}"
    if problem["type"] == "missing":
        return f"argument {field!r} is required"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{field}: {message[:1].lower()}{message[1:]} (got {problem['input']!r})"
