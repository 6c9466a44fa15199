"""Response bodies, built from calls.

Invariant: `token_ids`, `logprobs.content` and `weight_versions` of a body describe the same tokens. In a streamed event
these are the tokens the event carries, and its spans count from its own first token.
"""

from typing import TYPE_CHECKING, Any

from .calls import Call, Scored
from .wire import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from .scheduler import Engine
    from .server import Served

Body = dict[str, Any]


def generated(call: Call, incarnation: str, start: int = 0, end: int | None = None) -> Body:
    """`/inference/v1/generate`: the tokens from `start` to `end` of a call (None: all, and why it ended)."""
    last = end is None
    end = len(call.tokens) if end is None else end
    logprobs = None
    if call.params.logprobs is not None:
        pairs = zip(call.tokens[start:end], call.logprobs[start:end], strict=True)
        logprobs = {"content": [{"token_id": token, "logprob": value} for token, value in pairs]}
    choice = {
        "index": 0,
        "finish_reason": call.finish_reason if last else None,
        "stop_reason": call.stop_reason if last else None,
        "token_ids": call.tokens[start:end],
        "weight_versions": _spans(call, start, end),
        "sampling_mask": None,
        "logprobs": logprobs,
    }
    body: Body = {"request_id": call.request_id, "call": call.call_id, "incarnation": incarnation}
    if last and call.scored is not None:
        body["prompt_logprobs"] = _prompt_logprobs(call, call.scored)
    return {**body, "usage": _usage(call, end), "choices": [choice]}


def chat(call: Call, message: Body, request: ChatRequest, served: "Served", created: int) -> Body:
    """`/v1/chat/completions`."""
    ended = "tool_calls" if message["tool_calls"] and call.finish_reason == "stop" else call.finish_reason
    logprobs = None
    if request.logprobs:
        content = []
        for token, value in zip(call.tokens, call.logprobs, strict=True):
            text = served.chat.token(token)
            content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
        logprobs = {"content": content}
    choice: Body = {"index": 0, "message": message, "finish_reason": ended, "stop_reason": call.stop_reason}
    choice["logprobs"] = logprobs
    body = _openai(call, "chat.completion", served, created)
    if request.return_token_ids:
        choice["token_ids"] = call.tokens
        body["prompt_token_ids"] = call.prompt
    return {**body, "choices": [choice]}


def completion(call: Call, request: CompletionRequest, served: "Served", created: int) -> Body:
    """`/v1/completions`."""
    choice: Body = {"index": 0, "text": served.chat.text(call.tokens), "finish_reason": call.finish_reason}
    choice["stop_reason"] = call.stop_reason
    choice["logprobs"] = None
    if request.logprobs is not None:
        tokens = [served.chat.token(token) for token in call.tokens]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": call.logprobs, "top_logprobs": None}
    if request.return_token_ids:
        choice["token_ids"] = call.tokens
        choice["prompt_token_ids"] = call.prompt
    return {**_openai(call, "text_completion", served, created), "choices": [choice]}


def metrics(engine: "Engine", model: str) -> str:
    """Prometheus text, under vLLM's names where it has one."""
    label = f'{{model_name="{_escaped(model)}"}}'
    lines: list[str] = []

    def add(name: str, kind: str, value: float, labels: str = label) -> None:
        head = f"# TYPE {name} {kind}"
        lines.extend([head] if head not in lines else [])
        lines.append(f"{name}{labels} {value}")

    add("vllm:num_requests_running", "gauge", engine.running)
    add("vllm:num_requests_waiting", "gauge", engine.waiting)
    add("vllm:prompt_tokens_total", "counter", engine.totals.prompt_tokens)
    add("vllm:generation_tokens_total", "counter", engine.totals.generated_tokens)
    for reason in ("stop", "length", "abort", "error"):
        labels = f'{{model_name="{_escaped(model)}",finished_reason="{reason}"}}'
        add("vllm:request_success_total", "counter", engine.totals.finished[reason], labels)
    add("atropos_engine_paused", "gauge", int(engine.paused))
    labels = f'{{version="{_escaped(engine.version)}",incarnation="{engine.incarnation}"}}'
    add("atropos_engine_weight_info", "gauge", 1, labels)
    return "\n".join(lines) + "\n"


def _openai(call: Call, kind: str, served: "Served", created: int) -> Body:
    head = {"id": call.request_id, "object": kind, "created": created, "model": served.name}
    return {**head, "usage": _usage(call, len(call.tokens))}


def _usage(call: Call, sampled: int) -> Body:
    prompt = len(call.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _prompt_logprobs(call: Call, scored: list[Scored]) -> list[Body | None]:
    """One entry a prompt token; the first has nothing before it. On this wire tokens have no text."""
    entries: list[Body | None] = [None]
    for token, one in zip(call.prompt[1:], scored, strict=True):
        entries.append({str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": None}})
    return entries


def _spans(call: Call, start: int, end: int) -> list[Body]:
    return [
        {"version": span.version, "start": max(span.start, start) - start, "end": min(span.end, end) - start}
        for span in call.spans
        if span.start < end and span.end > start
    ]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
