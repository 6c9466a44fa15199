"""Tables of an episode: what was said, which tokens were sampled, what answered, what it was worth.

Invariant: keys are natural, `(run, group, member, attempt[, turn[, call_index]])`, and each row is written once, by
whoever commits first; nothing here is ever sampled or scored in place of what is stored. Token arrays are
little-endian (int32, float32, uint8) and not compressed; a turn stores only what it added, so storage is linear in
tokens. Turns name their engine and version without a foreign key: many writers would share-lock those few rows.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from ..contracts.reasons import FailureKind, FinishReason, StopReason
from ..contracts.records import STEP_INDEX
from ..contracts.states import EpisodeState
from .base import Base, finite, one_of

EPISODE = ("run_id", "group_no", "member", "attempt")
SPANS = "[label, version, start, end, engine, incarnation] in order, end exclusive: who sampled which tokens"
LATE_KINDS = ("turn", "call", "score", "ending")
ALL_FINITE = "encode(logprobs, 'hex') !~ '^(?:.{8})*.{4}[89a-f].[7f]f'"
"""No float32 has all bits of its exponent set. Some 70 µs for 2048 of them; a loop in SQL takes fifty times as long."""


def _ids(*columns: str) -> CheckConstraint:
    """Whole int32 numbers, none of them negative (or NULL where it may)."""
    each = (
        f"octet_length({column}) % 4 = 0 AND encode({column}, 'hex') !~ '^(?:.{{8}})*.{{6}}[89a-f]'"
        for column in columns
    )
    return CheckConstraint(" AND ".join(each), name="ids")


def _spans() -> CheckConstraint:
    """From the first token to the last; nothing sampled has none."""
    return CheckConstraint(
        "CASE WHEN jsonb_typeof(spans) <> 'array' THEN false"
        " WHEN octet_length(sampled) = 0 THEN spans = '[]'"
        " ELSE coalesce((spans->0->>2)::int = 0 AND (spans->-1->>3)::int = octet_length(sampled) / 4, false) END",
        name="spans",
    )


def _json(column: str, kind: str = "object") -> CheckConstraint:
    return CheckConstraint(f"jsonb_typeof({column}) = '{kind}'", name=f"{column}_json")


def _of_episode() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(EPISODE, [f"episodes.{name}" for name in EPISODE])


class EpisodeId(Base):
    """The four columns that name an attempt of an episode."""

    __abstract__ = True

    run_id: Mapped[str] = mapped_column(primary_key=True, sort_order=-4, comment="The run")
    group_no: Mapped[int] = mapped_column(primary_key=True, sort_order=-3, comment="Number of the group in the run")
    member: Mapped[int] = mapped_column(primary_key=True, sort_order=-2, comment="Which episode of the group, from 0")
    attempt: Mapped[int] = mapped_column(
        primary_key=True, sort_order=-1, comment="Which attempt of the episode, from 0"
    )


class EpisodeRow(EpisodeId):
    """One attempt of one member of a group."""

    __tablename__ = "episodes"

    environment_version: Mapped[str] = mapped_column(comment="Version of the environment's code that started it")
    prompt: Mapped[list[Any]] = mapped_column(comment="First messages, fit for display")
    prompt_exact: Mapped[bytes | None] = mapped_column(
        comment="UTF-8 JSON of prompt where JSONB cannot hold it exactly"
    )
    lossy: Mapped[bool] = mapped_column(server_default="false", comment="prompt is not exact; see prompt_exact")
    start_state: Mapped[dict[str, Any] | None] = mapped_column(comment="The environment's state at the start, if small")
    start_state_blob: Mapped[str | None] = mapped_column(comment="Digest of that state in blobs, if large or not JSONB")
    state: Mapped[str] = mapped_column(server_default=EpisodeState.RUNNING, comment="Where it is in its life")
    stop: Mapped[str | None] = mapped_column(comment="Why it ended; NULL while it runs")
    failure: Mapped[str | None] = mapped_column(comment="Whose fault it is where something went wrong")
    reason: Mapped[str | None] = mapped_column(comment="What went wrong, in words")
    reward: Mapped[float | None] = mapped_column(comment="Weighted sum of its scores; NULL: unscored, which is not 0")
    turns: Mapped[int] = mapped_column(server_default="0", comment="Model calls, counted when it ended")
    sampled_tokens: Mapped[int] = mapped_column(
        server_default="0", comment="Tokens sampled, counted when it ended; by the provider where it gives no ids"
    )
    policy_version: Mapped[int | None] = mapped_column(comment="Oldest version that sampled a token of it")
    started_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When its row was written")
    ended_at: Mapped[datetime | None] = mapped_column(comment="When it ended; NULL while it runs")

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "group_no"], ["groups.run_id", "groups.group_no"]),
        ForeignKeyConstraint(["run_id", "start_state_blob"], ["blobs.run_id", "blobs.digest"]),
        one_of("state", EpisodeState),
        one_of("stop", StopReason),
        one_of("failure", FailureKind),
        CheckConstraint("member >= 0 AND attempt >= 0 AND turns >= 0 AND sampled_tokens >= 0", name="numbers"),
        CheckConstraint("num_nonnulls(start_state, start_state_blob) = 1", name="start_state"),
        CheckConstraint("lossy = (prompt_exact IS NOT NULL)", name="lossy"),
        CheckConstraint(
            "(state = 'running') = (stop IS NULL) AND (state = 'running') = (ended_at IS NULL)", name="ended"
        ),
        CheckConstraint("state <> 'running' OR (failure IS NULL AND reward IS NULL)", name="running"),
        CheckConstraint("state <> 'failed' OR (failure IS NOT NULL AND reward IS NULL)", name="failed"),
        CheckConstraint(
            "state <> 'done' OR (stop <> 'failed' AND coalesce(failure, 'policy') IN ('policy', 'judge'))", name="done"
        ),
        CheckConstraint(
            "(policy_version IS NULL OR sampled_tokens > 0) AND coalesce(policy_version, 0) >= 0", name="version"
        ),
        _json("prompt", "array"),
        finite("reward"),
        Index("ix_episodes_running", "run_id", "group_no", postgresql_where=text("state = 'running'")),
        {"comment": "Attempts of episodes"},
    )


class TurnRow(EpisodeId):
    """One model call: what it added to the prompt and what was sampled."""

    __tablename__ = "turns"

    turn: Mapped[int] = mapped_column(primary_key=True, comment="Which model call of the episode, from 0")
    segment: Mapped[int] = mapped_column(comment="The token-contiguous part of the episode it continues")
    opens_segment: Mapped[bool] = mapped_column(comment="It is the first turn of its segment")
    agent: Mapped[str | None] = mapped_column(comment="Who speaks, where there are several")
    message: Mapped[dict[str, Any]] = mapped_column(comment="The message, fit for display")
    message_exact: Mapped[bytes | None] = mapped_column(comment="UTF-8 JSON of it where JSONB cannot hold it exactly")
    lossy: Mapped[bool] = mapped_column(server_default="false", comment="message is not exact; see message_exact")
    prompt_delta: Mapped[bytes] = mapped_column(
        comment="int32 ids appended before sampling; empty where the segment has a prompt of its own"
    )
    sampled: Mapped[bytes] = mapped_column(comment="int32 ids that were sampled")
    logprobs: Mapped[bytes] = mapped_column(comment="float32 log-probability of each, at this temperature")
    mask: Mapped[bytes] = mapped_column(comment="uint8 of each: 1 trains, 0 does not")
    finish: Mapped[str] = mapped_column(comment="Why the engine stopped sampling")
    spans: Mapped[list[Any]] = mapped_column(comment=SPANS)
    policy_version: Mapped[int | None] = mapped_column(comment="Oldest version of the spans; NULL: nothing was sampled")
    temperature: Mapped[float] = mapped_column(comment="Temperature of the sampling distribution")
    engine_id: Mapped[str] = mapped_column(comment="The engine that sampled")
    incarnation: Mapped[str] = mapped_column(comment="Which process of that engine")
    request_id: Mapped[str] = mapped_column(comment="The engine's name of the request")
    told_prompt: Mapped[int | None] = mapped_column(
        comment="Prompt tokens as the provider counts them; only of an answer without token ids"
    )
    told_sampled: Mapped[int | None] = mapped_column(
        comment="Sampled tokens as the provider counts them; only of an answer without token ids"
    )
    answer_blob: Mapped[str | None] = mapped_column(
        comment="Digest in blobs of the answer as its bytes came; only of one without token ids"
    )
    provisional: Mapped[bool] = mapped_column(server_default="false", comment="Sampled around a reload, not confirmed")
    seq: Mapped[int] = mapped_column(
        BigInteger, server_default=text("nextval('turns_seq')"), comment="Order of writing; gaps mean nothing"
    )
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When the row was written")

    __table_args__ = (
        _of_episode(),
        ForeignKeyConstraint((*EPISODE, "segment"), [f"segments.{name}" for name in (*EPISODE, "segment")]),
        one_of("finish", FinishReason),
        CheckConstraint("turn >= 0 AND segment >= 0", name="numbers"),
        _ids("prompt_delta", "sampled"),
        _spans(),
        _json("message"),
        CheckConstraint(
            "octet_length(logprobs) = octet_length(sampled) AND octet_length(mask) * 4 = octet_length(sampled)",
            name="lengths",
        ),
        CheckConstraint(r"btrim(mask, '\x0001') = ''", name="mask"),
        CheckConstraint(ALL_FINITE, name="logprobs_finite"),
        CheckConstraint("temperature >= 0 AND temperature < 'Infinity'", name="temperature"),
        CheckConstraint(
            "(octet_length(sampled) = 0) = (policy_version IS NULL) AND coalesce(policy_version, 0) >= 0",
            name="version",
        ),
        CheckConstraint("lossy = (message_exact IS NOT NULL)", name="lossy"),
        ForeignKeyConstraint(["run_id", "answer_blob"], ["blobs.run_id", "blobs.digest"]),
        CheckConstraint(
            "num_nonnulls(told_prompt, told_sampled, answer_blob) = 0 OR"
            " (octet_length(sampled) = 0 AND coalesce(told_prompt, 0) >= 0 AND coalesce(told_sampled, 0) >= 0)",
            name="told",
        ),
        Index("ix_turns_provisional", "run_id", "engine_id", postgresql_where=text("provisional")),
        {"comment": "Model calls; tokens are the truth, messages a display copy"},
    )


class PartialTurnRow(EpisodeId):
    """What was sampled so far of a long model call."""

    __tablename__ = "partial_turns"

    turn: Mapped[int] = mapped_column(primary_key=True, comment="Which model call of the episode, from 0")
    prompt_digest: Mapped[str] = mapped_column(comment="SHA-256 of the prompt's int32 ids, hexadecimal")
    sampled: Mapped[bytes] = mapped_column(comment="int32 ids that were sampled so far")
    logprobs: Mapped[bytes] = mapped_column(comment="float32 log-probability of each, at the run's temperature")
    spans: Mapped[list[Any]] = mapped_column(comment=SPANS)
    engine_id: Mapped[str] = mapped_column(comment="The engine that sampled the last token")
    incarnation: Mapped[str] = mapped_column(comment="Which process of that engine")
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When it last grew")

    __table_args__ = (
        _of_episode(),
        CheckConstraint("turn >= 0", name="numbers"),
        CheckConstraint("prompt_digest ~ '^[0-9a-f]{64}$'", name="prompt_digest"),
        _ids("sampled"),
        CheckConstraint("octet_length(sampled) > 0", name="sampled"),
        _spans(),
        CheckConstraint("octet_length(logprobs) = octet_length(sampled)", name="lengths"),
        CheckConstraint(ALL_FINITE, name="logprobs_finite"),
        {"comment": "Long model calls that are not whole yet; a retry continues from here, the whole turn removes it"},
    )


class SegmentRow(EpisodeId):
    """A token-contiguous part of an episode: one training sample."""

    __tablename__ = "segments"

    segment: Mapped[int] = mapped_column(primary_key=True, comment="Which part, from 0")
    first_turn: Mapped[int] = mapped_column(comment="The turn that opened it; later turns of it name it")
    agent: Mapped[str | None] = mapped_column(comment="Who speaks in it, where there are several")
    prompt: Mapped[bytes | None] = mapped_column(
        comment="int32 ids of the whole prompt, where a fork re-rendered it; NULL for segment 0"
    )

    __table_args__ = (
        _of_episode(),
        CheckConstraint("segment >= 0 AND first_turn >= segment", name="numbers"),
        CheckConstraint("(segment = 0) = (prompt IS NULL)", name="prompt"),
        _ids("prompt"),
        {"comment": "Token-contiguous parts of episodes; own ids only where a fork re-rendered them"},
    )


class ToolCallRow(EpisodeId):
    """What answered a turn: a tool call, or the environment's step."""

    __tablename__ = "tool_calls"

    turn: Mapped[int] = mapped_column(primary_key=True, comment="The turn that is answered")
    call_index: Mapped[int] = mapped_column(primary_key=True, comment="Position in the message; -1: the step")
    call: Mapped[dict[str, Any] | None] = mapped_column(comment="The call as the model made it; NULL for the step")
    content: Mapped[str] = mapped_column(comment="What the model was answered, fit for display")
    error: Mapped[str | None] = mapped_column(comment="Why the call failed or was malformed")
    replies: Mapped[list[Any]] = mapped_column(comment="Messages the step answered with")
    reward: Mapped[float | None] = mapped_column(comment="Reward of the step for this turn")
    done: Mapped[bool] = mapped_column(comment="The step says the episode is over")
    truncated: Mapped[bool] = mapped_column(comment="The step cut the episode short")
    info: Mapped[dict[str, Any]] = mapped_column(comment="What the step says besides")
    exact: Mapped[bytes | None] = mapped_column(
        comment="UTF-8 JSON [call, content, error, replies, info] where the columns cannot hold it exactly"
    )
    lossy: Mapped[bool] = mapped_column(server_default="false", comment="The columns are not exact; see exact")
    state: Mapped[dict[str, Any] | None] = mapped_column(
        comment="The environment's state after it, if changed and small"
    )
    state_blob: Mapped[str | None] = mapped_column(comment="Digest of that state in blobs, if large or not JSONB")
    seconds: Mapped[float] = mapped_column(comment="How long it took")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When the row was written")

    __table_args__ = (
        ForeignKeyConstraint((*EPISODE, "turn"), [f"turns.{name}" for name in (*EPISODE, "turn")]),
        ForeignKeyConstraint(["run_id", "state_blob"], ["blobs.run_id", "blobs.digest"]),
        CheckConstraint(f"call_index >= {STEP_INDEX}", name="call_index"),
        CheckConstraint(f"(call_index = {STEP_INDEX}) = (call IS NULL)", name="call"),
        _json("call"),
        _json("replies", "array"),
        CheckConstraint("num_nonnulls(state, state_blob) <= 1", name="state"),
        CheckConstraint("lossy = (exact IS NOT NULL)", name="lossy"),
        CheckConstraint("seconds >= 0 AND seconds < 'Infinity'", name="seconds"),
        finite("reward"),
        {"comment": "What answered a turn: its tool calls, and the environment's step (call_index -1)"},
    )


