"""One request's life in the engine.

Invariant: a call's tokens, logprobs and version spans grow together, one token at a time, in the thread that samples;
`spans` cover the tokens exactly and without gaps, so that a span boundary is the exact token at which weights changed.
"""

import asyncio
import random
from dataclasses import dataclass, field

from .journal import Line
from .wire import SamplingParams


@dataclass(frozen=True, slots=True)
class Scored:
    """One prompt token as the model saw it: its logprob given all tokens before it, and its place among all tokens,
    the likeliest being 1."""

    logprob: float
    rank: int


@dataclass(slots=True)
class Span:
    """Tokens `start` to `end` (exclusive) of a completion, sampled under one weight version."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Call:
    """A prompt, what was sampled for it so far, and how to go on.

    `stop_ids`: sampling one of these ends the call. `budget`: most tokens to sample. `changed` is set on the server's
    event loop when there is news: every step for a streamed call, else at the end.
    """

    request_id: str
    call_id: str
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    budget: int
    streamed: bool
    dice: random.Random
    line: Line
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    scored: list[Scored] | None = None
    """The prompt's tokens but the first, under the weights that sampled the first token; None where not asked for."""
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    error_status: int = 500
    """What HTTP says of `error`."""
    feeds: int = 0
    """How often the call was handed to the batcher: once, and once more after each pause."""

    @property
    def over(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def record(self, token: int, logprob: float, version: str) -> None:
        """Append a sampled token and decide whether it ends the call.

        The event loop reads while this runs: the token is appended last, so that every token it can count has its
        logprob and its span.
        """
        position = len(self.tokens)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = position + 1
        else:
            self.spans.append(Span(version, position, position + 1))
        self.tokens.append(token)
        if token in self.stop_ids:
            self.stop_reason = None if token in self.eos_ids else token
            self.finish_reason = "stop"
        elif position + 1 >= self.budget:
            self.finish_reason = "length"
