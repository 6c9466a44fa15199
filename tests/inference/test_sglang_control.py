"""Publishing to SGLang, replayed: what is asked in which order, what is believed, and what a failure leaves behind."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from atropos.contracts.engines import EngineKind
from atropos.inference.connect import connect_control
from atropos.inference.control import UNVERSIONED, EngineControl, publish
from atropos.inference.engines import EngineAddress, WeightInfo
from atropos.inference.errors import EngineFailure, EngineFailureKind
from atropos.inference.probe import Probe, Verdict, judge, judge_checksums, noise_of
from atropos.inference.sglang import life_of
from atropos.inference.sglang_control import SglangControl
from atropos.tests.inference import sglang_wire as wire
from atropos.tests.inference.servers import Answer, Seen, serving

SEQUENCES = ((4, 5, 6), (7, 8, 9, 4))
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}
LOADED = "Succeeded to update model weights. Weight version updated to {}."
MISSING = {
    "success": False,
    "message": "Failed to get weights iterator: Cannot find any model weights.",
    "num_paused_requests": 0,
}
LOGPROBS = {"/models/policy": -0.5, "/w/1": -0.75, "/w/2": -1.25}


@dataclass
class Replay:
    """A server that remembers what it was told. `scaled`: logprobs are those after temperature, as they should be."""

    version: str = wire.NEW
    scaled: bool = True
    lead: float = 3.0
    load: Callable[[Seen], Answer] | None = None
    label: str = "default"
    path: str = "/models/policy"
    paused: bool = False
    seed: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the answer to a scored sequence."""

    def answer(self, seen: Seen) -> Answer:
        routes = {
            "/model_info": lambda: wire.model_info(self.label),
            "/server_info": lambda: wire.server_info(self.version, self.seed),
            "/pause_generation": lambda: self._paused(seen.json["mode"]),
            "/continue_generation": self._continued,
            "/update_weight_version": lambda: self._named(seen.json),
            "/generate": lambda: self._generated(seen.json),
        }
        if seen.path == "/update_weights_from_disk":
            return self.load(seen) if self.load is not None else self._loaded(seen.json)
        made: Any = routes[seen.path]
        return Answer(body=made())

    def _paused(self, mode: str) -> dict[str, str]:
        assert mode == "retract"
        self.paused = True
        return PAUSED

    def _continued(self) -> dict[str, str]:
        self.paused = False
        return CONTINUED

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["abort_all_requests"] is False
        self.label = body["new_version"]
        return {"success": True, "message": f"Weight version updated to {self.label}", "new_version": self.label}

    def _loaded(self, body: dict[str, Any]) -> Answer:
        assert body["flush_cache"] is True
        assert body["abort_all_requests"] is False
        self.path, self.label = body["model_path"], body["weight_version"]
        return Answer(body={"success": True, "message": LOADED.format(self.label), "num_paused_requests": 0})

    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        assert not self.paused, "a paused server would not answer"
        ids, parameters = body["input_ids"], body["sampling_params"]
        meta: dict[str, Any] = {"prompt_tokens": len(ids), "weight_version": self.label, "finish_reason": wire.cut(0)}
        if parameters["max_new_tokens"] == 0:
            assert body["logprob_start_len"] == 0
            meta["input_token_logprobs"] = [[None, ids[0], None], *([LOGPROBS[self.path], i, None] for i in ids[1:])]
            meta |= {"output_token_logprobs": [], "completion_tokens": 0} | self.changes
            if self.version == wire.NEW:
                meta["weight_versions"] = [{"version": self.label, "start": 0, "end": 0}]
        else:
            lead = self.lead / parameters["temperature"] if self.scaled else self.lead
            meta["output_top_logprobs"] = [[[-0.1, 11, None], [-0.1 - lead, 12, None]]]
        return {"text": "", "output_ids": [], "meta_info": meta}


@asynccontextmanager
async def controlled(replay: Replay) -> AsyncIterator[tuple[EngineControl, list[Seen]]]:
    async with serving(replay.answer) as server:
        control = connect_control(EngineAddress("a", EngineKind.SGLANG, server.url + "/v1", 4, "k3y"))
        assert isinstance(control, SglangControl)
        try:
            yield control, server.seen
        finally:
            await control.close()


def asked(seen: list[Seen]) -> list[str]:
    """The routes that change something, in order."""
    return [one.path for one in seen if one.method == "POST" and one.path != "/generate"]


def scores(value: float) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(value for _ in ids[1:]) for ids in SEQUENCES)


