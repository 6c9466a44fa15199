"""Answers of engines that give no tokens: what they said, byte for byte, and what they say it cost."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_TURNS: dict[str, tuple[sa.types.TypeEngine[Any], str]] = {
    "told_prompt": (sa.Integer(), "Prompt tokens as the provider counts them; only of an answer without token ids"),
    "told_sampled": (sa.Integer(), "Sampled tokens as the provider counts them; only of an answer without token ids"),
    "answer_blob": (sa.Text(), "Digest in blobs of the answer as its bytes came; only of one without token ids"),
}
_TOLD = (
    "num_nonnulls(told_prompt, told_sampled, answer_blob) = 0 OR"
    " (octet_length(sampled) = 0 AND coalesce(told_prompt, 0) >= 0 AND coalesce(told_sampled, 0) >= 0)"
)
_OLD = "(sampled_tokens = 0) = (policy_version IS NULL) AND coalesce(policy_version, 0) >= 0"
_NEW = "(policy_version IS NULL OR sampled_tokens > 0) AND coalesce(policy_version, 0) >= 0"
_OLD_TOKENS = "Tokens sampled, counted when it ended"
_NEW_TOKENS = "Tokens sampled, counted when it ended; by the provider where it gives no ids"
_OLD_BLOBS = "Content-addressed bytes of a run: large environment states"
_NEW_BLOBS = "Content-addressed bytes of a run: large states of environments, answers that came without tokens"


def upgrade() -> None:
    for name, (kind, says) in _TURNS.items():
        op.add_column("turns", sa.Column(name, kind, nullable=True, comment=says))
    op.create_foreign_key(op.f("fk_turns_blobs"), "turns", "blobs", ["run_id", "answer_blob"], ["run_id", "digest"])
    op.create_check_constraint(op.f("ck_turns_told"), "turns", _TOLD)
    op.drop_constraint(op.f("ck_episodes_version"), "episodes", type_="check")
    op.create_check_constraint(op.f("ck_episodes_version"), "episodes", _NEW)
    op.alter_column("episodes", "sampled_tokens", comment=_NEW_TOKENS, existing_comment=_OLD_TOKENS)
    op.create_table_comment("blobs", _NEW_BLOBS, existing_comment=_OLD_BLOBS)
    op.add_column(
        "engines",
        sa.Column("hosted", JSONB(), nullable=True, comment="How it is spoken to where it takes messages, not tokens"),
    )


def downgrade() -> None:
    """Counts of providers go: an episode without token ids has sampled none."""
    op.drop_column("engines", "hosted")
    op.create_table_comment("blobs", _OLD_BLOBS, existing_comment=_NEW_BLOBS)
    op.alter_column("episodes", "sampled_tokens", comment=_OLD_TOKENS, existing_comment=_NEW_TOKENS)
    op.drop_constraint(op.f("ck_episodes_version"), "episodes", type_="check")
    op.execute("UPDATE episodes SET sampled_tokens = 0 WHERE policy_version IS NULL AND sampled_tokens > 0")
    op.create_check_constraint(op.f("ck_episodes_version"), "episodes", _OLD)
    op.drop_constraint(op.f("ck_turns_told"), "turns", type_="check")
    op.drop_constraint(op.f("fk_turns_blobs"), "turns", type_="foreignkey")
    for name in reversed(_TURNS):
        op.drop_column("turns", name)
