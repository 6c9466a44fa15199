"""What the tiny policy is made from: the calculator's demonstrations, its vocabulary, and the reward it earns.

Invariant: the reward is the environment's own, over whole episodes by the pure flow that runs also follow, with tools
really called. Demonstrations and measured tasks come from the training split alone, so evaluation stays unseen.
"""

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..contracts.context import Context
from ..contracts.episode import Episode, ToolOutcome, Turn, total_reward
from ..contracts.flow import Next, Spent, after_answer, after_model, before_model, completion_budget
from ..contracts.ids import EpisodeKey
from ..contracts.messages import Message, ToolCall, assistant, tool_result
from ..contracts.reasons import FinishReason, StopReason
from ..contracts.tasks import Task
from ..environments.calculator_demos import demonstrate
from ..environments.registry import load
from ..inference.tiny_policy import CONTEXT, demonstration, train_tokenizer
from ..inference.tokens import TokenRenderer

if TYPE_CHECKING:
    from ..trainer.cold_start import ColdStart, Progress, Sampler

_DEMONSTRATIONS: Final = 3000
_SPELLED: Final = 96
"""Conversations the vocabulary is trained on; their fixed parts are all alike."""
_MEASURED: Final = 512
TEMPERATURE: Final = 0.8
"""What the policy is measured at and the demo samples at. At 1 much of what a trained one gets wrong is one token drawn
from the tail."""
_SKILLED: Final = 0.36
"""Loss (nats a token) of a policy that can copy a result, three digits of it too; what is left is the demonstrations'
noise, 0.33. One that is stopped while its reward is still rising has not learnt that yet: of four such policies two
ended at 0.85 after as many steps as the demo's, where those stopped on the plateau reach 0.95."""
COMPLETION: Final = 48
"""Tokens of one completion; a correct tool call has about 14."""
_ROOT: Final = Path(__file__).resolve().parent.parent
_SOURCES: Final = ("cli/policy_recipe.py", "inference/tiny_policy.py", "trainer/cold_start.py", "trainer/generate.py")
_SETTINGS: Final = {"context": CONTEXT, "temperature": TEMPERATURE, "measure_below": _SKILLED}
_WRONG_CALLS: Final = (
    ToolCall(id="call_0", name="calculator", arguments={"expression": "x"}),
    ToolCall(id="call_0", name="calculator", arguments={"expression": "(1"}),
    ToolCall(id="call_0", name="calculator", arguments={"expression": "1/0"}),
    ToolCall(id="call_0", name="calculator"),
    ToolCall(id="call_0", name="calc"),
    ToolCall(id="call_0", name="", problem="The tool call is not valid JSON.", raw="{"),
)
"""What a beginner does: the words of the errors are put in the vocabulary, so that they do not fill the context."""


@dataclass(eq=False)
class _Walk:
    """One episode in progress."""

    task: Task[Any]
    prompt: tuple[Message, ...]
    state: dict[str, Any]
    stream: list[int]
    turns: list[Turn] = field(default_factory=list)
    sampled: int = 0
    stop: StopReason | None = None

    @property
    def context(self) -> Context:
        return Context(run_id="policy", task_key=self.task.key, member=0, turn=len(self.turns))


