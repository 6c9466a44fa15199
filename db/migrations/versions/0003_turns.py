"""What episodes said and sampled, and what answered."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "segments",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("group_no", sa.Integer(), nullable=False, comment="Number of the group in the run"),
        sa.Column("member", sa.Integer(), nullable=False, comment="Which episode of the group, from 0"),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="Which attempt of the episode, from 0"),
        sa.Column("segment", sa.Integer(), nullable=False, comment="Which part, from 0"),
        sa.Column(
            "first_turn", sa.Integer(), nullable=False, comment="The turn that opened it; later turns of it name it"
        ),
        sa.Column("agent", sa.Text(), nullable=True, comment="Who speaks in it, where there are several"),
        sa.Column(
            "prompt",
            sa.LargeBinary(),
            nullable=True,
            comment="int32 ids of the whole prompt, where a fork re-rendered it; NULL for segment 0",
        ),
        sa.CheckConstraint("(segment = 0) = (prompt IS NULL)", name=op.f("ck_segments_prompt")),
        sa.CheckConstraint("octet_length(prompt) % 4 = 0", name=op.f("ck_segments_ids")),
        sa.CheckConstraint("segment >= 0 AND first_turn >= segment", name=op.f("ck_segments_numbers")),
        sa.ForeignKeyConstraint(
            ["run_id", "group_no", "member", "attempt"],
            ["episodes.run_id", "episodes.group_no", "episodes.member", "episodes.attempt"],
            name=op.f("fk_segments_episodes"),
        ),
        sa.PrimaryKeyConstraint("run_id", "group_no", "member", "attempt", "segment", name=op.f("pk_segments")),
        comment="Token-contiguous parts of episodes; own ids only where a fork re-rendered them",
    )
    op.execute("ALTER TABLE segments ALTER COLUMN prompt SET STORAGE EXTERNAL")
    op.execute("CREATE SEQUENCE turns_seq")
    op.create_table(
        "turns",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("group_no", sa.Integer(), nullable=False, comment="Number of the group in the run"),
        sa.Column("member", sa.Integer(), nullable=False, comment="Which episode of the group, from 0"),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="Which attempt of the episode, from 0"),
        sa.Column("turn", sa.Integer(), nullable=False, comment="Which model call of the episode, from 0"),
        sa.Column(
            "segment", sa.Integer(), nullable=False, comment="The token-contiguous part of the episode it continues"
        ),
        sa.Column("opens_segment", sa.Boolean(), nullable=False, comment="It is the first turn of its segment"),
        sa.Column("agent", sa.Text(), nullable=True, comment="Who speaks, where there are several"),
        sa.Column("message", postgresql.JSONB(), nullable=False, comment="The message, fit for display"),
        sa.Column(
            "message_exact",
            sa.LargeBinary(),
            nullable=True,
            comment="UTF-8 JSON of it where JSONB cannot hold it exactly",
        ),
        sa.Column(
            "lossy",
            sa.Boolean(),
            server_default="false",
            nullable=False,
            comment="message is not exact; see message_exact",
        ),
        sa.Column(
            "prompt_delta",
            sa.LargeBinary(),
            nullable=False,
            comment="int32 ids appended before sampling; empty where the segment has a prompt of its own",
        ),
        sa.Column("sampled", sa.LargeBinary(), nullable=False, comment="int32 ids that were sampled"),
        sa.Column(
            "logprobs", sa.LargeBinary(), nullable=False, comment="float32 log-probability of each, at this temperature"
        ),
        sa.Column("mask", sa.LargeBinary(), nullable=False, comment="uint8 of each: 1 trains, 0 does not"),
        sa.Column("finish", sa.Text(), nullable=False, comment="Why the engine stopped sampling"),
        sa.Column(
            "spans",
            postgresql.JSONB(),
            nullable=False,
            comment="[label, version, start, end) in order: who sampled which tokens",
        ),
        sa.Column(
            "policy_version",
            sa.Integer(),
            nullable=True,
            comment="Oldest version of the spans; NULL: nothing was sampled",
        ),
        sa.Column("temperature", sa.Double(), nullable=False, comment="Temperature of the sampling distribution"),
        sa.Column("engine_id", sa.Text(), nullable=False, comment="The engine that sampled"),
        sa.Column("incarnation", sa.Text(), nullable=False, comment="Which process of that engine"),
        sa.Column("request_id", sa.Text(), nullable=False, comment="The engine's name of the request"),
        sa.Column(
            "provisional",
            sa.Boolean(),
            server_default="false",
            nullable=False,
            comment="Sampled around a reload, not confirmed",
        ),
        sa.Column(
            "seq",
            sa.BigInteger(),
            server_default=sa.text("nextval('turns_seq')"),
            nullable=False,
            comment="Order of writing; gaps mean nothing",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written",
        ),
        sa.CheckConstraint("btrim(mask, '\\x0001') = ''", name=op.f("ck_turns_mask")),
        sa.CheckConstraint(
            "encode(logprobs, 'hex') !~ '^(?:.{8})*.{4}[89a-f].[7f]f'", name=op.f("ck_turns_logprobs_finite")
        ),
        sa.CheckConstraint("finish IN ('stop', 'length')", name=op.f("ck_turns_finish")),
        sa.CheckConstraint("temperature >= 0 AND temperature < 'Infinity'", name=op.f("ck_turns_temperature")),
        sa.CheckConstraint("(octet_length(sampled) = 0) = (policy_version IS NULL)", name=op.f("ck_turns_version")),
        sa.CheckConstraint("lossy = (message_exact IS NOT NULL)", name=op.f("ck_turns_lossy")),
        sa.CheckConstraint(
            "octet_length(logprobs) = octet_length(sampled) AND octet_length(mask) * 4 = octet_length(sampled)",
            name=op.f("ck_turns_lengths"),
        ),
        sa.CheckConstraint(
            "octet_length(prompt_delta) % 4 = 0 AND octet_length(sampled) % 4 = 0", name=op.f("ck_turns_ids")
        ),
        sa.CheckConstraint("turn >= 0 AND segment >= 0", name=op.f("ck_turns_numbers")),
        sa.ForeignKeyConstraint(
            ["run_id", "group_no", "member", "attempt", "segment"],
            ["segments.run_id", "segments.group_no", "segments.member", "segments.attempt", "segments.segment"],
            name=op.f("fk_turns_segments"),
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "group_no", "member", "attempt"],
            ["episodes.run_id", "episodes.group_no", "episodes.member", "episodes.attempt"],
            name=op.f("fk_turns_episodes"),
        ),
        sa.PrimaryKeyConstraint("run_id", "group_no", "member", "attempt", "turn", name=op.f("pk_turns")),
        comment="Model calls; tokens are the truth, messages a display copy",
    )
    op.execute("ALTER SEQUENCE turns_seq OWNED BY turns.seq")
    op.execute("ALTER TABLE turns ALTER COLUMN prompt_delta SET STORAGE EXTERNAL")
    op.execute("ALTER TABLE turns ALTER COLUMN sampled SET STORAGE EXTERNAL")
    op.execute("ALTER TABLE turns ALTER COLUMN logprobs SET STORAGE EXTERNAL")
    op.execute("ALTER TABLE turns ALTER COLUMN mask SET STORAGE EXTERNAL")
    op.create_table(
        "tool_calls",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("group_no", sa.Integer(), nullable=False, comment="Number of the group in the run"),
        sa.Column("member", sa.Integer(), nullable=False, comment="Which episode of the group, from 0"),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="Which attempt of the episode, from 0"),
        sa.Column("turn", sa.Integer(), nullable=False, comment="The turn that is answered"),
        sa.Column("call_index", sa.Integer(), nullable=False, comment="Position in the message; -1: the step"),
        sa.Column(
            "call", postgresql.JSONB(), nullable=True, comment="The call as the model made it; NULL for the step"
        ),
        sa.Column("content", sa.Text(), nullable=False, comment="What the model was answered, fit for display"),
        sa.Column("error", sa.Text(), nullable=True, comment="Why the call failed or was malformed"),
        sa.Column("replies", postgresql.JSONB(), nullable=False, comment="Messages the step answered with"),
        sa.Column("reward", sa.Double(), nullable=True, comment="Reward of the step for this turn"),
        sa.Column("done", sa.Boolean(), nullable=False, comment="The step says the episode is over"),
        sa.Column("truncated", sa.Boolean(), nullable=False, comment="The step cut the episode short"),
        sa.Column("info", postgresql.JSONB(), nullable=False, comment="What the step says besides"),
        sa.Column(
            "exact",
            sa.LargeBinary(),
            nullable=True,
            comment="UTF-8 JSON [call, content, error, replies, info] where the columns cannot hold it exactly",
        ),
        sa.Column(
            "lossy",
            sa.Boolean(),
            server_default="false",
            nullable=False,
            comment="The columns are not exact; see exact",
        ),
        sa.Column(
            "state", postgresql.JSONB(), nullable=True, comment="The environment's state after it, if changed and small"
        ),
        sa.Column(
            "state_blob", sa.Text(), nullable=True, comment="Digest of that state in blobs, if large or not JSONB"
        ),
        sa.Column("seconds", sa.Double(), nullable=False, comment="How long it took"),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written",
        ),
        sa.CheckConstraint("reward > '-Infinity' AND reward < 'Infinity'", name=op.f("ck_tool_calls_reward_finite")),
        sa.CheckConstraint("seconds >= 0 AND seconds < 'Infinity'", name=op.f("ck_tool_calls_seconds")),
        sa.CheckConstraint("(call_index = -1) = (call IS NULL)", name=op.f("ck_tool_calls_call")),
        sa.CheckConstraint("call_index >= -1", name=op.f("ck_tool_calls_call_index")),
        sa.CheckConstraint("lossy = (exact IS NOT NULL)", name=op.f("ck_tool_calls_lossy")),
        sa.CheckConstraint("num_nonnulls(state, state_blob) <= 1", name=op.f("ck_tool_calls_state")),
        sa.ForeignKeyConstraint(
            ["run_id", "group_no", "member", "attempt", "turn"],
            ["turns.run_id", "turns.group_no", "turns.member", "turns.attempt", "turns.turn"],
            name=op.f("fk_tool_calls_turns"),
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "state_blob"], ["blobs.run_id", "blobs.digest"], name=op.f("fk_tool_calls_blobs")
        ),
        sa.PrimaryKeyConstraint(
            "run_id", "group_no", "member", "attempt", "turn", "call_index", name=op.f("pk_tool_calls")
        ),
        comment="What answered a turn: its tool calls, and the environment's step (call_index -1)",
    )


def downgrade() -> None:
    op.drop_table("tool_calls")
    op.drop_table("turns")
    op.drop_table("segments")
