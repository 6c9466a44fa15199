"""Atropos: reinforcement learning of language models in multi-turn environments, where no rollout is ever lost.

The names below are resolved when they are first used: importing `atropos.workflows` runs this file inside Temporal's
sandbox, so it must pull in nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .contracts.context import Context, Judge, JudgeUnavailable
    from .contracts.episode import Episode, Score, Turn
    from .contracts.limits import Limits
    from .contracts.messages import ImagePart, Message, Role, TextPart, ToolCall, assistant, system, tool_result, user
    from .contracts.tasks import Task
    from .environments.base import EnvConfig, Environment, Replay, State, Step
    from .environments.marks import group_reward, metric, reward, step, stop, tool

_HOME = {
    "contracts.context": ("Context", "Judge", "JudgeUnavailable"),
    "contracts.episode": ("Episode", "Score", "Turn"),
    "contracts.limits": ("Limits",),
    "contracts.messages": (
        *("ImagePart", "Message", "Role", "TextPart", "ToolCall"),
        *("assistant", "system", "tool_result", "user"),
    ),
    "contracts.tasks": ("Task",),
    "environments.base": ("EnvConfig", "Environment", "Replay", "State", "Step"),
    "environments.marks": ("group_reward", "metric", "reward", "step", "stop", "tool"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Context",
    "EnvConfig",
    "Environment",
    "Episode",
    "ImagePart",
    "Judge",
    "JudgeUnavailable",
    "Limits",
    "Message",
    "Replay",
    "Role",
    "Score",
    "State",
    "Step",
    "Task",
    "TextPart",
    "ToolCall",
    "Turn",
    "assistant",
    "group_reward",
    "metric",
    "reward",
    "step",
    "stop",
    "system",
    "tool",
    "tool_result",
    "user",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'atropos' has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
