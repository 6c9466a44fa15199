"""What an engine answers on the token wire, read and checked: whole, or event by event.

Invariant: a streamed completion is the same `Completion` as one that came at once. Each event is checked as it comes,
so that a part of it may be kept, and the whole is checked again by the one reader that knows what is consistent.
"""

import json
import math
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any, Final

from ..contracts.reasons import FinishReason
from .engines import Completion, LabelSpan, SampleRequest
from .errors import EngineFailure, failure_from_status, malformed, quoted, unavailable

_INVENTED_LOGPROB: Final = -9998.0
"""vLLM writes -9999 where it has no logprob."""
_SLACK: Final = 1e-3
"""A logprob may exceed 0 by rounding, not by more."""
_FIELDS: Final = frozenset({b"", b"event", b"id", b"retry"})
"""Of server-sent events, those that say nothing here; an empty one is a comment."""


def read_completion(
    who: str, request: SampleRequest, answer: dict[str, Any], vocabulary: int, incarnation: str
) -> Completion:
    """The completion in an answer. Raises EngineFailure where the answer contradicts itself or the request."""
    try:
        choices, usage = answer["choices"], answer["usage"]
        if len(choices) != 1:
            raise malformed(f"{who} answered with {len(choices)} completions for one request")
        choice = choices[0]
        finish = _finish(who, choice["finish_reason"])
        token_ids = choice["token_ids"]
        entries = choice["logprobs"]["content"]
        spans = tuple(LabelSpan(s["version"], s["start"], s["end"]) for s in choice["weight_versions"])
        prompt_tokens, completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        logprobs = [entry["logprob"] for entry in entries]
        echoed = [entry.get("token_id") for entry in entries]
    except (KeyError, TypeError, AttributeError) as error:
        raise malformed(f"{who} left out or misspelt a field of the completion: {error!r}") from None
    problem = (
        _token_problem(request, token_ids, vocabulary)
        or _end_problem(request, token_ids, finish)
        or _logprob_problem(token_ids, logprobs, echoed)
        or _span_problem(len(token_ids), spans)
    )
    if problem is None and prompt_tokens != len(request.prompt_ids):
        problem = f"it read {prompt_tokens} prompt tokens where {len(request.prompt_ids)} were sent"
    if problem is None and completion_tokens != len(token_ids):
        problem = f"it counts {completion_tokens} sampled tokens where it sent {len(token_ids)}"
    if problem is not None:
        raise malformed(f"{who} answered inconsistently: {problem}")
    named = answer.get("incarnation")
    return Completion(
        token_ids=token_ids,
        logprobs=[float(value) for value in logprobs],
        finish=finish,
        spans=spans,
        incarnation=named if isinstance(named, str) and named else incarnation,
        usage_prompt=prompt_tokens,
    )


def read_prompt_logprobs(who: str, prompt_ids: Sequence[int], answer: dict[str, Any]) -> list[float]:
    """The logprob of each prompt token but the first. Raises EngineFailure where one is missing or impossible."""
    entries = answer.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(prompt_ids):
        raise malformed(f"{who} did not return a logprob for each prompt token; it may be too old to be probed")
    try:
        logprobs = [entry[str(token)]["logprob"] for token, entry in zip(prompt_ids[1:], entries[1:], strict=True)]
    except (KeyError, TypeError) as error:
        raise malformed(f"{who} left out the logprob of a prompt token: {error!r}") from None
    problem = _impossible(logprobs)
    if problem is not None:
        raise malformed(f"{who} answered inconsistently: {problem}")
    return [float(value) for value in logprobs]


def read_labels(who: str, answer: dict[str, Any]) -> set[str]:
    """The labels under which the tokens of a completion were sampled."""
    try:
        return {str(span["version"]) for span in answer["choices"][0]["weight_versions"]}
    except (KeyError, IndexError, TypeError) as error:
        raise malformed(f"{who} does not say which weights it sampled with: {error!r}") from None


def _finish(who: str, reason: object) -> FinishReason:
    if reason == "stop":
        return FinishReason.STOP
    if reason == "length":
        return FinishReason.LENGTH
    if reason == "abort":
        raise unavailable(f"{who} aborted the request")
    raise malformed(f"{who} stopped for a reason we do not know: {str(reason)[:40]!r}")


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
    problem = _impossible(logprobs)
    if problem is not None:
        return problem
    if any(echo is not None and echo != token for echo, token in zip(echoed, ids, strict=True)):
        return "a logprob belongs to another token than was sampled"
    return None


def _impossible(logprobs: list[Any]) -> str | None:
    if not all(type(v) in (int, float) and math.isfinite(v) for v in logprobs):
        return "a logprob is not a finite number"
    if not all(_INVENTED_LOGPROB < v <= _SLACK for v in logprobs):
        return "a logprob is above 0 or a placeholder"
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


