"""What author code returned, made into what the store keeps, or refused with a sentence.

Invariant: what leaves an environment is plain, bounded and finite. A NaN reward or an unserialisable state is refused
here, where the function's name is still known, not by the database an activity later.
"""

import json
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Final

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from ..contracts.base import Wire
from ..contracts.messages import Message
from ..contracts.numbers import why_no_number
from ..contracts.tasks import Task
from .base import State, Step
from .faults import EnvironmentFault

MAX_STATE_BYTES: Final = 256 * 1024
"""State is stored with each turn that changes it; larger things belong in files or are rebuilt by replay."""
MAX_RESULT_CHARS: Final = 32_768
"""A tool result longer than this would fill most models' context; it is cut and says so."""

_PLAIN: Final[TypeAdapter[Any]] = TypeAdapter(Any)


class CallOutcome(Wire):
    """What one tool call led to. `content` is what the model sees; `state` is None where it did not change."""

    content: str
    error: str | None = None
    state: dict[str, Any] | None = None


class StartOutcome(Wire):
    """How an episode begins."""

    prompt: tuple[Message, ...]
    state: dict[str, Any]


class StopOutcome(Wire):
    """The name of the stop condition that holds, None where none does."""

    condition: str | None


class StepOutcome(Wire):
    """What `step` answered, and the state after it (None where it did not change)."""

    step: Step
    state: dict[str, Any] | None = None


class GroupScores(Wire):
    """One group reward: a value or None for each valid member, in their order."""

    name: str
    values: tuple[float | None, ...] = Field(default=())


def as_text(value: Any) -> str:
    """A tool's result as the model sees it: text as it is, nothing as nothing, everything else as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        text = str(value)
    else:
        plain = (
            value.model_dump(mode="json") if isinstance(value, BaseModel) else _PLAIN.dump_python(value, mode="json")
        )
        text = json.dumps(plain, ensure_ascii=False)
    if len(text) > MAX_RESULT_CHARS:
        return f"{text[:MAX_RESULT_CHARS]}… (cut; {len(text)} characters in all)"
    return text


def as_number(where: str, value: Any) -> float | None:
    """A score: a finite number within bounds, or None for unscored. Raises EnvironmentFault for anything else."""
    if value is None:
        return None
    if not isinstance(value, Real):
        raise EnvironmentFault(f"{where} returned {_shown(value)}; a score is a finite number, or None for unscored")
    problem = why_no_number(value)
    if problem is not None:
        raise EnvironmentFault(f"{where} returned {_shown(value)}; {problem}, or None for unscored")
    return float(value)


def as_numbers(where: str, values: Any, members: int) -> tuple[float | None, ...]:
    """A group reward: one score for each valid member."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise EnvironmentFault(f"{where} returned {_shown(values)}; it must return a list of scores, one an episode")
    if len(values) != members:
        raise EnvironmentFault(f"{where} returned {len(values)} scores for {members} episodes; it must give one each")
    return tuple(as_number(f"{where}[{index}]", value) for index, value in enumerate(values))


def as_step(where: str, value: Any) -> Step:
    """The result of `step`, checked to be storable."""
    if not isinstance(value, Step):
        raise EnvironmentFault(f"{where} returned {_shown(value)}; it must return Step(…)")
    _require_json(f"{where}: info", value.info)
    return value


def as_task(where: str, value: Any) -> Task[Any]:
    """A task whose data has a key."""
    if not isinstance(value, Task):
        raise EnvironmentFault(f"{where} returned {_shown(value)}; it must return Task(data=…)")
    try:
        _ = value.key
    except (ValueError, TypeError, PydanticSerializationError) as error:
        raise EnvironmentFault(f"{where}: the task's data is no JSON ({error})") from None
    if not _finite(TypeAdapter(type(value.data)).dump_python(value.data)):
        raise EnvironmentFault(f"{where}: the task's data holds a number that is not finite, which JSON cannot keep")
    _require_json(f"{where}: info", value.info)
    return value


def dump_state(where: str, state: State) -> dict[str, Any]:
    """State as plain JSON data of at most MAX_STATE_BYTES."""
    try:
        plain = state.model_dump(mode="json")
    except PydanticSerializationError as error:
        raise EnvironmentFault(f"{where}: the state is not serialisable ({error}); keep plain data in it") from None
    size = _require_json(f"{where}: the state", plain)
    if size > MAX_STATE_BYTES:
        raise EnvironmentFault(
            f"{where}: the state is {size / 1024:.0f} KiB as JSON; at most {MAX_STATE_BYTES // 1024} KiB are kept, "
            "store large things elsewhere or rebuild them with Replay"
        )
    return plain


def load_state(where: str, state_type: type[State], plain: dict[str, Any]) -> State:
    """A private copy of the state. Raises EnvironmentFault where stored data no longer fits the class."""
    try:
        return state_type.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EnvironmentFault(
            f"{where}: stored state does not fit {state_type.__name__} ({field}: {first['msg']}); "
            "raise the environment's `version` when its state changes"
        ) from None


def _require_json(what: str, plain: Any) -> int:
    """Size in bytes of the JSON of plain data. Raises EnvironmentFault where it is none."""
    try:
        return len(json.dumps(plain, allow_nan=False, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    except (ValueError, TypeError, RecursionError) as error:
        raise EnvironmentFault(f"{what} is not plain JSON ({error})") from None


def _finite(plain: Any) -> bool:
    """No NaN and no infinity in it: pydantic would quietly store them as null."""
    if isinstance(plain, float):
        return math.isfinite(plain)
    if isinstance(plain, dict):
        return all(_finite(item) for item in plain.values())
    return all(_finite(item) for item in plain) if isinstance(plain, list | tuple | set) else True


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"
