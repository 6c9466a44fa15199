"""What an inference server is to everything above: one small protocol, and the words it uses.

Invariant: a `Completion` is whole and consistent when it exists: as many finite logprobs as tokens, spans that tile
them, and at most one stop token, the last. Clients refuse (EngineFailure) what is not so; they never repair it, since
a logprob that was made up trains a policy that nobody sampled.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from ..contracts.engines import Capabilities, EngineKind, HostedOptions
from ..contracts.messages import Message, ToolSpec
from ..contracts.reasons import FinishReason
from ..contracts.records import EngineRecord
from ..contracts.runfile import RunConfig
from ..contracts.sampling import Sampling


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to sample.

    `prompt_ids`: the whole prompt, exactly as the segment holds it. `max_tokens`: the flow's budget for this
    completion (it may be below `sampling.max_tokens`). `request_id`: names episode, turn and try, so that a journal
    can tell them apart.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Tokens [start, end) were sampled by the weights that the engine calls `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled.

    `logprobs`: of the sampling distribution at the request's temperature, one a token. `finish` STOP means that the
    last token is one of the request's stop tokens; after LENGTH no end token is added.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    spans: tuple[LabelSpan, ...]
    incarnation: str
    usage_prompt: int
    """Prompt tokens the engine says it read; equals `len(prompt_ids)`."""


Progress = Callable[[Completion], Awaitable[None]]
"""Told of a completion while it grows: its first tokens, consistent in themselves, `finish` without meaning. It is
awaited between two events, so it returns soon and raises nothing."""


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """Which weights an engine holds, and which life of the engine this is."""

    label: str
    """The engine's own name for its weights; `default` after a start."""
    incarnation: str
    """Changes when the engine's process does."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a conversation; `answer`: the bytes in which an engine of this kind gave it, where one did."""

    message: Message
    answer: bytes | None = None


@dataclass(frozen=True, slots=True)
class AskRequest:
    """One answer to a conversation, for engines that take messages."""

    request_id: str
    conversation: tuple[Said, ...]
    tools: tuple[ToolSpec, ...]
    sampling: Sampling
    max_tokens: int
    turn: int
    """Names tool calls for which the engine has no names of its own."""
    model: str
    """What the run calls the model; the engine's own options may know a better name."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said that gives no tokens. `raw`: the whole answer as its bytes came."""

    message: Message
    finish: FinishReason
    usage_prompt: int | None
    usage_sampled: int | None
    """Tokens as the provider counts them; None where it does not say."""
    model: str | None
    """What the provider says has answered."""
    raw: bytes


class ContextOverflow(Exception):
    """The provider says that the conversation is longer than the model's context."""


class Engine(Protocol):
    """An inference server. Every method raises EngineFailure and nothing else; cancelling one ends its request."""

    engine_id: str

    async def health(self) -> None:
        """Returns where the server is up, raises where it is not. Never samples, so it costs nothing."""
        ...

    async def waiting(self) -> int | None:
        """Requests that wait in the server's own queue; None where it does not say."""
        ...

    async def close(self) -> None: ...


class MessageEngine(Engine, Protocol):
    """A server that takes messages and returns one."""

    async def ask(self, request: AskRequest) -> Answer:
        """The next message. Raises ContextOverflow besides EngineFailure."""
        ...


class TokenEngine(Engine, Protocol):
    """A server that takes a prompt's ids and returns the ids it sampled, with logprobs and versions."""

    async def sample(self, request: SampleRequest, progress: Progress | None = None) -> Completion:
        """One completion. With `progress` it is streamed, and what there is so far is told every few seconds, also
        where it breaks off; the result is the same."""
        ...

    async def weight_info(self) -> WeightInfo: ...

    async def label(self) -> str:
        """What it calls its weights, as it said within the last moment."""
        ...

    async def context_limit(self) -> int | None:
        """Longest prompt plus completion in tokens, as the server says; None where it does not."""
        ...


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is and how many requests it may have in flight. The key never shows in a repr."""

    engine_id: str
    kind: EngineKind
    url: str
    concurrency: int = 64
    api_key: str | None = field(default=None, repr=False)
    hosted: HostedOptions | None = None

    @classmethod
    def of(cls, record: EngineRecord, api_key: str | None) -> "EngineAddress":
        kind = EngineKind(record.kind)
        return cls(record.engine_id, kind, record.url, record.concurrency, api_key, record.hosted)


def why_untrainable(sampling: Sampling) -> str | None:
    """Why completions sampled so must not train, as a sentence; None where they may.

    Truncation, penalties and biases give logprobs of another distribution than the trainer computes, and temperature 0
    has none.
    """
    changed = [name for name in sampling.special if name != "stop"]
    if changed:
        return f"sampling: {' and '.join(changed)} cannot be trained on; leave them at their defaults"
    if sampling.temperature == 0.0:
        return "sampling: temperature 0 draws nothing, so there is nothing to train on; set it above 0"
    return None


def why_unsupported(sampling: Sampling, can: Capabilities) -> str | None:
    """Why an engine that can do so much cannot sample so, as a sentence; None where it can.

    A stop string is found in text, and on the token wire the engine does not turn tokens into text; a string may also
    end inside a token, and then the tokens would say more than the message. The chat format's own stop tokens end a
    turn.
    """
    missing = [name for name in sampling.special if name not in can.sampling]
    if not missing:
        return None
    if missing == ["stop"] and can.tokens:
        return "sampling.stop: stop strings do not work with tokens in and out; the chat format's end token ends a turn"
    return f"sampling: this kind of engine does not know {' and '.join(missing)}; leave them at their defaults"


def why_not_sampled(config: RunConfig) -> list[str]:
    """What its engines, or its training, cannot do with the sampling of a run, a sentence each."""
    problems = [why_untrainable(config.sampling)] if config.trains else []
    for engine in config.engines:
        for sampling in (config.sampling, config.eval.sampling):
            problems.append(None if sampling is None else why_unsupported(sampling, engine.capabilities))
    return list(dict.fromkeys(problem for problem in problems if problem is not None))
