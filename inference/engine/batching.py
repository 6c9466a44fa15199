"""transformers' continuous batching, with our sampling, our attention and an exact stop.

Invariant: `halt` returns at a step boundary: every token sampled before it has been recorded, none is sampled after it,
and no key or value computed before it is used after the next `start`. There is no prefix cache, so nothing computed
under old weights can be found again under new ones.

The library schedules, pages and computes; three of its seams are used: the attention interface, the method of the model
runner that samples, and the router that delivers results.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import stream_context

from . import attention
from .calls import Call, Scored
from .sampling import draw

PAGE = 32
"""Tokens of a cache page. Sequences here are short; a page is the unit in which cache is wasted."""

Sampled = tuple[Call, int, float]
"""A call, the token just sampled for it, and the token's logprob."""


class Unsupported(Exception):
    """A model or library that this engine cannot run, as one sentence."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Sizes of the batcher: sequences and new tokens computed in a step, tokens whose keys and values fit in memory."""

    sequences: int
    step_tokens: int
    cache_tokens: int


class Batcher:
    """Feeds calls to transformers' continuous batching and reports each token.

    `on_step` receives the tokens of a step, in the thread that samples. `on_failure` receives a call and a reason, also
    there. `calls` maps the ids under which the library knows a call to the call.
    """

    def __init__(
        self,
        model: Any,
        limits: BatchLimits,
        on_step: Callable[[list[Sampled]], None],
        on_failure: Callable[[Call, str], None],
    ) -> None:
        """Raises Unsupported if the model's attention is not full attention."""
        self.calls: dict[str, Call] = {}
        self._halting = False
        self._on_failure = on_failure
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=limits.cache_tokens // PAGE,
            max_batch_tokens=limits.step_tokens,
            max_requests_per_batch=limits.sequences,
            max_blocks_per_request=0,
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=False,
            return_logprobs=True,
        )
        plain = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1)
        self._manager = _Manager(model, plain, config, _Router(self._failed), self.calls, on_step)

    def start(self) -> None:
        """Begin stepping, with an empty cache."""
        self._halting = False
        with torch.inference_mode():
            self._manager.start()

    def halt(self) -> None:
        """Stop at the next step boundary and forget all calls and their cache. Blocks until the step is over."""
        self._halting = True
        self._manager.stop(block=True, hard_stop=True, keep_for_next_session=True)
        self.calls.clear()

    def add(self, call: Call) -> None:
        """Queue a call: its prompt and what was sampled so far are computed anew, then it goes on."""
        call.feeds += 1
        name = f"{call.call_id}.{call.feeds}"
        self.calls[name] = call
        self._manager.add_request(
            [*call.prompt, *call.tokens],
            request_id=name,
            max_new_tokens=call.budget - len(call.tokens),
            eos_token_id=sorted(call.stop_ids),
        )

    def drop(self, call: Call) -> None:
        """Stop computing for a call; a token already being sampled for it is thrown away unrecorded."""
        name = f"{call.call_id}.{call.feeds}"
        if self.calls.pop(name, None) is not None:
            self._manager.cancel_request(name)

    @property
    def alive(self) -> bool:
        """Whether the stepping thread runs."""
        return bool(self._manager.is_running())

    @property
    def running(self) -> int:
        """Calls that have begun, that is, hold cache."""
        processor = self._manager.batch_processor
        return 0 if processor is None or not self.alive else len(processor.scheduler.active_requests)

    def _failed(self, name: str, reason: str) -> None:
        call = self.calls.pop(name, None)
        if call is not None and not self._halting:
            self._on_failure(call, reason)


class _Router(OutputRouter):  # type: ignore[misc]
    """Drops the library's own results, which the runner has reported already, and passes failures on."""

    def __init__(self, failed: Callable[[str, str], None]) -> None:
        super().__init__()
        self._failed = failed

    def deliver(self, output: Any) -> None:
        if output.error is not None:
            self._failed(output.request_id, output.error)

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)


