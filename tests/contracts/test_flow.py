"""The flow of an episode: the order in which limits are checked, and how tool calls are grouped."""

from itertools import pairwise

from atropos.contracts import flow
from atropos.contracts.flow import CallPlan, Next, Spent
from atropos.contracts.limits import Limits
from atropos.contracts.reasons import FinishReason, RunAt, StopReason
from hypothesis import given
from hypothesis import strategies as st

COUNTS = st.integers(0, 20)
LIMITS = st.builds(
    Limits,
    turns=st.none() | st.integers(1, 20),
    tokens=st.none() | st.integers(1, 20),
    context=st.none() | st.integers(1, 40),
)
SPENT = st.builds(Spent, turns=COUNTS, tokens=COUNTS)
CALLS = st.lists(st.tuples(st.sampled_from(list(RunAt)), st.booleans()), max_size=12).map(
    lambda drawn: tuple(
        CallPlan(index=index, name="t", run=run, serial=serial) for index, (run, serial) in enumerate(drawn)
    )
)


@given(SPENT, LIMITS)
def test_turns_are_checked_before_tokens(spent: Spent, limits: Limits) -> None:
    move = flow.before_model(spent, limits)
    if limits.turns is not None and spent.turns >= limits.turns:
        assert move.stop is StopReason.MAX_TURNS
    elif limits.tokens is not None and spent.tokens >= limits.tokens:
        assert move.stop is StopReason.MAX_TOKENS
    else:
        assert move == flow.MODEL


@given(st.sampled_from(list(FinishReason)), st.integers(0, 5), st.booleans())
def test_a_cut_message_runs_nothing_then_tools_come_before_step(
    finish: FinishReason, calls: int, has_step: bool
) -> None:
    move = flow.after_model(finish, calls, has_step)
    if finish is FinishReason.LENGTH:
        assert (move.next, move.stop) == (Next.END, StopReason.LENGTH)
    elif calls:
        assert move.next is Next.TOOLS
    elif has_step:
        assert move.next is Next.STEP
    else:
        assert (move.next, move.stop) == (Next.END, StopReason.ANSWERED)


@given(st.booleans(), st.booleans(), st.none() | st.text())
def test_done_comes_before_truncated_before_a_condition(done: bool, truncated: bool, condition: str | None) -> None:
    move = flow.after_answer(done=done, truncated=truncated, condition=condition)
    order = [
        (done, StopReason.DONE),
        (truncated, StopReason.TRUNCATED),
        (condition is not None, StopReason.CONDITION),
    ]
    expected = next((reason for holds, reason in order if holds), None)
    assert move.stop is expected
    assert (move.next is Next.END) == (expected is not None)


@given(SPENT, LIMITS, st.integers(0, 5), st.booleans(), st.booleans(), st.booleans())
def test_a_stop_reason_is_given_exactly_at_the_end(
    spent: Spent, limits: Limits, calls: int, has_step: bool, done: bool, truncated: bool
) -> None:
    moves = [
        flow.before_model(spent, limits),
        flow.after_model(FinishReason.STOP, calls, has_step),
        flow.after_answer(done=done, truncated=truncated),
    ]
    assert all((move.stop is not None) == (move.next is Next.END) for move in moves)


@given(LIMITS, SPENT, st.integers(1, 50), st.integers(0, 60), st.integers(1, 60))
def test_a_completion_never_exceeds_any_limit(
    limits: Limits, spent: Spent, max_tokens: int, prompt: int, context: int
) -> None:
    room = flow.completion_budget(limits, spent, max_tokens, prompt, context)
    assert room <= max_tokens
    assert prompt + room <= context
    assert limits.context is None or prompt + room <= limits.context
    assert limits.tokens is None or spent.tokens + room <= limits.tokens


@given(CALLS)
def test_waves_keep_every_call_in_order(calls: tuple[CallPlan, ...]) -> None:
    assert tuple(call for wave in flow.waves(calls) for call in wave) == calls


@given(CALLS)
def test_waves_never_run_a_serial_call_beside_another(calls: tuple[CallPlan, ...]) -> None:
    for wave in flow.waves(calls):
        inline = [call.run is RunAt.INLINE for call in wave]
        assert all(inline) or not any(inline), (
            "inline calls, which run in order, never share a wave with scheduled ones"
        )
        if not any(inline) and len(wave) > 1:
            assert not any(call.serial for call in wave)


@given(CALLS)
def test_neighbouring_inline_calls_share_one_wave(calls: tuple[CallPlan, ...]) -> None:
    waves = flow.waves(calls)
    inline = [all(call.run is RunAt.INLINE for call in wave) for wave in waves]
    assert not any(left and right for left, right in pairwise(inline))
