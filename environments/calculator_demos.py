"""Problems of the calculator, and demonstrations for the cold start of a small policy.

Invariant: a demonstration is what an episode could have been: the tool result in it is the one the tool gives for the
expression called, so a policy never learns to expect an answer the environment would not return. The noise is what
leaves reinforcement something to improve.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ..contracts.messages import Message, ToolCall, assistant, tool_result
from ..contracts.tasks import Task, content_hash

if TYPE_CHECKING:
    from .calculator import Problem

DRAWS: Final = 40_000
"""Draws from the generator: with two digits 14,836 of 16,200 possible problems come up."""
CALL_RATE: Final = 0.6
COPY_RATE: Final = 0.7
"""Measured: with these a cold-started policy earns enough to learn from and far from everything."""


@cache
def draw_problems(digits: int, operators: Sequence[str], seed: int) -> dict[str, tuple[dict[str, Any], ...]]:
    """Distinct problems by split, in the order drawn. Takes about a second with the import; call it at start-up."""
    import reasoning_gym

    drawn = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=DRAWS, min_terms=2, max_terms=2, min_digits=digits, max_digits=digits
    )
    answers = {entry["metadata"]["expression"]: int(entry["answer"]) for entry in drawn}
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "eval": [], "test": []}
    for expression, answer in answers.items():
        if expression.split()[1] in operators:
            problem = {"expression": expression, "answer": answer}
            splits[split_of(problem)].append(problem)
    return {split: tuple(problems) for split, problems in splits.items()}


def split_of(problem: dict[str, Any]) -> str:
    """The split of a problem, by the hash of its content alone."""
    bucket = int(content_hash(problem)[:8], 16) % 10
    return {0: "eval", 1: "test"}.get(bucket, "train")


def demonstrate(
    task: "Task[Problem]", rng: random.Random, *, call_rate: float = CALL_RATE, copy_rate: float = COPY_RATE
) -> tuple[Message, ...]:
    """A noisy demonstration after the prompt: tool call, tool result, answer.

    With probability `call_rate` the right expression is called, else one operand alone; with probability `copy_rate`
    the result is copied, else some number is said. A policy that imitates both is right about call_rate · copy_rate.
    """
    left, _, right = task.data.expression.split()
    called = task.data.expression if rng.random() < call_rate else rng.choice((left, right))
    result = task.data.answer if called == task.data.expression else int(called)
    said = str(result if rng.random() < copy_rate else rng.randint(10, 198))
    return demonstration(task, called, said, result=result)


def demonstration(task: "Task[Problem]", called: str, said: str, *, result: int | None = None) -> tuple[Message, ...]:
    """Calls `called`, reads `result` (the right one by default), says `said`."""
    call = ToolCall(id="call_0", name="calculator", arguments={"expression": called.replace(" ", "")})
    content = str(task.data.answer if result is None else result)
    return assistant("", (call,)), tool_result(content, call), assistant(said)
