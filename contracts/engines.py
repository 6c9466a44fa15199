"""Inference servers a run can sample from, and what each kind of them can do.

Invariant: what a kind cannot do is a fact of this table, and a run that needs it is refused before anything is sampled:
a policy is never trained on tokens whose ids or logprobs somebody guessed.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import Field, StringConstraints, model_validator

from .base import Strict

URL: Final = r"^https?://[^\s/]+(/\S*)?$"
HttpUrl = Annotated[str, StringConstraints(pattern=URL)]


class EngineKind(StrEnum):
    VLLM = "vllm"
    """A vLLM server."""
    SGLANG = "sglang"
    """An SGLang server."""
    DEV = "dev"
    """The engine that comes with Atropos."""
    OPENAI = "openai"
    """Any server that speaks OpenAI's API, hosted or not: messages in and out, so it cannot be trained on."""


class EngineApi(StrEnum):
    """Which of OpenAI's two APIs."""

    CHAT = "chat"
    """Chat Completions."""
    RESPONSES = "responses"
    """Responses, nothing kept on the server."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kind of engine can do."""

    tokens: bool
    """Takes a prompt's ids, and returns the sampled ids, each with its logprob and the weights that sampled it."""
    publishes: bool
    """New weights can be loaded into it while it serves."""
    sampling: frozenset[str]
    """Which of `Sampling.special` it knows."""


_TRUNCATED: Final = frozenset({"top_p", "top_k"})
_PENALTIES: Final = frozenset({"presence_penalty", "frequency_penalty"})
_SERVERS: Final = _TRUNCATED | _PENALTIES | {"min_p", "repetition_penalty", "logit_bias"}

CAPABILITIES: Final = {
    EngineKind.VLLM: Capabilities(tokens=True, publishes=True, sampling=_SERVERS),
    EngineKind.SGLANG: Capabilities(tokens=True, publishes=True, sampling=_SERVERS),
    EngineKind.DEV: Capabilities(tokens=True, publishes=True, sampling=_TRUNCATED),
    EngineKind.OPENAI: Capabilities(
        tokens=False, publishes=False, sampling=_PENALTIES | {"top_p", "logit_bias", "stop"}
    ),
}

_OURS: Final = frozenset(
    {"model", "messages", "input", "tools", "stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens"}
)
"""Fields of a request that its body is made of; nobody sets them by hand."""
_SECRET: Final = ("key", "token", "secret", "password", "authorization")


class HostedOptions(Strict):
    """How a server is spoken to that takes messages."""

    api: EngineApi = EngineApi.CHAT
    """Which of OpenAI's APIs it speaks."""
    model: str | None = Field(default=None, min_length=1)
    """What it calls the model; default: `model.path` of the run."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request, for instance `reasoning_effort: low`."""

    @model_validator(mode="after")
    def _leaves_ours_alone(self) -> Self:
        for name in self.body:
            if name in _OURS:
                raise ValueError(f"body: {name!r} is filled in by the run; leave it out")
            if any(word in name.lower().split("_") for word in _SECRET):
                raise ValueError(f"body: {name!r} looks like a secret, and run files are stored; use api_key_env")
        return self


class EngineConfig(Strict):
    """An inference server."""

    kind: EngineKind = EngineKind.VLLM
    """What speaks there."""
    url: HttpUrl
    """Where it listens, as workers reach it."""
    api_key_env: str | None = None
    """Variable of the workers' environment that holds its key."""
    concurrency: int = Field(default=64, ge=1, le=4096)
    """Requests in flight at once."""
    hosted: HostedOptions | None = None
    """Only with kind `openai`: which API, the model's name there, and further fields of each request."""

    @model_validator(mode="after")
    def _options_fit_the_kind(self) -> Self:
        if self.hosted is not None and self.kind is not EngineKind.OPENAI:
            raise ValueError(f"hosted: only engines of kind openai have it, and this one is of kind {self.kind}")
        return self

    @property
    def capabilities(self) -> Capabilities:
        return capabilities(self.kind, self.hosted)


def capabilities(kind: EngineKind, hosted: HostedOptions | None = None) -> Capabilities:
    """What an engine can do that is spoken to so."""
    can = CAPABILITIES[kind]
    responses = hosted is not None and hosted.api is EngineApi.RESPONSES
    return replace(can, sampling=frozenset({"top_p"})) if responses else can


def why_untrainable_engine(kind: EngineKind) -> str | None:
    """Why a run on such an engine cannot train, as a sentence; None where it can."""
    if CAPABILITIES[kind].tokens:
        return None
    return (
        f"engines: one of kind {kind} returns no token ids and logprobs, so nothing it says can be trained on; set "
        "trainer.kind to none, or use vllm or sglang"
    )