@pytest.mark.parametrize(
    ("version", "first"),
    [(wire.NEW, "/pause_generation"), (wire.OLD, "/continue_generation"), ("unknown", "/continue_generation")],
)
async def test_a_version_is_loaded_under_its_name_and_proved(version: str, first: str) -> None:
    """A server that says one name for a whole answer is never paused: its load waits for the calls in flight."""
    replay = Replay(version, paused=version == wire.OLD)
    async with controlled(replay) as (control, seen):
        await publish(control, path=Path("/w/1"), label="run:1", load_timeout_s=60)
        assert asked(seen) == [first, "/update_weights_from_disk", "/continue_generation"]
        assert await control.weight_info() == WeightInfo("run:1", life_of(wire.server_info(version, 1)))
        noise = noise_of(0.0)
        right = Probe(SEQUENCES, before=scores(-0.5), after=scores(-0.75))
        assert judge(right, await control.score(SEQUENCES, label="run:1"), noise).verdict is Verdict.VERIFIED
        other = Probe(SEQUENCES, before=scores(-0.75), after=scores(-1.25))
        assert judge(other, await control.score(SEQUENCES, label="run:1"), noise).verdict is Verdict.WRONG
    assert not replay.paused
    assert all(one.headers["authorization"] == "Bearer k3y" for one in seen)


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (Answer(400, MISSING), EngineFailureKind.REJECTED),
        (Answer(200, MISSING), EngineFailureKind.UNAVAILABLE),
        (Answer(500, b"Internal Server Error"), EngineFailureKind.UNAVAILABLE),
        (Answer(raw=b""), EngineFailureKind.UNAVAILABLE),
    ],
)
async def test_weights_that_cannot_be_loaded_leave_the_engine_running_and_unnamed(
    refusal: Answer, kind: EngineFailureKind
) -> None:
    replay = Replay(load=lambda _: refusal)
    async with controlled(replay) as (control, seen):
        with pytest.raises(EngineFailure) as caught:
            await publish(control, path=Path("/w/1"), label="run:1", load_timeout_s=60)
        assert caught.value.kind is kind
        assert asked(seen)[-2:] == ["/update_weight_version", "/continue_generation"]
    assert (replay.label, replay.paused) == (UNVERSIONED, False)


async def test_an_engine_that_was_restarted_while_it_loaded_is_not_taken_for_loaded() -> None:
    replay = Replay()

    def load(seen: Seen) -> Answer:
        answer = replay._loaded(seen.json)
        replay.seed += 1
        return answer

    replay.load = load
    async with controlled(replay) as (control, _):
        with pytest.raises(EngineFailure, match="was restarted or given another name"):
            await publish(control, path=Path("/w/1"), label="run:1", load_timeout_s=60)
    assert (replay.label, replay.paused) == (UNVERSIONED, False)


async def test_a_publisher_cancelled_while_it_loads_leaves_the_engine_resumed() -> None:
    replay = Replay(load=lambda _: Answer(hang=True))
    async with serving(replay.answer) as server:
        control = SglangControl(EngineAddress("a", EngineKind.SGLANG, server.url))
        publisher = asyncio.create_task(publish(control, path=Path("/w/1"), label="run:1", load_timeout_s=60))
        await asyncio.wait_for(server.hanging.wait(), 10)
        publisher.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publisher
        await control.close()
    assert (replay.label, replay.paused) == (UNVERSIONED, False)


async def test_a_load_that_takes_too_long_is_a_failure() -> None:
    async with controlled(Replay(load=lambda _: Answer(hang=True))) as (control, _):
        with pytest.raises(EngineFailure, match=r"did not answer /update_weights_from_disk within 0\.1 s"):
            await publish(control, path=Path("/w/1"), label="run:1", load_timeout_s=0.1)


async def test_another_version_than_expected_is_a_failure() -> None:
    async with controlled(Replay(label="run:7")) as (control, _):
        with pytest.raises(EngineFailure, match="weights run:7 instead of run:8") as caught:
            await control.score(SEQUENCES, label="run:8")
    assert caught.value.kind is EngineFailureKind.WRONG_VERSION


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"input_token_logprobs": None}, "did not return a logprob for each"),
        ({"input_token_logprobs": []}, "belong to other tokens"),
        ({"input_token_logprobs": [[None, 4, None], [-1.0, 5, None]]}, "belong to other tokens"),
        ({"input_token_logprobs": [[None, i, None] for i in (4, 5, 6)]}, "not a finite number"),
        ({"input_token_logprobs": [[0.0, i, None] for i in (4, 5, 7)]}, "belong to other tokens"),
    ],
)
async def test_scores_that_are_not_those_of_the_tokens_are_refused(changes: dict[str, Any], says: str) -> None:
    async with controlled(Replay(changes=changes)) as (control, _):
        with pytest.raises(EngineFailure, match=says) as caught:
            await control.score(SEQUENCES[:1])
    assert caught.value.kind is EngineFailureKind.MALFORMED


@pytest.mark.parametrize(("scaled", "lead", "refused"), [(True, 3.0, False), (False, 3.0, True), (False, 0.1, False)])
async def test_logprobs_before_temperature_are_found_out_where_the_tokens_can_tell(
    scaled: bool, lead: float, refused: bool
) -> None:
    async with controlled(Replay(scaled=scaled, lead=lead)) as (control, _):
        if refused:
            with pytest.raises(EngineFailure, match="SGLANG_RETURN_ORIGINAL_LOGPROB") as caught:
                await control.score(SEQUENCES)
            assert not caught.value.retryable
        else:
            assert await control.score(SEQUENCES) == [list(row) for row in scores(-0.5)]


async def test_its_digests_prove_nothing_and_say_so() -> None:
    async with controlled(Replay()) as (control, _):
        judged = judge_checksums({"lm_head.weight": "0" * 64}, await control.checksums())
    assert judged.verdict is Verdict.UNVERIFIABLE