class ScoreRow(EpisodeId):
    """A named part of an episode's reward, or a metric."""

    __tablename__ = "scores"

    name: Mapped[str] = mapped_column(primary_key=True, comment="Name of the reward or metric")
    scorer_version: Mapped[str] = mapped_column(primary_key=True, comment="Version of the code that scored")
    value: Mapped[float | None] = mapped_column(comment="NULL: unscored (a judge failed), which is not 0")
    weight: Mapped[float] = mapped_column(comment="Weight in the reward")
    metric: Mapped[bool] = mapped_column(comment="Kept and shown, never part of the reward")
    seq: Mapped[int] = mapped_column(
        BigInteger, server_default=text("nextval('scores_seq')"), comment="Order of writing; gaps mean nothing"
    )
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When the row was written")

    __table_args__ = (
        _of_episode(),
        CheckConstraint("name <> ''", name="name"),
        finite("value"),
        finite("weight"),
        {"comment": "Reward parts and metrics of episodes"},
    )


class Blob(Base):
    """Bytes addressed by their content."""

    __tablename__ = "blobs"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True, comment="The run")
    digest: Mapped[str] = mapped_column(primary_key=True, comment="SHA-256 of the bytes, hexadecimal")
    data: Mapped[bytes] = mapped_column(comment="The bytes")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When they were first stored")

    __table_args__ = (
        CheckConstraint("digest = encode(sha256(data), 'hex')", name="digest"),
        {"comment": "Content-addressed bytes of a run: large states of environments, answers that came without tokens"},
    )


