"""An episode on the page: everything of it, and nothing that could take over the reader's terminal."""

import dataclasses
import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from atropos.cli.episode_show import facts_of, render_episode
from atropos.contracts.episode import Score
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.messages import ToolCall, assistant, user
from atropos.contracts.reasons import FailureKind, FinishReason, StopReason
from atropos.contracts.records import STEP_INDEX, CallRecord, EpisodeFacts, TurnRecord, VersionSpan
from atropos.contracts.runfile import parse_run
from atropos.contracts.states import EpisodeState, RunState
from atropos.db.runs import RunRow
from atropos.db.shown import Shown, mean_logprob
from rich.console import Console

from .test_documents import GOOD, plain_of

HOSTILE = "\x1b]0;owned\x07[bold]x[/bold] \u202e\ud800"
KEY = EpisodeKey(run_id="run/a", group_no=3, member=1)


def turn(index: int, message: Any, logprobs: list[float], **changes: Any) -> TurnRecord:
    size = len(logprobs)
    record = TurnRecord(
        turn=index,
        segment=0,
        opens_segment=index == 0,
        message=message,
        prompt_delta=[11, 12],
        sampled=list(range(100, 100 + size)),
        logprobs=logprobs,
        mask=[1] * size,
        finish=FinishReason.STOP,
        spans=(VersionSpan("w", 4, 0, size),) if size else (),
        temperature=1.0,
        engine_id="e",
        incarnation="i",
        request_id="r",
    )
    return dataclasses.replace(record, **changes)


def shown(**changes: Any) -> Shown:
    call = ToolCall(id="c", name=f"look{HOSTILE}", arguments={"at": HOSTILE})
    broken = ToolCall(id="d", name="", problem=f"no JSON {HOSTILE}", raw="{" + HOSTILE)
    facts = EpisodeFacts(
        key=KEY,
        kind="train",
        environment="env",
        task_key="k" * 32,
        task_data={"q": HOSTILE},
        task_info={},
        evaluation=None,
        prompt=(user(f"ask {HOSTILE}"),),
        state={},
        environment_version="1",
        status=EpisodeState.DONE,
        turns=(
            turn(0, assistant("", (call, broken)), [-0.1, -0.3, -3.0], mask=[1, 1, 0]),
            turn(1, assistant(f"answer {HOSTILE}"), []),
        ),
        calls=(
            CallRecord(0, 0, call, content=f"seen {HOSTILE}"),
            CallRecord(0, 1, broken, content="error", error=f"bad {HOSTILE}"),
            CallRecord(1, STEP_INDEX, None, replies=(user(f"reply {HOSTILE}"),), reward=0.5, done=True),
        ),
        stop=StopReason.DONE,
        reward=0.75,
    )
    facts = dataclasses.replace(facts, **changes)
    now = datetime.now(UTC)
    config = parse_run(plain_of(GOOD))
    row = RunRow("run/a", config, RunState.RUNNING, None, None, 8, {"env": 1.0}, (), now, now, None)
    scores = (Score(name=f"part{HOSTILE}", value=0.75, weight=2), Score(name="count", value=None, metric=True))
    return Shown(row, facts, scores, f"why {HOSTILE}")


def page(one: Shown, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=100)
    render_episode(one, "http://ui/x", console, **options)
    return out.getvalue()


@pytest.mark.parametrize("tokens", [False, True])
def test_hostile_text_reaches_the_page_as_text(tokens: bool) -> None:
    text = page(shown(failure=FailureKind.JUDGE), tokens=tokens)
    assert not set(text) & {"\x1b", "\x07", "\u202e", "\ud800"}
    for place in ("user  ask", "look", "at='", "no JSON", "seen", "bad", "answer", "reply", "part", "why"):
        line = next(line for line in text.splitlines() if place in line)
        assert "[bold]x[/bold]" in line, place


def test_a_page_says_what_was_sampled_answered_and_earned() -> None:
    text = page(shown())
    assert "run/a/group/3/episode/1" in text
    assert "turn 0: 2 prompt + 3 sampled tokens, mean logprob -1.133, version 4, finish stop" in text
    assert "turn 1: 2 prompt + 0 sampled tokens, no logprob, no version, finish stop" in text
    assert "step reward 0.5" in text
    assert "Stopped: done after 2 turns, 3 sampled tokens." in text
    assert "0.75 (weight 2)" in text
    assert "count: unscored (metric)" in text
    assert "Reward: 0.75" in text
    assert "http://ui/x" in text


def test_zero_unscored_and_failed_are_three_things() -> None:
    assert "Reward: 0\n" in page(shown(reward=0.0))
    assert "Reward: none (unscored)" in page(shown(reward=None))
    failed = page(shown(reward=None, status=EpisodeState.FAILED, stop=StopReason.FAILED, failure=FailureKind.TOOL))
    assert "Failed: tool, why" in failed
    running = page(shown(reward=None, status=EpisodeState.RUNNING, stop=None))
    assert "It is running: 2 turns" in running
    assert "Reward" not in running


def test_tokens_are_ids_where_the_model_is_not_here() -> None:
    assert "11 12 100 101 102 " in page(shown(), tokens=True)


def test_json_holds_everything_and_arrays_on_request() -> None:
    facts = json.loads(json.dumps(facts_of(shown())))
    assert (facts["id"], facts["reward"], facts["stop"]) == (KEY.workflow_id, 0.75, "done")
    assert facts["turns"][0]["mean_logprob"] == pytest.approx(-3.4 / 3)
    assert facts["turns"][1]["mean_logprob"] is None
    assert "sampled" not in facts["turns"][0]
    assert facts_of(shown(), tokens=True)["turns"][0]["mask"] == [1, 1, 0]
    assert mean_logprob(turn(0, assistant(""), [-1.0, -2.0])) == -1.5
