"""A run in which every text of others tries to become markup, a script, an address or another look."""

from pathlib import Path
from typing import Any, Final

from atropos.contracts.episode import Score
from atropos.contracts.ids import EpisodeKey
from atropos.contracts.messages import Message, Role, ToolCall, user
from atropos.contracts.reasons import FailureKind, StopReason
from atropos.contracts.records import STEP_INDEX, CallRecord
from atropos.contracts.states import GroupState
from atropos.db.endings import finish_episode
from atropos.db.engines import put_engines
from atropos.db.episodes import save_calls, save_scores, save_turn, start_episode
from atropos.db.groups import close_group
from atropos.db.runs import create_run
from atropos.db.store import Store

from ..db.samples import admitted, beginning, mixture, rows, run_config, turn

SCRIPT: Final = "window.owned=1"
CORPUS: Final = (
    f"<script>{SCRIPT}</script>",
    f"<img src=x onerror={SCRIPT}>",
    f"<svg/onload={SCRIPT}>",
    f'"><img src=x onerror={SCRIPT}>',
    f"' onmouseover={SCRIPT} autofocus onfocus={SCRIPT} x='",
    f"</script><script>{SCRIPT}</script>",
    f"</style></textarea></title><script>{SCRIPT}</script>",
    f"<!-- --><details open ontoggle={SCRIPT}>",
    f'<iframe srcdoc="<script>parent.{SCRIPT}</script>"></iframe>',
    f"<a href=javascript:{SCRIPT}>click</a> javascript:{SCRIPT} [x](javascript:{SCRIPT})",
    f"&lt;img src=x onerror={SCRIPT}&gt; &amp;lt;img src=x onerror={SCRIPT}&amp;gt;",
    f"&#60;img src=x onerror={SCRIPT}&#62;",
    "{{ 7 * 7 }} {% raw %} ${7*7} @{x} $$\\href{javascript:0}{x}$$",
    f"<math><mtext><style><img src=x onerror={SCRIPT}></style></mtext></math>",
    "\x1b[31mred\x1b]0;title\x07 \u202egnp.exe\u202c \u200b\u200d\ufeff \u2028",
)
HOSTILE: Final = "HOSTILE " + " ".join(CORPUS)
UNSTORABLE: Final = "\x00\ud800"
HUGE: Final = 1_000_000


async def hostile_run(store: Store, model: Path) -> EpisodeKey:
    """The run, its group of two and an episode that is done; the other one has failed. Returns the former."""
    run_id = f"run/{HOSTILE}"
    config = run_config(model={"path": str(model)}, engines=[{"url": "http://127.0.0.1:1"}])
    await create_run(store, run_id, config, mixture(HOSTILE))
    await put_engines(store, run_id, config.engines)
    data: dict[str, Any] = {"task_data": {HOSTILE: [HOSTILE + UNSTORABLE]}, "size": 2}
    [group] = await admitted(store, run_id, **data)
    good, bad = group.key.episode(0), group.key.episode(1)
    for key in (good, bad):
        prompt = (user(HOSTILE + UNSTORABLE), Message(role=Role.SYSTEM, content=HOSTILE, agent=HOSTILE))
        await start_episode(store, beginning(key, prompt=prompt, environment_version=HOSTILE))
        await save_turn(store, key, turn(0, 5, message=_message(), mask=[1, 1, 0, 0, 1], agent=HOSTILE))
        await save_calls(store, key, _calls())
        await save_turn(store, key, turn(1, 5, message=Message(role=Role.ASSISTANT, content=HOSTILE + "A" * HUGE)))
        await save_scores(store, key, [Score(name=HOSTILE, value=0.5)], HOSTILE)
    await finish_episode(store, good, stop=StopReason.ANSWERED, failure=None, reason=None, reward=0.5)
    await finish_episode(
        store, bad, stop=StopReason.FAILED, failure=FailureKind.ENVIRONMENT, reason=HOSTILE, reward=None
    )
    await close_group(store, group.key, [good, bad], GroupState.FAILED, FailureKind.ENVIRONMENT, HOSTILE)
    await rows(
        store,
        "UPDATE runs SET name = %s, waiting_for = %s, reason = %s WHERE run_id = %s RETURNING 1",
        HOSTILE,
        HOSTILE,
        HOSTILE,
        run_id,
    )
    await rows(
        store,
        "UPDATE engines SET url = %s, reason = %s, state = 'down' WHERE run_id = %s RETURNING 1",
        HOSTILE,
        HOSTILE,
        run_id,
    )
    await rows(
        store,
        "INSERT INTO evaluations (run_id, name, environment, split, tasks, samples, sampling) "
        "VALUES (%s, %s, %s, 'eval', 1, 1, '{}') RETURNING 1",
        run_id,
        HOSTILE,
        HOSTILE,
    )
    return good


def _message() -> Message:
    calls = (
        ToolCall(id=HOSTILE, name=HOSTILE, arguments={HOSTILE: HOSTILE, "closing": "</script>"}),
        ToolCall(id="second", name="", problem=HOSTILE, raw=HOSTILE),
    )
    return Message(role=Role.ASSISTANT, content=HOSTILE, reasoning=HOSTILE, tool_calls=calls, agent=HOSTILE)


def _calls() -> list[CallRecord]:
    first, second = _message().tool_calls
    return [
        CallRecord(turn=0, index=0, call=first, content=HOSTILE + UNSTORABLE, seconds=0.1),
        CallRecord(turn=0, index=1, call=second, content=HOSTILE, error=f"error {HOSTILE}", seconds=0.1),
        CallRecord(turn=0, index=STEP_INDEX, call=None, replies=(user(HOSTILE),), reward=0.25, info=_info()),
    ]


def _info() -> dict[str, Any]:
    return {HOSTILE: HOSTILE}
