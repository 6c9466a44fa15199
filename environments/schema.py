"""A tool's arguments: the JSON schema the model is told, and the check of what it sends.

Invariant: both come from one pydantic model made from the tool's annotations, so what the model is told is what is
accepted. Texts come from the docstring; a tool without one is refused, because a model cannot guess it.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, Final, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from .faults import BadEnvironment
from .parameters import INJECTED, parameters_of

_SECTION: Final = re.compile(
    r"^(args|arguments|parameters|returns?|raises|yields|examples?|notes?):\s*$", re.IGNORECASE
)
_ARGUMENT: Final = re.compile(r"^(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Description and the texts of arguments of a docstring with an `Args:` section (Google's style)."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, current, depth = "", None, 0
    for line in inspect.cleandoc(text).splitlines():
        heading = _SECTION.match(line)
        if heading:
            section, current = heading[1].lower(), None
        elif not section:
            description.append(line)
        elif section in ("args", "arguments", "parameters") and line.strip():
            indent = len(line) - len(line.lstrip())
            found = _ARGUMENT.match(line.strip())
            if found and (current is None or indent <= depth):
                current, depth = found["name"], indent
                arguments[current] = found["text"].strip()
            elif current is not None:
                arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), arguments


def arguments_model(owner: str, name: str, function: Callable[..., Any]) -> type[BaseModel]:
    """The pydantic model of a tool's JSON arguments. Raises BadEnvironment where they cannot be described.

    Fields carry the arguments' names as aliases, so that an argument may be called `json` or `copy`.
    """
    what = f"@tool {owner}.{name}"
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise BadEnvironment(f"{what}: an annotation cannot be resolved ({error}); define it in the module") from None
    _, texts = read_docstring(function.__doc__ or "")
    fields: dict[str, Any] = {}
    for parameter in parameters_of(function).values():
        if parameter.name in INJECTED:
            continue
        if parameter.name not in hints:
            raise BadEnvironment(f"{what}: argument `{parameter.name}` needs a type annotation for its JSON schema")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, alias=parameter.name, description=texts.pop(parameter.name, None))
        fields[f"argument_{len(fields)}"] = (hints[parameter.name], field)
    for text in texts.keys() - set(INJECTED):
        raise BadEnvironment(f"{what}: its docstring describes `{text}`, which is no argument")
    try:
        model: type[BaseModel] = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
        first = str(error).splitlines()[0]
        raise BadEnvironment(f"{what}: its arguments have no JSON schema ({first})") from None
    return model


def describe(owner: str, name: str, function: Callable[..., Any]) -> str:
    """What the model is told a tool does."""
    description, _ = read_docstring(function.__doc__ or "")
    if not description:
        raise BadEnvironment(f"@tool {owner}.{name} needs a docstring: it is all the model knows about the tool")
    return description


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema object of a tool's arguments, without the titles that pydantic adds: they only cost tokens."""
    schema: dict[str, Any] = _bare(model.model_json_schema())
    schema.pop("additionalProperties", None)
    schema.setdefault("properties", {})
    return {"type": "object", **{key: value for key, value in schema.items() if key != "type"}}


def _bare(value: Any, *, names: bool = False) -> Any:
    if isinstance(value, dict):
        return {
            key: _bare(item, names=key in ("properties", "$defs") and not names)
            for key, item in value.items()
            if names or not (key == "title" and isinstance(item, str))
        }
    return [_bare(item) for item in value] if isinstance(value, list) else value


def read_arguments(model: type[BaseModel], arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name as the tool's annotations want them. Raises ValueError with one sentence for the model."""
    try:
        parsed = model.model_validate(arguments)
    except ValidationError as error:
        problems = [_problem(problem) for problem in error.errors(include_url=False, include_context=False)[:3]]
        raise ValueError("; ".join(problems)) from None
    return {str(field.alias): getattr(parsed, name) for name, field in model.model_fields.items()}


def _problem(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "arguments"
    return f"{where}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