class Recipe:
    """One policy to be made. Building it is quick and needs neither torch nor a tokenizer; `make` does the work.

    Runs the environment's async parts on a loop of its own: not to be used where a loop runs already.
    """

    def __init__(self, seed: int, settings: Mapping[str, Any]) -> None:
        self.seed, self.settings = seed, dict(settings)
        self._environment = load("calculator")
        self._tools = self._environment.spec.tool_specs()
        self._runner = asyncio.Runner()
        self._demonstrations, self._tasks = self._runner.run(self._draw())

    @property
    def key(self) -> str:
        """Hash of the recipe's source, its settings and its demonstrations: 16 hex digits."""
        digest = hashlib.sha256()
        for name in _SOURCES:
            digest.update((_ROOT / name).read_bytes())
        tools = [tool.model_dump(mode="json") for tool in self._tools]
        said = [[m.model_dump(mode="json") for m in (*prompt, *rest)] for prompt, rest in self._demonstrations]
        digest.update(json.dumps([self.seed, self.settings, tools, said], sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def make(self, folder: Path, threads: int, progress: "Callable[[Progress], None]") -> "ColdStart":
        """Write tokenizer and weights to `folder`. Raises ColdStartFailed, ImportError where torch is missing."""
        from ..trainer.cold_start import ColdStartSettings, Demonstration, cold_start, save

        renderer = train_tokenizer(self._runner.run(self._conversations()), folder)
        pairs = [demonstration(renderer, prompt, rest, self._tools) for prompt, rest in self._demonstrations]
        result = cold_start(
            [Demonstration(ids, mask) for ids, mask in pairs],
            vocabulary=renderer.vocabulary,
            pad_id=renderer.stop_token_ids[1],
            stop_ids=renderer.stop_token_ids,
            measure=lambda sampler, episodes: self.measure(renderer, sampler, episodes),
            settings=ColdStartSettings(**_SETTINGS | self.settings),
            seed=self.seed,
            threads=threads,
            progress=progress,
        )
        save(result, folder)
        return result

    def measure(self, renderer: TokenRenderer, sampler: "Sampler", episodes: int) -> float:
        """Mean reward of one episode each over the first `episodes` measured tasks."""
        return self._runner.run(self._measure(renderer, sampler, self._tasks[:episodes]))

    def close(self) -> None:
        self._runner.close()

    async def _draw(self) -> tuple[list[tuple[tuple[Message, ...], tuple[Message, ...]]], list[Task[Any]]]:
        rng = random.Random(self.seed)
        size = await self._environment.size("train") or 10_000
        demonstrations = []
        for _ in range(_DEMONSTRATIONS):
            task = await self._environment.make_task("train", rng.randrange(size))
            demonstrations.append(((await self._walk(task, None)).prompt, demonstrate(task, rng)))
        tasks = [await self._environment.make_task("train", rng.randrange(size)) for _ in range(_MEASURED)]
        return demonstrations, tasks

    async def _conversations(self) -> list[tuple[Sequence[Message], Any]]:
        """What the vocabulary is trained on: demonstrations, and wrong calls with the errors they get."""
        out: list[tuple[Sequence[Message], Any]] = [
            ([*prompt, *rest], self._tools) for prompt, rest in self._demonstrations[:_SPELLED]
        ]
        for call in _WRONG_CALLS:
            walk = await self._walk(self._tasks[0], None)
            outcome = await self._environment.run_call(0, call, walk.task, walk.state, walk.context)
            wrong = [*walk.prompt, assistant("", (call,)), tool_result(outcome.content, call)]
            out += [(wrong, self._tools)] * 2
        return out

    async def _walk(self, task: Task[Any], renderer: TokenRenderer | None) -> _Walk:
        context = Context(run_id="policy", task_key=task.key, member=0, turn=0)
        prompt, state = await self._environment.start(task, context)
        return _Walk(task, prompt, state, [] if renderer is None else renderer.open(prompt, self._tools))

    async def _measure(self, renderer: TokenRenderer, sampler: "Sampler", tasks: Sequence[Task[Any]]) -> float:
        walks = [await self._walk(task, renderer) for task in tasks]
        going = walks
        while going:
            room = {id(walk): self._room(walk) for walk in going}
            for walk in going:
                if room[id(walk)] < 1:
                    walk.stop = StopReason.CONTEXT_OVERFLOW
            going = [walk for walk in going if walk.stop is None]
            longest = min((room[id(walk)] for walk in going), default=0)
            for walk, said in zip(going, sampler([walk.stream for walk in going], longest), strict=True):
                await self._turn(renderer, walk, said)
            going = [walk for walk in going if walk.stop is None]
        return sum([await self._reward(walk) for walk in walks]) / len(walks)

    def _room(self, walk: _Walk) -> int:
        spent = Spent(turns=len(walk.turns), tokens=walk.sampled)
        return completion_budget(self._environment.limits, spent, COMPLETION, len(walk.stream), CONTEXT)

    async def _turn(self, renderer: TokenRenderer, walk: _Walk, said: list[int]) -> None:
        """Take in one completion: run its tools, extend the stream, or end the episode."""
        context = walk.context
        message = renderer.parse(said, turn=context.turn, prompt_ids=walk.stream, tools=self._tools)
        finish = FinishReason.STOP if said[-1] in renderer.stop_token_ids else FinishReason.LENGTH
        move = after_model(finish, len(message.tool_calls), has_step=False)
        outcomes: list[ToolOutcome] = []
        if move.next is Next.TOOLS:
            for index, call in enumerate(message.tool_calls):
                answer = await self._environment.run_call(index, call, walk.task, walk.state, context)
                walk.state = walk.state if answer.state is None else answer.state
                outcomes.append(ToolOutcome(call=call, content=answer.content, error=answer.error))
            move = after_answer()
        walk.turns.append(Turn(index=context.turn, message=message, outcomes=tuple(outcomes), finish=finish))
        walk.sampled += len(said)
        if move.next is Next.MODEL:
            move = before_model(Spent(turns=len(walk.turns), tokens=walk.sampled), self._environment.limits)
        if move.next is Next.END:
            walk.stop = move.stop
            return
        results = [tool_result(outcome.content, outcome.call) for outcome in outcomes]
        delta = renderer.extend(walk.stream, said, results, self._tools)
        if delta is None:
            whole = [*walk.prompt, *(m for turn in walk.turns for m in _said(turn))]
            walk.stream = renderer.open(whole, self._tools)
        else:
            walk.stream = [*walk.stream, *said, *delta]

    async def _reward(self, walk: _Walk) -> float:
        key = EpisodeKey(run_id="policy", group_no=0, member=0)
        episode = Episode(key=key, prompt=walk.prompt, turns=tuple(walk.turns), stop=walk.stop)
        scores = await self._environment.score_inline(walk.task, walk.state, episode, None, walk.context)
        return total_reward(tuple(scores)) or 0.0


def _said(turn: Turn) -> list[Message]:
    return [turn.message, *(tool_result(outcome.content, outcome.call) for outcome in turn.outcomes)]