class EvaluationSample(Base):
    """One sample of one task of an evaluation, and the episode it was."""

    __tablename__ = "evaluation_samples"

    run_id: Mapped[str] = mapped_column(primary_key=True, comment="The run")
    evaluation: Mapped[str] = mapped_column(primary_key=True, comment="The evaluation")
    task_key: Mapped[str] = mapped_column(primary_key=True, comment="The task")
    sample: Mapped[int] = mapped_column(primary_key=True, comment="Which sample of the task, from 0")
    group_no: Mapped[int] = mapped_column(comment="Group of the episode")
    member: Mapped[int] = mapped_column(comment="Member of the episode")
    attempt: Mapped[int] = mapped_column(comment="Attempt of the episode that counts")
    reward: Mapped[float | None] = mapped_column(comment="Reward of the episode; NULL: unscored or invalid")
    success: Mapped[bool | None] = mapped_column(comment="Reward reached the threshold; NULL where there is none")

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "evaluation"], ["evaluations.run_id", "evaluations.name"]),
        _of_episode(),
        CheckConstraint("(success IS NULL) = (reward IS NULL)", name="success"),
        CheckConstraint("sample >= 0", name="sample"),
        finite("reward"),
        Index("uq_evaluation_samples_episode", "run_id", "group_no", "member", unique=True),
        {"comment": "Samples that an evaluation counted, by task"},
    )


class LateResult(Base):
    """What lost the race for its key: kept for the record, never used."""

    __tablename__ = "late_results"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True, comment="The run")
    seq: Mapped[int] = mapped_column(
        BigInteger, server_default=text("nextval('late_results_seq')"), primary_key=True, comment="Order of writing"
    )
    kind: Mapped[str] = mapped_column(comment="turn, call, score or ending")
    group_no: Mapped[int] = mapped_column(comment="Number of the group in the run")
    member: Mapped[int] = mapped_column(comment="Which episode of the group")
    attempt: Mapped[int] = mapped_column(comment="Which attempt of the episode")
    record: Mapped[dict[str, Any]] = mapped_column(comment="What would have been stored, fit for display")
    reason: Mapped[str] = mapped_column(comment="Why it was not stored, in words")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When it came")

    __table_args__ = (
        one_of("kind", LATE_KINDS),
        CheckConstraint("group_no >= 0 AND member >= 0 AND attempt >= 0", name="numbers"),
        Index("ix_late_results_episode", *EPISODE),
        {"comment": "Results that came after another had been stored under the same key"},
    )
