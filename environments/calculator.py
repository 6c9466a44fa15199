"""Sums and differences through a calculator tool: ask, call the tool, answer. The shortest example of the contract.

Problems come from `reasoning-gym`. A problem's split is decided by the hash of its content, so that evaluation and
test tasks are never trained on, whatever the configuration: one in ten each, the rest trains.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, Field

from ..contracts.episode import Episode
from ..contracts.limits import Limits
from ..contracts.messages import Message, user
from ..contracts.tasks import Task
from .base import EnvConfig, Environment, State
from .calculator_demos import demonstration, draw_problems
from .marks import metric, reward, tool

OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


class CalculatorConfig(EnvConfig):
    digits: int = Field(default=2, ge=1, le=9)
    operators: tuple[Literal["+", "-"], ...] = Field(default=("+", "-"), min_length=1)
    seed: int = 0


class Problem(BaseModel):
    expression: str
    answer: int


class CalculatorState(State):
    calls: int = 0


class Calculator(Environment[CalculatorConfig, CalculatorState]):
    """Answer a sum or difference, with a calculator at hand."""

    limits = Limits(turns=4)

    def startup(self) -> None:
        self.problems = draw_problems(self.config.digits, self.config.operators, self.config.seed)

    def size(self, split: str) -> int:
        return len(self.problems[split])

    def task(self, split: str, index: int) -> Task[Problem]:
        problems = self.problems[split]
        return Task(data=Problem.model_validate(problems[index % len(problems)]))

    def prompt(self, task: Task[Problem]) -> list[Message]:
        return [user(f"What is {task.data.expression}?")]

    @tool(run="inline")
    def calculator(self, expression: str, *, state: CalculatorState) -> str:
        """Evaluate an arithmetic expression."""
        state.calls += 1
        return evaluate(expression)

    @reward(run="inline")
    def correct(self, task: Task[Problem], episode: Episode) -> float:
        numbers = NUMBER.findall(re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", episode.answer))
        return float(bool(numbers) and numbers[-1] == str(task.data.answer))

    @metric
    def calls(self, state: CalculatorState) -> int:
        return state.calls

    def demonstrate(self, task: Task[Problem], rng: object) -> tuple[Message, ...]:
        return demonstration(task, task.data.expression, str(task.data.answer))


def evaluate(expression: str) -> str:
    """The value of integers joined by + - * / and parentheses; raises ValueError for anything else."""
    if len(expression) > 100 or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        raise ValueError("an expression is at most 100 characters of integers, + - * / and parentheses")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError, KeyError):
        raise ValueError("this is no arithmetic expression") from None
    return str(value.numerator) if value.denominator == 1 else str(float(value))


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](_value(node.operand))
    raise SyntaxError(type(node).__name__)
