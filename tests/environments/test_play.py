"""Episodes played in this process, through the same flow as the durable ones; and the examples."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from atropos import (
    Context,
    EnvConfig,
    Environment,
    Judge,
    Limits,
    Message,
    State,
    Step,
    Task,
    assistant,
    reward,
    stop,
    tool,
)
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.messages import Role, ToolCall, ToolSpec
from atropos.contracts.reasons import FinishReason, StopReason
from atropos.environments.faults import EnvironmentFault
from atropos.environments.loaded import LoadedEnvironment
from atropos.environments.play import Reply, play
from atropos.environments.registry import load

EXAMPLES = Path(__file__).parents[2] / "examples"


class Script:
    """Says given things; a reply may be a text, a message or a whole reply."""

    def __init__(self, *lines: str | Message | Reply) -> None:
        self.lines = list(lines)
        self.heard: list[tuple[Message, ...]] = []

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ctx: Context) -> Reply:
        self.heard.append(tuple(messages))
        line = self.lines[ctx.turn]
        return line if isinstance(line, Reply) else Reply(line if isinstance(line, Message) else assistant(line))


class Log(State):
    log: list[str] = []


class Both(Environment[EnvConfig, Log]):
    """Tools and step."""

    limits = Limits(turns=5, tokens=100)
    cleaned: list[list[str]]

    def task(self, split: str, index: int) -> Task[int]:
        return Task(data=index)

    def prompt(self) -> str:
        return "begin"

    def step(self, state: Log, message: Message) -> Step:
        state.log.append(f"step {message.text}")
        return Step("more", reward=0.5, done=message.text == "done", truncated=message.text == "cut")

    @tool(run="inline")
    def note(self, word: str, *, state: Log, ctx: Context) -> str:
        """Note a word."""
        state.log.append(f"{word} {ctx.turn}.{ctx.call}")
        return "noted"

    @tool(run="activity")
    def look(self, word: str) -> str:
        """Look at a word, elsewhere."""
        if word == "bad":
            raise ValueError("no such word")
        return word.upper()

    @stop
    def enough(self, state: Log) -> bool:
        return "enough 0.0" in state.log

    @reward(run="inline")
    def total(self, episode: Any) -> float:
        return float(sum(episode.step_rewards))

    def cleanup(self, state: Log) -> None:
        self.__dict__.setdefault("cleaned", []).append(state.log)


def calls(*pairs: tuple[str, str]) -> Message:
    made = [ToolCall(id=str(n), name=name, arguments={"word": word}) for n, (name, word) in enumerate(pairs)]
    return assistant("", tuple(made))


async def played(*lines: str | Message | Reply, limits: Limits | None = None) -> tuple[Any, Script, Both]:
    env, script = Both(), Script(*lines)
    loaded = LoadedEnvironment("both", {}, env)
    return await play(loaded, await loaded.make_task("train", 0), script, limits=limits), script, env


async def test_tools_answer_first_and_step_sees_the_first_message_without_calls() -> None:
    episode, script, env = await played(calls(("note", "a"), ("look", "b"), ("note", "c")), "done")
    assert episode.stop is StopReason.DONE
    assert env.cleaned == [["a 0.0", "c 0.2", "step done"]]
    assert [message.text for message in script.heard[1]] == ["begin", "", "noted", "B", "noted"]
    assert [message.role for message in episode.messages][-2:] == [Role.ASSISTANT, Role.USER]
    assert (episode.reward, episode.step_rewards) == (0.5, (0.5,))


@pytest.mark.parametrize(
    ("lines", "stop_reason", "turns"),
    [
        (("done",), StopReason.DONE, 1),
        (("cut",), StopReason.TRUNCATED, 1),
        ((calls(("note", "enough")),), StopReason.CONDITION, 1),
        (("go",) * 5, StopReason.MAX_TURNS, 5),
        ((Reply(assistant("go"), sampled_tokens=60),) * 2, StopReason.MAX_TOKENS, 2),
        ((Reply(calls(("note", "x")), FinishReason.LENGTH),), StopReason.LENGTH, 1),
    ],
)
async def test_every_way_to_stop(lines: Any, stop_reason: StopReason, turns: int) -> None:
    episode, _, _ = await played(*lines)
    assert (episode.stop, len(episode.turns)) == (stop_reason, turns)


async def test_a_cut_message_runs_nothing() -> None:
    _, _, env = await played(Reply(calls(("note", "x")), FinishReason.LENGTH))
    assert env.cleaned == [[]]


async def test_limits_can_be_tightened() -> None:
    episode, _, _ = await played("go", "go", limits=Limits(turns=1))
    assert (episode.stop, len(episode.turns)) == (StopReason.MAX_TURNS, 1)


async def test_a_failed_tool_does_not_end_the_episode() -> None:
    episode, script, _ = await played(calls(("look", "bad"), ("nothing", "x")), "done")
    assert episode.outcomes[0].error == "no such word"
    assert script.heard[1][-1].text.startswith("Error: there is no tool 'nothing'")
    assert episode.stop is StopReason.DONE


async def test_cleanup_runs_when_the_episode_breaks() -> None:
    class Breaking(Both):
        def step(self, state: Log) -> Step:  # type: ignore[override]
            raise RuntimeError("broken")

    env = Breaking()
    loaded = LoadedEnvironment("breaking", {}, env)
    with pytest.raises(EnvironmentFault, match=r"breaking.step raised RuntimeError: broken"):
        await play(loaded, await loaded.make_task("train", 0), Script("x"))
    assert env.cleaned == [[]]


# --- examples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(8))
async def test_guess_is_won_by_halving(index: int) -> None:
    env = load(str(EXAMPLES / "guess.py"))
    task = await env.make_task("eval", index)
    lines = [m for m in env.demonstrate(task, random.Random(0)) if m.role is Role.ASSISTANT]
    episode = await play(env, task, Script(*lines))
    assert (episode.stop, episode.reward) == (StopReason.DONE, 1.0)
    assert next(score.value for score in episode.scores if score.name == "guesses") == len(lines) <= 5


async def test_guess_ends_unsolved_at_its_limit_and_ignores_chatter() -> None:
    env = load(str(EXAMPLES / "guess.py"))
    episode = await play(env, await env.make_task("train", 0), Script(*["what?"] * 8))
    assert (episode.stop, episode.reward) == (StopReason.MAX_TURNS, 0.0)
    assert episode.messages[-1].text == "Say a number."


class Longest:
    """Prefers the longer of two answers."""

    async def ask(self, messages: list[Message], *, model: str = "default", max_tokens: int = 1024) -> str:
        _, a, b = messages[0].text.replace("\n\nB: ", "\n\nA: ").split("\n\nA: ")
        return "A" if len(a) >= len(b) else "B"


async def test_pairwise_gives_the_share_of_comparisons_won() -> None:
    env = load(str(EXAMPLES / "pairwise.py"))
    task = await env.make_task("train", 0)
    episodes = [
        (await play(env, task, Script(text), member=member)).model_copy(
            update={"key": EpisodeKey(run_id="r", group_no=0, member=member)}
        )
        for member, text in enumerate(["longest of all", "short", "in between"])
    ]
    judge: Judge = Longest()
    assert await env.score_group(task, episodes, judge) == {"wins": [1.0, 0.0, 0.5]}
    assert await env.score_group(task, episodes, None) == {"wins": [None, None, None]}
    assert await env.score_group(task, episodes[:1], judge) == {"wins": [None]}


async def test_pairwise_splits_share_no_task() -> None:
    from atropos.environments.splits import check_disjoint

    assert (await check_disjoint(load(str(EXAMPLES / "pairwise.py")))).distinct == {"train": 24, "eval": 4, "test": 4}
