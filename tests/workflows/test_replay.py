"""Histories recorded before replay with the code of today, and changed workflow code is noticed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from atropos.workflows.plugin import WORKFLOWS, AtroposPlugin
from hypothesis import given
from hypothesis import strategies as st
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from . import fingerprint
from .fingerprint import hash_of

HISTORIES = sorted(Path(__file__).with_name("histories").glob("*.json"))
ENDS_WITHIN_S = 60
REFRESH = "python -m atropos.tests.workflows.refresh"


def history(document: dict[str, Any]) -> WorkflowHistory:
    return WorkflowHistory.from_json(document["workflow_id"], {"events": document["events"]})


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    return Replayer(workflows=WORKFLOWS, plugins=[AtroposPlugin(strict=True)])


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_recorded_history_replays(replayer: Replayer, path: Path) -> None:
    """A workflow that fails on any exception does not say that it diverged; its replay only never ends."""
    try:
        await asyncio.wait_for(replayer.replay_workflow(history(json.loads(path.read_text()))), ENDS_WITHIN_S)
    except TimeoutError:
        pytest.fail(f"the code of today does other things than {path.stem}.json: it would break workflows in flight")


def test_every_workflow_has_a_recorded_history() -> None:
    first = [json.loads(path.read_text())["events"][0] for path in HISTORIES]
    recorded = {event["workflowExecutionStartedEventAttributes"]["workflowType"]["name"] for event in first}
    assert recorded == {workflow.__name__ for workflow in WORKFLOWS}


async def test_a_history_of_other_code_is_refused(replayer: Replayer) -> None:
    text = next(path for path in HISTORIES if path.stem == "rollout").read_text()
    with pytest.raises(NondeterminismError):
        await replayer.replay_workflow(history(json.loads(text.replace('"admit_groups"', '"admit_group"'))))


def test_no_payload_of_a_recorded_history_exceeds_16_kib() -> None:
    for path in HISTORIES:
        events = history(json.loads(path.read_text())).events
        assert max(len(event.SerializeToString()) for event in events) <= 16 * 1024


def test_workflow_code_is_what_it_was_when_the_histories_were_recorded() -> None:
    now, before = fingerprint.fingerprint(), fingerprint.stored()
    changed = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
    assert not changed, (
        f"Workflow code changed ({', '.join(changed)}): workflows in flight will replay their histories with it. "
        "Decide whether it needs `workflow.patched` or a new worker version, check that the recorded histories still "
        f"replay, then run `{REFRESH}` (or, where no command moved, `{REFRESH} --fingerprint`) and commit the result."
    )


CODE = """
class A:
    def f(self, x):
        return x + 1
"""
SAME = '''
"""A module."""
class A:  # a class
    """It has a docstring."""
    def f(self, x):

        """So has its method."""
        return (x + 1)
'''


def test_a_fingerprint_ignores_what_does_not_run() -> None:
    assert hash_of(CODE) == hash_of(SAME)
    assert hash_of("x = f'{a!r:>3} b'") == hash_of('x = f"{a!r:>3} b"  # the same')


@given(st.integers(), st.integers())
def test_a_fingerprint_sees_every_constant(one: int, other: int) -> None:
    assert (hash_of(f"x = {one}") == hash_of(f"x = {other}")) == (one == other)
