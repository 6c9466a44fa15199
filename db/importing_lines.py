"""Lines of JSON as other programs write them, turned into groups: those of the original Atropos, chats, pairs.

Invariant: a line becomes a group whole or is refused with the reason (`BadLine`); what it lacks is not invented. Token
ids are kept only where the file has the log-probability of each token that the policy is said to have sampled, and
where its masks name as many stretches as there are messages; else the conversation is kept without ids. Nothing is lost
by that, since whoever stores the group stores the line's bytes beside it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any, Final

from ..contracts.messages import Message, assistant, user
from ..contracts.numbers import LARGEST, why_no_number
from ..contracts.reasons import FinishReason, StopReason
from ..contracts.records import BadRecord, CallRecord, TurnRecord, VersionSpan
from .importing_messages import BadLine, Conversation, joined, messages_of, shown, taken_apart

IMPORTED: Final = "imported"
"""What stands for an engine, its life, its weights and the scorer, none of which a file names."""
LONGEST: Final = 256 * 1024 * 1024
"""Bytes of a line; Postgres takes no JSON string that is longer."""
_UNMASKED: Final = -100
_ABOVE_ANY: Final = 1e-3
"""Log-probabilities are at most 0 but for rounding; the original writes 1.0 where it has none."""

Decode = Callable[[Sequence[int]], str]


class Tokens(StrEnum):
    """Whether an episode's ids were kept, and why not."""

    KEPT = "kept"
    NONE = "none"
    """The file has no ids."""
    NO_LOGPROBS = "no_logprobs"
    NO_MATCH = "no_match"
    """Its masks name other stretches than there are messages."""


@dataclass(frozen=True, slots=True)
class Member:
    """One episode of a group."""

    prompt: tuple[Message, ...]
    turns: tuple[TurnRecord, ...]
    calls: tuple[CallRecord, ...]
    stop: StopReason
    reward: float | None
    tokens: Tokens

    @property
    def sampled(self) -> int:
        return sum(len(turn.sampled) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Line:
    """A group and the bytes it was read from."""

    members: tuple[Member, ...]
    raw: bytes
    score: str
    """What the file calls the number that became the reward."""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha256(self.raw).hexdigest())

    @property
    def mean_reward(self) -> float | None:
        scored = [member.reward for member in self.members if member.reward is not None]
        return fmean(scored) if scored else None


def parse_line(raw: bytes, decode: Decode | None = None) -> Line:
    """Read a line. `decode` turns ids into text where there are no messages. Raises BadLine."""
    if len(raw) > LONGEST:
        raise BadLine(f"it is longer than {LONGEST >> 20} MiB, which is more than a row can hold")
    document = _document(raw)
    try:
        if "tokens" in document:
            return _scored_data(document, raw, decode)
        if "chosen" in document and "rejected" in document:
            return _pair(document, raw)
        chats = document.get("messages")
        if isinstance(chats, list) and chats and all(isinstance(one, list) for one in chats):
            return _group_of_chats(document, raw)
        return _chat(document, raw)
    except BadRecord as error:
        raise BadLine(str(error)) from None


