"""What travels over HTTP: the part of vLLM's wire that this engine speaks.

Invariant: a request either means here what it means to vLLM, or it is refused with a reason. Every field that could
change what is sampled is therefore named, with the values that this engine honours; any other field is an error.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

NO_LIMIT = -1
"""vLLM's spelling of "all tokens" for `top_k`; 0 says the same."""


class ApiError(Exception):
    """A request that cannot be served: an HTTP status and one sentence for the caller."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 409: "ConflictError"}
        kind = kinds.get(self.status, "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "code": self.status}}


def explain(error: ValidationError) -> str:
    """One sentence that names each refused field and why."""
    parts = []
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"]) or "body"
        if problem["type"] == "extra_forbidden":
            parts.append(f"{field} is not supported by this engine")
        else:
            parts.append(f"{field}: {problem['msg']}")
    return "; ".join(parts)


def _neutral(*values: Any) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(f"only {values[0]!r} is supported by this engine, not {value!r}")
        return value

    return BeforeValidator(check)


class Wire(BaseModel):
    """A request body: frozen, and strict about what it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SamplingParams(Wire):
    """How one completion is sampled. Logprobs are always those of the distribution sampled from, except at
    temperature 0, where the most likely token is taken and its logprob is that at temperature 1 (as in vLLM)."""

    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=NO_LIMIT)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=1)
    """0 or 1: return the logprob of each sampled token. Alternatives are not returned."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=0)
    """0: return the logprob of each prompt token but the first, at temperature 1. Alternatives are not returned."""

    n: Annotated[int, _neutral(1)] = 1
    min_p: Annotated[float, _neutral(0.0)] = 0.0
    min_tokens: Annotated[int, _neutral(0)] = 0
    presence_penalty: Annotated[float, _neutral(0.0)] = 0.0
    frequency_penalty: Annotated[float, _neutral(0.0)] = 0.0
    repetition_penalty: Annotated[float, _neutral(1.0)] = 1.0
    stop: Annotated[Any, _neutral(None, [], "")] = None
    skip_special_tokens: bool = True
    """Accepted for clients that send it; tokens in, tokens out has no text."""

    @model_validator(mode="after")
    def _prompts_are_scored_at_temperature_one(self) -> "SamplingParams":
        if self.prompt_logprobs is not None and self.temperature != 1.0:
            raise ValueError(
                "prompt_logprobs are those at temperature 1, so only temperature 1.0 is supported with them,"
                f" not {self.temperature}"
            )
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class GenerateRequest(Wire):
    """`POST /inference/v1/generate`: tokens in, tokens out."""

    model: str
    token_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    stream: bool = False
    request_id: str | None = Field(default=None, min_length=1, max_length=512)
    """Echoed, and the name of the request in the journal; chosen by the engine if absent."""
    cache_salt: str | None = None
    """Accepted; there is no prefix cache that it could separate."""
    priority: int = 0
    """Accepted; requests are served in order of arrival."""

    @model_validator(mode="after")
    def _streams_carry_no_prompt(self) -> "GenerateRequest":
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not supported together with stream")
        return self


class _OpenAIRequest(Wire):
    """What chat and text completions have in common."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=NO_LIMIT)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    return_token_ids: bool = False
    request_id: str | None = Field(default=None, min_length=1, max_length=512)
    user: str | None = None

    n: Annotated[int, _neutral(1)] = 1
    stream: Annotated[bool, _neutral(False)] = False
    stop: Annotated[Any, _neutral(None, [], "")] = None
    presence_penalty: Annotated[float, _neutral(0.0)] = 0.0
    frequency_penalty: Annotated[float, _neutral(0.0)] = 0.0

    def _params(self, max_tokens: int, logprobs: bool) -> SamplingParams:
        shared = {"temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos"}
        return SamplingParams(
            max_tokens=max_tokens, logprobs=0 if logprobs else None, **self.model_dump(include=shared)
        )


class ChatRequest(_OpenAIRequest):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[str | None, _neutral("auto", "none", None)] = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: Annotated[int | None, _neutral(0, None)] = None

    def sampling(self, room: int) -> SamplingParams:
        """`room`: tokens left in the context, the limit where the request names none."""
        return self._params(self.max_completion_tokens or self.max_tokens or room, self.logprobs)


class CompletionRequest(_OpenAIRequest):
    """`POST /v1/completions`; a prompt is text or token ids."""

    prompt: str | list[int]
    logprobs: int | None = Field(default=None, ge=0, le=1)

    def sampling(self) -> SamplingParams:
        return self._params(self.max_tokens or 16, self.logprobs is not None)


class CollectiveRpc(Wire):
    """`POST /collective_rpc`; `reload_weights` is the one method."""

    method: str
    args: Annotated[Any, _neutral([], (), None)] = None
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class NewVersion(Wire):
    """`POST /update_weight_version`."""

    new_version: str = Field(min_length=1, max_length=512)


class CheckWeights(Wire):
    """`POST /weight_checker`."""

    action: Literal["checksum"]
