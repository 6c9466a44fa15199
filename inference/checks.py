"""What makes a completion consistent, whichever wire it came over.

Invariant: whoever reads a wire says what an answer claims (`Sampled`), and nothing becomes a `Completion` but through
the checks here: against the request, and of each part against the others. Nothing is repaired.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..contracts.reasons import FinishReason
from .engines import Completion, LabelSpan, SampleRequest
from .errors import EngineFailure, malformed

_INVENTED_LOGPROB: Final = -9998.0
"""vLLM writes -9999 where it has no logprob."""
_SLACK: Final = 1e-3
"""A logprob may exceed 0 by rounding, not by more."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an answer claims, as it came. `echoed`: the token that each logprob says it belongs to, where it does."""

    token_ids: Any
    logprobs: list[Any]
    echoed: list[Any]
    finish: FinishReason
    spans: tuple[LabelSpan, ...]
    prompt_tokens: Any
    completion_tokens: Any


def completion_of(who: str, request: SampleRequest, sampled: Sampled, vocabulary: int, incarnation: str) -> Completion:
    """The completion, once nothing in it contradicts anything else. Raises EngineFailure where something does."""
    ids = sampled.token_ids
    problem = (
        _token_problem(request, ids, vocabulary)
        or _end_problem(request, ids, sampled.finish)
        or _logprob_problem(ids, sampled.logprobs, sampled.echoed)
        or _span_problem(len(ids), sampled.spans)
    )
    if problem is None and sampled.prompt_tokens != len(request.prompt_ids):
        problem = f"it read {sampled.prompt_tokens} prompt tokens where {len(request.prompt_ids)} were sent"
    if problem is None and sampled.completion_tokens != len(ids):
        problem = f"it counts {sampled.completion_tokens} sampled tokens where it sent {len(ids)}"
    if problem is not None:
        raise inconsistent(who, problem)
    return Completion(
        token_ids=ids,
        logprobs=[float(value) for value in sampled.logprobs],
        finish=sampled.finish,
        spans=sampled.spans,
        incarnation=incarnation,
        usage_prompt=sampled.prompt_tokens,
    )


def inconsistent(who: str, problem: str) -> EngineFailure:
    return malformed(f"{who} answered inconsistently: {problem}")


def impossible(logprobs: Sequence[Any]) -> str | None:
    """What is wrong with logprobs in themselves, if anything is."""
    if not all(type(v) in (int, float) and math.isfinite(v) for v in logprobs):
        return "a logprob is not a finite number"
    if not all(_INVENTED_LOGPROB < v <= _SLACK for v in logprobs):
        return "a logprob is above 0 or a placeholder"
    return None


def _token_problem(request: SampleRequest, ids: object, vocabulary: int, before: int = 0) -> str | None:
    """`before`: how many tokens of the completion came earlier."""
    if not isinstance(ids, list) or not ids:
        return "no tokens"
    if not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        return f"a token id is no whole number in [0, {vocabulary})"
    if before + len(ids) > request.max_tokens:
        return f"{before + len(ids)} tokens where at most {request.max_tokens} were asked for"
    if not set(request.stop_token_ids).isdisjoint(ids[:-1]):
        return "it went on after a stop token"
    return None


def _end_problem(request: SampleRequest, ids: list[int], finish: FinishReason) -> str | None:
    stops = set(request.stop_token_ids)
    if finish is FinishReason.STOP and stops and ids[-1] not in stops:
        return f"it stopped at token {ids[-1]}, which is none of the stop tokens {sorted(stops)}"
    return None


def _logprob_problem(ids: list[int], logprobs: list[Any], echoed: list[Any]) -> str | None:
    if len(logprobs) != len(ids):
        return f"{len(logprobs)} logprobs for {len(ids)} tokens"
    problem = impossible(logprobs)
    if problem is not None:
        return problem
    if any(echo is not None and echo != token for echo, token in zip(echoed, ids, strict=True)):
        return "a logprob belongs to another token than was sampled"
    return None


def _span_problem(tokens: int, spans: tuple[LabelSpan, ...]) -> str | None:
    position = 0
    for span in spans:
        if type(span.start) is not int or type(span.end) is not int or not isinstance(span.label, str):
            return "a version span is not a label with two whole numbers"
        if span.start != position or span.end <= span.start:
            return "version spans do not follow one another"
        position = span.end
    return None if position == tokens else f"version spans cover {position} of {tokens} tokens"


class Grown:
    """What is there of a completion that is streamed: its first tokens, each checked as it was taken."""

    def __init__(self, who: str, request: SampleRequest, vocabulary: int, incarnation: str) -> None:
        self._who = who
        self._request = request
        self._vocabulary = vocabulary
        self._incarnation = incarnation
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: tuple[LabelSpan, ...] = ()

    @property
    def size(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    @property
    def _labelled(self) -> bool:
        """Whether the engine has said which weights sampled each of them."""
        return bool(self._spans) or not self._ids

    def label(self, spans: tuple[LabelSpan, ...]) -> None:
        """Which weights sampled all of it, said after its last token. Raises EngineFailure."""
        problem = _span_problem(self.size, spans)
        if problem is not None:
            raise inconsistent(self._who, problem)
        self._spans = spans

    def take(self, ids: list[int], logprobs: list[Any], echoed: list[Any], spans: tuple[LabelSpan, ...] | None) -> None:
        """The next tokens, at least one; `spans` count from the first of them, or from the completion's first where
        none were said before, and are None where they are said later. Raises EngineFailure where all this contradicts
        itself, the request, or what came before; then nothing of it is taken."""
        late = 0 if self._labelled else self.size
        problem = _token_problem(self._request, ids, self._vocabulary, before=self.size) or _logprob_problem(
            ids, logprobs, echoed
        )
        if problem is None and spans is None and self._spans:
            problem = "it does not say which weights sampled these tokens, as it did before"
        if problem is None and spans is not None:
            problem = _span_problem(len(ids) + late, spans)
        if problem is None and self._ids and self._ids[-1] in self._request.stop_token_ids:
            problem = "it went on after its end"
        if problem is not None:
            raise inconsistent(self._who, problem)
        if spans is not None:
            self._spans = followed(self._spans, spans, self.size - late)
        self._ids += ids
        self._logprobs += map(float, logprobs)

    def partial(self) -> Completion:
        """What is there, at least one token. It has not ended, so its `finish` means no more than that. Without spans
        where the engine says later which weights sampled it."""
        return Completion(
            token_ids=list(self._ids),
            logprobs=list(self._logprobs),
            finish=FinishReason.LENGTH,
            spans=self._spans,
            incarnation=self._incarnation,
            usage_prompt=len(self._request.prompt_ids),
        )


def followed(first: tuple[LabelSpan, ...], then: tuple[LabelSpan, ...], size: int) -> tuple[LabelSpan, ...]:
    """Spans of `size` tokens and of those after them, counted from the first; one label in a row is one span."""
    joined = list(first)
    for span in then:
        start = span.start + size
        if joined and joined[-1].label == span.label:
            start = joined.pop().start
        joined.append(LabelSpan(span.label, start, span.end + size))
    return tuple(joined)
