"""What was sampled so far of long model calls; spans name the engine and its incarnation."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_OLD_SPANS = "[label, version, start, end) in order: who sampled which tokens"
_SPANS = "[label, version, start, end, engine, incarnation] in order, end exclusive: who sampled which tokens"


def upgrade() -> None:
    op.alter_column("turns", "spans", comment=_SPANS, existing_comment=_OLD_SPANS)
    op.create_table(
        "partial_turns",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("group_no", sa.Integer(), nullable=False, comment="Number of the group in the run"),
        sa.Column("member", sa.Integer(), nullable=False, comment="Which episode of the group, from 0"),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="Which attempt of the episode, from 0"),
        sa.Column("turn", sa.Integer(), nullable=False, comment="Which model call of the episode, from 0"),
        sa.Column("prompt_digest", sa.Text(), nullable=False, comment="SHA-256 of the prompt's int32 ids, hexadecimal"),
        sa.Column("sampled", sa.LargeBinary(), nullable=False, comment="int32 ids that were sampled so far"),
        sa.Column(
            "logprobs",
            sa.LargeBinary(),
            nullable=False,
            comment="float32 log-probability of each, at the run's temperature",
        ),
        sa.Column("spans", postgresql.JSONB(), nullable=False, comment=_SPANS),
        sa.Column("engine_id", sa.Text(), nullable=False, comment="The engine that sampled the last token"),
        sa.Column("incarnation", sa.Text(), nullable=False, comment="Which process of that engine"),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it last grew",
        ),
        sa.CheckConstraint("turn >= 0", name=op.f("ck_partial_turns_numbers")),
        sa.CheckConstraint("prompt_digest ~ '^[0-9a-f]{64}$'", name=op.f("ck_partial_turns_prompt_digest")),
        sa.CheckConstraint(
            "octet_length(sampled) % 4 = 0 AND octet_length(sampled) > 0", name=op.f("ck_partial_turns_ids")
        ),
        sa.CheckConstraint("octet_length(logprobs) = octet_length(sampled)", name=op.f("ck_partial_turns_lengths")),
        sa.CheckConstraint(
            "encode(logprobs, 'hex') !~ '^(?:.{8})*.{4}[89a-f].[7f]f'", name=op.f("ck_partial_turns_logprobs_finite")
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "group_no", "member", "attempt"],
            ["episodes.run_id", "episodes.group_no", "episodes.member", "episodes.attempt"],
            name=op.f("fk_partial_turns_episodes"),
        ),
        sa.PrimaryKeyConstraint("run_id", "group_no", "member", "attempt", "turn", name=op.f("pk_partial_turns")),
        comment="Long model calls that are not whole yet; a retry continues from here, the whole turn removes it",
    )
    op.execute("ALTER TABLE partial_turns ALTER COLUMN sampled SET STORAGE EXTERNAL")
    op.execute("ALTER TABLE partial_turns ALTER COLUMN logprobs SET STORAGE EXTERNAL")


def downgrade() -> None:
    op.drop_table("partial_turns")
    op.alter_column("turns", "spans", comment=_OLD_SPANS, existing_comment=_SPANS)