def _document(raw: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadLine(f"it is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise BadLine("it is nested too deeply to be read") from None
    except ValueError as error:
        raise BadLine(f"it is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise BadLine(f"it is {shown(document)}, not a JSON object")
    return document


def _number(value: object, where: str) -> float | None:
    """A finite number; null stays null, which is not 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLine(f"{where} is {shown(value)}, not a number")
    problem = why_no_number(value)
    if problem is not None:
        raise BadLine(f"{where} is {shown(value)}; {problem}")
    return float(value)


def _score_of(document: Mapping[str, Any]) -> tuple[str, float | None]:
    name = next((name for name in ("reward", "score") if name in document), "reward")
    return name, _number(document.get(name), name)


# --- chats, answers and pairs ---------------------------------------------------------------------------------------


def _chat(document: Mapping[str, Any], raw: bytes) -> Line:
    name, reward = _score_of(document)
    if "messages" in document:
        conversation = taken_apart(messages_of(document["messages"], "messages"))
    elif "prompt" in document and "completion" in document:
        prompt, completion = (_spoken(document[part], part) for part in ("prompt", "completion"))
        conversation = joined(prompt, completion)
    else:
        known = ", ".join(sorted(map(str, document))) or "none"
        raise BadLine(
            "it has neither tokens with scores, nor messages, nor prompt with completion, nor chosen with rejected "
            f"(its fields: {shown(known)})"
        )
    return Line((_untokenised(conversation, reward, Tokens.NONE),), raw, name)


def _pair(document: Mapping[str, Any], raw: bytes) -> Line:
    """Which one was preferred is what such a line says; without rewards that is the score: 1 and 0."""
    answers = [_spoken(document[name], name) for name in ("chosen", "rejected")]
    if "prompt" in document:
        prompt = _spoken(document["prompt"], "prompt")
        answers = [one[len(prompt) :] if prompt and one[: len(prompt)] == prompt else one for one in answers]
    else:
        prompt = _shared(*answers)
        answers = [one[len(prompt) :] for one in answers]
    rewards = [
        _first(document, (f"{name}_reward", f"{name}_score", f"score_{name}")) for name in ("chosen", "rejected")
    ]
    score = "reward"
    if rewards == [None, None]:
        rewards, score = [1.0, 0.0], "preferred"
    members = [
        _untokenised(joined(prompt, answer), reward, Tokens.NONE)
        for answer, reward in zip(answers, rewards, strict=True)
    ]
    return Line(tuple(members), raw, score)


def _spoken(value: object, part: str) -> list[Message]:
    """A text stands for one message: the user's where it is the prompt."""
    if isinstance(value, str):
        return [user(value) if part == "prompt" else assistant(value)]
    return messages_of(value, part)


def _shared(first: list[Message], second: list[Message]) -> list[Message]:
    """What both begin with; the first assistant message in which they differ begins the answers."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return first[:same]


def _first(document: Mapping[str, Any], names: Sequence[str]) -> float | None:
    return next((_number(document[name], name) for name in names if name in document), None)


def _group_of_chats(document: Mapping[str, Any], raw: bytes) -> Line:
    chats = document["messages"]
    name = "scores" if "scores" in document else "rewards"
    scores = _scores(document.get(name, [None] * len(chats)), name, len(chats), "messages")
    return Line(
        tuple(
            _untokenised(taken_apart(messages_of(chat, f"messages[{index}]")), score, Tokens.NONE)
            for index, (chat, score) in enumerate(zip(chats, scores, strict=True))
        ),
        raw,
        "score",
    )


# --- groups of the original Atropos ---------------------------------------------------------------------------------


def _scored_data(document: Mapping[str, Any], raw: bytes, decode: Decode | None) -> Line:
    if isinstance(document["tokens"], list) and document["tokens"] and not isinstance(document["tokens"][0], list):
        document = _as_group(document)
    tokens = _lists(document["tokens"], "tokens")
    if not tokens:
        raise BadLine("the group is empty: there is nothing in its tokens")
    size = len(tokens)
    masks = _lists(document.get("masks"), "masks", size)
    scores = _scores(document.get("scores"), "scores", size, "tokens")
    logprobs = _optional(document, "inference_logprobs", size)
    chats = _optional(document, "messages", size)
    members = []
    for index in range(size):
        where = f"[{index}]"
        stretches = _stretches(tokens[index], masks[index], where)
        given = _logprobs(logprobs[index], len(tokens[index]), stretches, where)
        conversation = _conversation(chats[index], tokens[index], stretches, decode, where)
        temperature = _temperature(document, index)
        members.append(_member(conversation, tokens[index], stretches, given, scores[index], temperature))
    return Line(tuple(members), raw, "score")


def _as_group(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """An item of the original is a group of one."""
    names = {"tokens": "tokens", "masks": "masks", "scores": "scores", "messages": "messages"}
    names |= {"inference_logprobs": "inference_logprobs", "overrides": "overrides"}
    alone = {name: [item[name]] for name in names if item.get(name) is not None}
    return {**item, **alone}


def _lists(value: object, where: str, size: int | None = None) -> list[list[int]]:
    if not isinstance(value, list):
        raise BadLine(f"{where} is {shown(value)}, not a list with one list a sequence")
    _same(where, len(value), size)
    for index, one in enumerate(value):
        if not isinstance(one, list) or not set(map(type, one)) <= {int}:
            raise BadLine(f"{where}[{index}] is {shown(one)}, not a list of whole numbers")
    return value


def _same(where: str, count: int, size: int | None, of: str = "tokens") -> None:
    if size is not None and count != size:
        raise BadLine(f"{where} has {count} entries and {of} {size}; a group has one of each for every sequence")


def _scores(value: object, where: str, size: int, of: str) -> list[float | None]:
    if not isinstance(value, list):
        raise BadLine(f"{where} is {shown(value)}, not a list of numbers")
    _same(where, len(value), size, of)
    return [_number(one, f"{where}[{index}]") for index, one in enumerate(value)]


def _optional(document: Mapping[str, Any], name: str, size: int) -> list[Any]:
    value = document.get(name)
    if value is None or value == []:
        return [None] * size
    if not isinstance(value, list):
        raise BadLine(f"{name} is {shown(value)}, not a list with one entry a sequence")
    _same(name, len(value), size)
    return value


def _stretches(ids: list[int], mask: list[int], where: str) -> list[tuple[int, int]]:
    """Where the mask lets tokens train, as [start, end): what the policy said."""
    if not ids:
        raise BadLine(f"tokens{where} is empty: there is nothing in the sequence")
    if len(mask) != len(ids):
        raise BadLine(f"masks{where} has {len(mask)} entries and tokens{where} {len(ids)}; they must be equally long")
    found: list[tuple[int, int]] = []
    start = None
    for place, (token, label) in enumerate(zip(ids, mask, strict=True)):
        if not 0 <= token < 2**31:
            raise BadLine(f"tokens{where}[{place}] is {shown(token)}: no token has such an id")
        if label == _UNMASKED:
            if start is not None:
                found.append((start, place))
                start = None
            continue
        if label != token:
            raise BadLine(
                f"masks{where}[{place}] is {shown(label)}; it must be {_UNMASKED}, or {token}, the token at that place"
            )
        start = place if start is None else start
    return found if start is None else [*found, (start, len(ids))]


def _logprobs(value: object, length: int, stretches: Sequence[tuple[int, int]], where: str) -> list[float] | None:
    """The log-probabilities of all tokens where each that was sampled has one, else None."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) != length:
        count = len(value) if isinstance(value, list) else shown(value)
        raise BadLine(f"inference_logprobs{where} has {count} entries and tokens{where} {length}")
    for start, end in stretches:
        for place in range(start, end):
            one = value[place]
            if one is None or one is True:
                return None
            if not isinstance(one, int | float):
                raise BadLine(f"inference_logprobs{where}[{place}] is {shown(one)}, not a number")
            if (problem := why_no_number(one)) is not None:
                raise BadLine(f"inference_logprobs{where}[{place}] is {shown(one)}; {problem}")
            if one > _ABOVE_ANY:
                return None
    return value


def _conversation(
    chat: object, ids: list[int], stretches: Sequence[tuple[int, int]], decode: Decode | None, where: str
) -> Conversation:
    said = None if chat is None else messages_of(list(chat) if isinstance(chat, tuple) else chat, f"messages{where}")
    if said and any(one.role == "assistant" for one in said):
        return taken_apart(said, len(stretches))
    if decode is None:
        lacks = "has no messages" if not said else "has messages in which no assistant speaks"
        raise BadLine(f"sequence {where} {lacks}; name its tokenizer with --tokenizer, so that its tokens can be read")
    if not stretches:
        raise BadLine(f"masks{where} lets no token train, so nothing is known to have been said")
    prompt = [user(decode(ids[: stretches[0][0]]))] if stretches[0][0] else []
    spoken: list[Message] = []
    for (start, end), (after, _) in zip(stretches, [*stretches[1:], (0, 0)], strict=True):
        spoken.append(assistant(decode(ids[start:end])))
        spoken += [user(decode(ids[end:after]))] if after > end else []
    return joined(prompt, spoken)


def _temperature(document: Mapping[str, Any], index: int) -> float:
    """That of the sequence, the group or the request; 1 where none says so."""
    each = document.get("overrides")
    own = each[index] if isinstance(each, list) and index < len(each) else None
    for place in (own, document.get("group_overrides"), document.get("generation_params")):
        value = place.get("temperature") if isinstance(place, Mapping) else None
        if isinstance(value, int | float) and 0 <= value <= LARGEST:
            return float(value)
    return 1.0


# --- members --------------------------------------------------------------------------------------------------------


def _member(
    conversation: Conversation,
    ids: list[int],
    stretches: Sequence[tuple[int, int]],
    logprobs: list[float] | None,
    reward: float | None,
    temperature: float,
) -> Member:
    if len(stretches) != len(conversation.said):
        return _untokenised(conversation, reward, Tokens.NO_MATCH, temperature)
    if logprobs is None:
        return _untokenised(conversation, reward, Tokens.NO_LOGPROBS, temperature)
    turns, before = [], 0
    for index, (said, (start, end)) in enumerate(zip(conversation.said, stretches, strict=True)):
        spans = (VersionSpan(IMPORTED, 0, 0, end - start),)
        sampled, likely = ids[start:end], [float(one) for one in logprobs[start:end]]
        turns.append(_turn(index, said.message, temperature, ids[before:start], sampled, likely, spans))
        before = end
    calls = tuple(call for said in conversation.said for call in said.calls)
    return Member(conversation.prompt, tuple(turns), calls, conversation.stop, reward, Tokens.KEPT)


def _untokenised(conversation: Conversation, reward: float | None, why: Tokens, temperature: float = 1.0) -> Member:
    turns = tuple(_turn(index, said.message, temperature) for index, said in enumerate(conversation.said))
    calls = tuple(call for said in conversation.said for call in said.calls)
    return Member(conversation.prompt, turns, calls, conversation.stop, reward, why)


def _turn(
    index: int,
    message: Message,
    temperature: float,
    delta: Sequence[int] = (),
    sampled: Sequence[int] = (),
    logprobs: Sequence[float] = (),
    spans: tuple[VersionSpan, ...] = (),
) -> TurnRecord:
    return TurnRecord(
        turn=index,
        segment=0,
        opens_segment=index == 0,
        agent=message.agent,
        message=message,
        prompt_delta=list(delta),
        sampled=list(sampled),
        logprobs=list(logprobs),
        mask=[1] * len(sampled),
        finish=FinishReason.STOP,
        spans=spans,
        temperature=temperature,
        engine_id=IMPORTED,
        incarnation=IMPORTED,
        request_id=IMPORTED,
    )
