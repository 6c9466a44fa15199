"""What SGLang answers on its native wire, read and checked: whole, or event by event.

Invariant: as for vLLM's wire, a completion is consistent or it is refused, and a streamed one is the same as one that
came at once. What is special here:

* An end token stays in `output_ids` and has its logprob, whatever is trimmed from the text; an answer in which it does
  not is refused like any other whose counts differ.
* Besides our stop tokens the server stops at end tokens of its own and cannot be told not to (`ignore_eos` would ignore
  ours, too). Such a part has not ended for us: it `goes_on`, and whoever asked samples on from there.
* Which weights sampled which token is said once, at the end. While an answer is streamed it only says what the weights
  are called as the event leaves. Tokens are told of only as long as that is what they were called before the request
  was sent, since then no others can have sampled them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..contracts.reasons import FinishReason
from .answers import failure_in_stream, spans_of
from .checks import Grown, Sampled, completion_of, impossible, inconsistent
from .engines import Completion, LabelSpan, SampleRequest
from .errors import EngineFailure, failure_from_status, malformed, unavailable

_MISSPELT = (KeyError, TypeError, AttributeError, IndexError, ValueError)


@dataclass(frozen=True, slots=True)
class Part:
    """What one request brought. `goes_on`: it stopped at an end token of the server's own, below the limit."""

    completion: Completion
    goes_on: bool


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the answers to one request. `spans`: the server is new enough to say which weights sampled each token; one
    that is not is never loaded while it samples, so that what it calls them at the end holds for all."""

    who: str
    request: SampleRequest
    vocabulary: int
    incarnation: str
    spans: bool

    def part(self, answer: dict[str, Any]) -> Part:
        """Raises EngineFailure where the answer contradicts itself or the request."""
        try:
            meta = answer["meta_info"]
            return self.read(answer["output_ids"], meta["output_token_logprobs"], meta)
        except _MISSPELT as error:
            raise malformed(f"{self.who} left out or misspelt a field of the completion: {error!r}") from None

    def read(self, ids: Any, entries: Any, meta: dict[str, Any]) -> Part:
        finish, foreign = self._finish(meta["finish_reason"], ids)
        sampled = Sampled(
            token_ids=ids,
            logprobs=[entry[0] for entry in entries],
            echoed=[entry[1] for entry in entries],
            finish=finish,
            spans=self._spans(meta, len(ids)),
            prompt_tokens=meta["prompt_tokens"],
            completion_tokens=meta["completion_tokens"],
        )
        completion = completion_of(self.who, self.request, sampled, self.vocabulary, self.incarnation)
        return Part(completion, foreign and len(ids) < self.request.max_tokens)

    def _finish(self, reason: Any, ids: Any) -> tuple[FinishReason, bool]:
        """How it ended, and whether that was at a token which is no end for us."""
        kind = reason["type"]
        if kind == "abort":
            raise aborted(self.who, reason)
        matched = reason.get("matched")
        if kind not in ("stop", "length") or (kind == "stop" and type(matched) is not int):
            raise malformed(f"{self.who} stopped for a reason we do not know: {str(reason)[:80]}")
        last = ids[-1] if isinstance(ids, list) and ids else None
        if kind == "stop" and matched != last:
            raise inconsistent(self.who, f"it stopped at token {matched}, and its last token is {last}")
        if last in self.request.stop_token_ids:  # also where it is the last that the limit had room for
            return FinishReason.STOP, False
        return FinishReason.LENGTH, kind == "stop"

    def _spans(self, meta: dict[str, Any], size: int) -> tuple[LabelSpan, ...]:
        if self.spans or "weight_versions" in meta:
            return spans_of(meta["weight_versions"])
        return (LabelSpan(meta["weight_version"], 0, size),)


class SglangGrowing(Grown):
    """A completion as it is streamed. `label`: what the weights were called before it was asked for.

    An event has all tokens so far, or with the server's `--incremental-streaming-output` those that are new.
    """

    def __init__(self, reader: Reader, label: str) -> None:
        super().__init__(reader.who, reader.request, reader.vocabulary, reader.incarnation)
        self._reader = reader
        self._label = label
        self._all: list[int] = []
        self._entries: list[Any] = []
        self._last: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> None:
        """Raises EngineFailure for an error that the event carries, and for one that contradicts what came before."""
        if event.get("error") is not None:
            raise refused_in_stream(self._who, event["error"])
        try:
            self._add(event["output_ids"], event["meta_info"])
        except _MISSPELT as error:
            raise malformed(f"{self._who} left out or misspelt a field of an event: {error!r}") from None

    def _add(self, ids: list[int], meta: dict[str, Any]) -> None:
        entries, total, known = meta["output_token_logprobs"], meta["completion_tokens"], len(self._all)
        if len(ids) >= total and ids[:known] == self._all:
            ids, entries = ids[known:], entries[known:]
        elif known + len(ids) == total:
            entries = entries[known:] if len(entries) == total else entries
        else:
            raise inconsistent(self._who, f"after {known} tokens it sent {len(ids)} and counts {total}")
        if self._last is not None and ids:
            raise inconsistent(self._who, "it went on after its end")
        if meta["finish_reason"] is None:  # a logprob may come with the next event
            ids = ids[: len(entries)]
            entries = entries[: len(ids)]
        else:
            self._last = meta
        if ids and self.size == known and meta["weight_version"] == self._label:
            span = LabelSpan(self._label, 0, len(ids))
            self.take(ids, [entry[0] for entry in entries], [entry[1] for entry in entries], (span,))
        self._all += ids
        self._entries += entries

    def whole(self) -> Part:
        """Raises EngineFailure where it has no end."""
        if self._last is None:
            raise unavailable(f"{self._who} broke off after {len(self._all)} tokens")
        try:
            return self._reader.read(self._all, self._entries, self._last)
        except _MISSPELT as error:
            raise malformed(f"{self._who} left out or misspelt a field of the completion: {error!r}") from None


def aborted(who: str, reason: dict[str, Any]) -> EngineFailure:
    """Why a request was aborted: for a status that the server would have answered with, or since somebody asked."""
    code, said = reason.get("status_code"), str(reason.get("message") or "no reason given")
    if type(code) is int and 400 <= code < 600:
        return failure_from_status(who, code, {}, said.encode())
    return unavailable(f"{who} aborted the request: {said[:300]}")


def refused_in_stream(who: str, error: Any) -> EngineFailure:
    """The server refuses a streamed request in its first event; older ones say no code, and mean 400."""
    if isinstance(error, dict) and error.get("code") is None:
        error = {"message": error.get("message"), "code": 400}
    return failure_in_stream(who, error)


def read_scores(who: str, prompt_ids: Sequence[int], answer: dict[str, Any]) -> list[float]:
    """The logprob of each prompt token but the first. Raises EngineFailure where one is missing or impossible."""
    try:
        entries = answer["meta_info"]["input_token_logprobs"]
        echoed = [entry[1] for entry in entries]
        logprobs = [entry[0] for entry in entries[1:]]
    except _MISSPELT as error:
        raise malformed(f"{who} did not return a logprob for each prompt token: {error!r}") from None
    problem = None if echoed == list(prompt_ids) else "its logprobs belong to other tokens than were sent"
    problem = problem or impossible(logprobs)
    if problem is not None:
        raise inconsistent(who, problem)
    return [float(value) for value in logprobs]


def read_lead(who: str, answer: dict[str, Any]) -> tuple[tuple[Any, Any], float]:
    """The two likeliest tokens after a prompt, and by how many nats the first of them leads."""
    try:
        (first, one, *_), (second, other, *_) = answer["meta_info"]["output_top_logprobs"][0]
    except _MISSPELT as error:
        raise malformed(f"{who} did not return its two likeliest tokens: {error!r}") from None
    problem = impossible([first, second])
    if problem is not None:
        raise inconsistent(who, problem)
    return (one, other), first - second


def read_labels(who: str, answer: dict[str, Any]) -> set[str]:
    """What it says its weights were called while it answered."""
    try:
        meta = answer["meta_info"]
        return {str(meta["weight_version"]), *(str(span["version"]) for span in meta.get("weight_versions") or ())}
    except _MISSPELT as error:
        raise malformed(f"{who} does not say which weights it answered with: {error!r}") from None
