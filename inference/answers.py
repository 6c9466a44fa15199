"""What an engine answers on vLLM's token wire, read and checked: whole, or event by event.

Invariant: a streamed completion is the same `Completion` as one that came at once. Each event is checked as it comes,
so that a part of it may be kept, and the whole is checked again by the one reader that knows what is consistent.
"""

import json
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any, Final

from ..contracts.reasons import FinishReason
from .checks import Grown, Sampled, completion_of, impossible, inconsistent
from .engines import Completion, LabelSpan, SampleRequest
from .errors import EngineFailure, failure_from_status, malformed, quoted, unavailable

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
        entries = choice["logprobs"]["content"]
        sampled = Sampled(
            token_ids=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in entries],
            echoed=[entry.get("token_id") for entry in entries],
            finish=finish_of(who, choice["finish_reason"]),
            spans=spans_of(choice["weight_versions"]),
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise malformed(f"{who} left out or misspelt a field of the completion: {error!r}") from None
    named = answer.get("incarnation")
    incarnation = named if isinstance(named, str) and named else incarnation
    return completion_of(who, request, sampled, vocabulary, incarnation)


def read_prompt_logprobs(who: str, prompt_ids: Sequence[int], answer: dict[str, Any]) -> list[float]:
    """The logprob of each prompt token but the first. Raises EngineFailure where one is missing or impossible."""
    entries = answer.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(prompt_ids):
        raise malformed(f"{who} did not return a logprob for each prompt token; it may be too old to be probed")
    try:
        logprobs = [entry[str(token)]["logprob"] for token, entry in zip(prompt_ids[1:], entries[1:], strict=True)]
    except (KeyError, TypeError) as error:
        raise malformed(f"{who} left out the logprob of a prompt token: {error!r}") from None
    problem = impossible(logprobs)
    if problem is not None:
        raise inconsistent(who, problem)
    return [float(value) for value in logprobs]


def read_labels(who: str, answer: dict[str, Any]) -> set[str]:
    """The labels under which the tokens of a completion were sampled."""
    try:
        return {str(span["version"]) for span in answer["choices"][0]["weight_versions"]}
    except (KeyError, IndexError, TypeError) as error:
        raise malformed(f"{who} does not say which weights it sampled with: {error!r}") from None


def finish_of(who: str, reason: object) -> FinishReason:
    if reason == "stop":
        return FinishReason.STOP
    if reason == "length":
        return FinishReason.LENGTH
    if reason == "abort":
        raise unavailable(f"{who} aborted the request")
    raise malformed(f"{who} stopped for a reason we do not know: {str(reason)[:40]!r}")


def spans_of(reported: Any) -> tuple[LabelSpan, ...]:
    return tuple(LabelSpan(span["version"], span["start"], span["end"]) for span in reported)


class Growing(Grown):
    """A completion as it is streamed: add events, look at what is there, ask for the whole at the end.

    The dev engine says in each event which weights sampled its tokens, counted from its own first one; vLLM says it
    with the last event, for the whole completion.
    """

    def __init__(self, who: str, request: SampleRequest, vocabulary: int, incarnation: str) -> None:
        super().__init__(who, request, vocabulary, incarnation)
        self._finish: object = None
        self._usage: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> None:
        """Take an event's tokens, logprobs and spans.

        Raises EngineFailure for an error that the event carries, and for an event that contradicts itself, the
        request, or what came before; then nothing of it is taken.
        """
        if event.get("error") is not None:
            raise failure_in_stream(self._who, event["error"])
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
        spans = None if told is None else spans_of(told)
        if ids:
            entries = choice["logprobs"]["content"]
            logprobs = [entry["logprob"] for entry in entries]
            echoed = [entry.get("token_id") for entry in entries]
            if self._finish is not None:
                raise inconsistent(self._who, "it went on after its end")
            self.take(ids, logprobs, echoed, spans)
        elif spans and not self._labelled:
            self.label(spans)
        self._finish = choice.get("finish_reason") or self._finish

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


def failure_in_stream(who: str, error: object) -> EngineFailure:
    """An error after the status line: classified by its code as an answer of that status would be."""
    code = error.get("code") if isinstance(error, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    if type(code) is int and 400 <= code < 600:
        return failure_from_status(who, code, {}, str(said).encode())
    return unavailable(f"{who} broke off with an error: {str(said)[:300]}")
