"""SGLang's wire as its servers write it (0.5.23, and 0.5.9 where that differs), for a small server to replay."""

import json
from collections.abc import Callable
from typing import Any

from atropos.contracts.engines import EngineKind
from atropos.contracts.reasons import FinishReason
from atropos.contracts.sampling import Sampling
from atropos.inference import sglang
from atropos.inference.engines import Completion, EngineAddress, LabelSpan, SampleRequest
from atropos.inference.errors import EngineFailure
from atropos.inference.sglang import SglangEngine

from .servers import Answer, Seen, serving

NEW, OLD = "0.5.23", "0.5.9"
REFUSED = {"error": {"message": "The input (600 tokens) is longer than the model's context length (512 tokens)."}}
REPEATED = {"error": {"message": "Duplicate request ID detected: r-1/part/0/"}}
UNAUTHORIZED = {"error": "Unauthorized"}
BUSY = {"object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503}
OUT_OF_TIME = {
    "object": "error",
    "message": "Request waiting timeout reached.",
    "type": "503",
    "param": None,
    "code": 503,
}


def server_info(version: str = NEW, seed: int = 318905112, **changes: Any) -> dict[str, Any]:
    """The part of `/server_info` that is looked at, and some of what is not."""
    info = {
        "model_path": "/models/policy",
        "tp_size": 1,
        "random_seed": seed,
        "weight_version": "default",
        "preferred_sampling_params": None,
        "incremental_streaming_output": False,
        "max_total_num_tokens": 87210,
        "max_req_input_len": 506,
        "internal_states": [{"last_gen_throughput": 0.0, "memory_usage": {"weight": 1.13, "kvcache": 9.2}}],
        "version": version,
    }
    if version == NEW:
        info |= {
            "startup_time": {"load_weight": 2.217, "scheduler_e2e": 9.004, "tokenizer_e2e": 11.52},
            "frontend": "python",
        }
    return info | changes


def model_info(label: str) -> dict[str, Any]:
    return {
        "model_path": "/models/policy",
        "tokenizer_path": "/models/policy",
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": label,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
    }


def spans(labels: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for position, label in enumerate(labels):
        if found and found[-1]["version"] == label:
            found[-1]["end"] = position + 1
        else:
            found.append({"version": label, "start": position, "end": position + 1})
    return found


def generated(
    seen: Seen,
    ids: list[int],
    labels: list[str],
    finish: dict[str, Any] | None,
    *,
    version: str = NEW,
    since: int = 0,
    **meta: Any,
) -> dict[str, Any]:
    """An answer, or with `finish` None an event: tokens from `since`, each with the logprob -id/8; `labels`: the name
    of the weights that sampled each, the last being what the server calls them now."""
    sent = seen.json
    about: dict[str, Any] = {
        "id": sent.get("rid", "4f1c0de2"),
        "finish_reason": finish,
        "prompt_tokens": len(sent["input_ids"]),
        "weight_version": labels[-1],
        "input_token_logprobs": [],
        "output_token_logprobs": [[-token / 8, token, None] for token in ids[since:]],
        "completion_tokens": len(ids),
        "cached_tokens": 0,
    }
    if version == NEW:
        about |= {"num_retractions": 0, "reasoning_tokens": 0, "output_token_logprobs_length": len(ids)}
    else:
        about |= {"total_retractions": 0}
    if finish is not None:
        about |= {"e2e_latency": 0.213} | ({"weight_versions": spans(labels[: len(ids)])} if version == NEW else {})
    return {"text": "some text", "output_ids": ids[since:], "meta_info": about | meta}


def stopped(token: int) -> dict[str, Any]:
    return {"type": "stop", "matched": token}


def cut(length: int) -> dict[str, Any]:
    return {"type": "length", "length": length}


def aborted(code: int | None = None, message: str = "Aborted") -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": code, "err_type": None}


def stream(*events: Any, done: bool = True, **answer: Any) -> Answer:
    said = [json.dumps(one) for one in events] + (["[DONE]"] if done else [])
    body = b"".join(f"data: {one}\n\n".encode() for one in said)
    return Answer(body=body, headers={"content-type": "text/event-stream"}, **answer)


def engine(
    generate: Callable[[Seen], Answer], *, label: str = "v3", info: dict[str, Any] | None = None
) -> Callable[[Seen], Answer]:
    """A server whose other routes are in order and whose completions are `generate`'s."""

    def answer(seen: Seen) -> Answer:
        if seen.path == "/model_info":
            return Answer(body=model_info(label))
        if seen.path == "/server_info":
            return Answer(body=info or server_info())
        assert (seen.method, seen.path) == ("POST", "/generate"), seen.path
        return generate(seen)

    return answer


REQUEST = SampleRequest("r-1", [1, 5, 6], Sampling(temperature=0.7, max_tokens=9), 8, (2,), seed=11)
IDS = [7, 8, 9, 7, 2]
LABELS = ["v3", "v3", "v4", "v4", "v4"]


def engine_at(url: str, api_key: str | None = None) -> SglangEngine:
    return SglangEngine(EngineAddress("a", EngineKind.SGLANG, url, 8, api_key), vocabulary=100)


async def drawn(
    generate: Callable[[Seen], Answer], request: SampleRequest = REQUEST, *, streamed: bool = False, **about: Any
) -> tuple[Completion | EngineFailure, list[Completion], list[Any]]:
    """What became of a call, what was told of it, and the requests for tokens that were sent."""
    told: list[Completion] = []

    async def progress(partial: Completion) -> None:
        told.append(partial)

    async with serving(engine(generate, **about)) as server:
        client = engine_at(server.url)
        got: Completion | EngineFailure
        try:
            got = await client.sample(request, progress if streamed else None)
        except EngineFailure as failure:
            got = failure
        await client.close()
    return got, told, [seen.json for seen in server.seen if seen.path == "/generate"]


def whole(seen: Seen, **meta: Any) -> Answer:
    return Answer(body=generated(seen, IDS, LABELS, stopped(2), **meta))


def completion_of(got: Completion | EngineFailure) -> Completion:
    assert isinstance(got, Completion), got
    return got


def failure_of(got: Completion | EngineFailure) -> EngineFailure:
    assert isinstance(got, EngineFailure), got
    return got


WHOLE = Completion(
    IDS,
    [-token / 8 for token in IDS],
    FinishReason.STOP,
    (LabelSpan("v3", 0, 2), LabelSpan("v4", 2, 5)),
    sglang.life_of(server_info()),
    3,
)