class Growing:
    """A completion as it is streamed: add events, look at what is there, ask for the whole at the end.

    The dev engine says in each event which weights sampled its tokens, counted from its own first one. vLLM says it
    with the last event for the whole completion, so that until then its tokens have no version of their own.
    """

    def __init__(self, who: str, request: SampleRequest, vocabulary: int, incarnation: str) -> None:
        self._who = who
        self._request = request
        self._vocabulary = vocabulary
        self._incarnation = incarnation
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[LabelSpan] = []
        self._finish: object = None
        self._usage: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    @property
    def labelled(self) -> bool:
        """Whether the engine has said which weights sampled each of them."""
        return self._covered == self.size

    @property
    def _covered(self) -> int:
        return self._spans[-1].end if self._spans else 0

    def add(self, event: dict[str, Any]) -> None:
        """Take an event's tokens, logprobs and spans.

        Raises EngineFailure for an error that the event carries, and for an event that contradicts itself, the
        request, or what came before; then nothing of it is taken.
        """
        if event.get("error") is not None:
            raise _failure_in_stream(self._who, event["error"])
        try:
            choices = event["choices"]
            if len(choices) > 1:
                raise malformed(f"{self._who} answered with {len(choices)} completions for one request")
            if choices:
                self._add(choices[0])
        except (KeyError, TypeError, AttributeError) as error:
            raise malformed(f"{self._who} left out or misspelt a field of an event: {error!r}") from None
        usage, named = event.get("usage"), event.get("incarnation")
        self._usage = usage if isinstance(usage, dict) else self._usage
        self._incarnation = named if isinstance(named, str) and named else self._incarnation

    def _add(self, choice: dict[str, Any]) -> None:
        ids = choice["token_ids"] or []
        told = choice["weight_versions"] if ids else choice.get("weight_versions")
        spans = tuple(LabelSpan(s["version"], s["start"], s["end"]) for s in told or ())
        logprobs: list[float] = []
        problem = None
        if ids and told is None and self._spans:
            raise malformed(f"{self._who} left out or misspelt a field of an event: no versions after those before")
        if ids:
            entries = choice["logprobs"]["content"]
            logprobs = [entry["logprob"] for entry in entries]
            echoed = [entry.get("token_id") for entry in entries]
            problem = _token_problem(self._request, ids, self._vocabulary, before=self.size) or _logprob_problem(
                ids, logprobs, echoed
            )
            if problem is None and (self._finish is not None or self._ended):
                problem = "it went on after its end"
        of_all = not self.labelled
        if problem is None and told is not None and (ids or of_all):
            problem = _span_problem(len(ids) + (self.size if of_all else 0), spans)
        if problem is not None:
            raise malformed(f"{self._who} answered inconsistently: {problem}")
        self._join(spans, 0 if of_all else self.size)
        self._ids += ids
        self._logprobs += map(float, logprobs)
        self._finish = choice.get("finish_reason") or self._finish

    @property
    def _ended(self) -> bool:
        return bool(self._ids) and self._ids[-1] in self._request.stop_token_ids

    def _join(self, spans: tuple[LabelSpan, ...], first: int) -> None:
        """Append spans that count from the completion's token `first`; one label in a row is one span."""
        for span in spans:
            start, end = span.start + first, span.end + first
            if self._spans and self._spans[-1].label == span.label:
                start = self._spans.pop().start
            self._spans.append(LabelSpan(span.label, start, end))

    def partial(self, label: str | None = None) -> Completion:
        """What is there, at least one token. It has not ended, so its `finish` means no more than that.

        `label`: what sampled all of it, where the engine has not said so.
        """
        spans = tuple(self._spans) if label is None else (LabelSpan(label, 0, self.size),)
        return Completion(
            token_ids=list(self._ids),
            logprobs=list(self._logprobs),
            finish=FinishReason.LENGTH,
            spans=spans,
            incarnation=self._incarnation,
            usage_prompt=len(self._request.prompt_ids),
        )

    def whole(self) -> Completion:
        """The completion, read as an answer that came at once. Raises EngineFailure where it has no end."""
        if self._finish is None:
            raise unavailable(f"{self._who} broke off after {self.size} tokens")
        counts = {"prompt_tokens": len(self._request.prompt_ids), "completion_tokens": self.size}
        choice = {
            "finish_reason": self._finish,
            "token_ids": self._ids,
            "logprobs": {"content": [{"logprob": value} for value in self._logprobs]},
            "weight_versions": [{"version": s.label, "start": s.start, "end": s.end} for s in self._spans],
        }
        answer = {"choices": [choice], "usage": self._usage or counts, "incarnation": self._incarnation}
        return read_completion(self._who, self._request, answer, self._vocabulary, self._incarnation)


async def events(who: str, chunks: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to `[DONE]` or its end. Half a line is no event.

    Raises EngineFailure (malformed) where what came is no such stream at all.
    """
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.strip().partition(b":")
            if name == b"data":
                if value.strip() == b"[DONE]":
                    return
                yield _event(who, value)
            elif name not in _FIELDS:
                raise _no_event(who, line)
    name, colon, _ = rest.strip().partition(b":")
    if not any(field == name if colon else field.startswith(name) for field in (b"data", *_FIELDS)):
        raise _no_event(who, rest)


def _no_event(who: str, line: bytes) -> EngineFailure:
    return malformed(f"{who} sent something that is no event where it should stream: {quoted(line)}")


def _event(who: str, data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise malformed(f"{who} sent an event that is not JSON: {quoted(data)}") from None
    if not isinstance(event, dict):
        raise malformed(f"{who} sent an event that is no JSON object: {quoted(data)}")
    return event


def _failure_in_stream(who: str, error: object) -> EngineFailure:
    """An error after the status line: classified by its code as an answer of that status would be."""
    code = error.get("code") if isinstance(error, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    if type(code) is int and 400 <= code < 600:
        return failure_from_status(who, code, {}, str(said).encode())
    return unavailable(f"{who} broke off with an error: {str(said)[:300]}")