class _Manager(ContinuousBatchingManager):  # type: ignore[misc]
    """The library's manager with our attention, router and runner in place."""

    def __init__(
        self,
        model: Any,
        generation: GenerationConfig,
        config: ContinuousBatchingConfig,
        router: _Router,
        calls: dict[str, Call],
        on_step: Callable[[list[Sampled]], None],
    ) -> None:
        super().__init__(model, generation, config)
        self.output_router = router
        self._calls = calls
        self._on_step = on_step

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        del auto_switch_to_flash
        model.set_attn_implementation(attention.NAME)

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        if not isinstance(processor.model_runner, _Runner):
            runner = processor.model_runner
            names = [name for name in inspect.signature(ModelRunner.__init__).parameters if name != "self"]
            processor.model_runner = _Runner(**{name: getattr(runner, name) for name in names})
            processor.model_runner.watch(self._calls, self._on_step)
        return processor


class _Runner(ModelRunner):  # type: ignore[misc]
    """The library's model runner; samples with each call's own parameters and reports what it sampled."""

    def watch(self, calls: dict[str, Call], on_step: Callable[[list[Sampled]], None]) -> None:
        self._calls = calls
        self._on_step = on_step

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        pieces = []
        query = key = 0
        for request in self.inputs_and_outputs.requests_in_batch:
            queries, keys = request.query_length, request.state.position_offset
            pieces.append(attention.Piece(query, queries, key, keys))
            query, key = query + queries, key + keys
        with stream_context(self.inputs_and_outputs.compute_stream):
            ragged = attention.layout(pieces, model.device)
            # Without earlier keys the library reads nothing back: what was just written is then all there is.
            stored = batch_data["read_index"][0]
            stored = stored if stored.numel() else batch_data["write_index"][0]
            batch_data["read_index"] = [stored[ragged.read]]
        batch_data["ragged"] = ragged
        self._model = model
        super().compute_batch(model, batch_data)

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        requests = [r for r in self.inputs_and_outputs.requests_in_batch if r.has_new_token]
        calls = [self._calls.get(request.state.request_id) for request in requests]
        rows = [row for row, call in enumerate(calls) if call is not None]
        wanted = [call for call in calls if call is not None]
        count = len(calls)
        output_ids[:, :count].zero_()
        if not wanted:
            return
        chosen = scores[0, :count] if len(rows) == count else scores[0, rows]
        tokens, logprobs = draw(chosen, [c.params for c in wanted], [c.dice.random() for c in wanted])
        output_ids[0, rows] = tokens.to(torch.int32)
        for call in wanted:
            if call.params.prompt_logprobs is not None and call.scored is None:
                call.scored = score(self._model, call.prompt)
        self._on_step(list(zip(wanted, tokens.tolist(), logprobs.tolist(), strict=True)))


@torch.inference_mode()
def score(model: Any, prompt: list[int]) -> list[Scored]:
    """Every token of a prompt but the first, by one forward pass of its own beside the paged cache.

    Within a step, so that weights cannot change between it and the token that the same step samples.
    """
    ids = torch.tensor([prompt], device=model.device)
    places = torch.arange(len(prompt), device=model.device).unsqueeze(0)
    alone = attention.layout([attention.Piece(0, len(prompt), 0, len(prompt))], model.device)
    scores = model(input_ids=ids, position_ids=places, use_cache=False, ragged=alone).logits[0, :-1]
    logprobs = torch.log_softmax(scores.float(), dim=-1)
    own = logprobs.gather(1, ids[0, 1:].unsqueeze(1))
    ranks = (logprobs > own).sum(dim=-1) + 1
    return [Scored(*pair) for pair in zip(own.squeeze(1).tolist(), ranks.tolist(), strict=True)]


def check_model(config: Any) -> None:
    """Raises Unsupported for a model with other than full attention, whose cache is laid out differently."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "sliding_window", None) and getattr(config, "layer_types", None) is None:
        kinds.add("sliding_attention")
    if kinds != {"full_attention"}:
        raise Unsupported(f"The dev engine serves models with full attention; this one has {', '.join(sorted(kinds))}.")
