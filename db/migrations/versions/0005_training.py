"""Training: batches, train steps, and which version went to which engine."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("batch_no", sa.Integer(), nullable=False, comment="Number of the batch in the run, from 0"),
        sa.Column(
            "step",
            sa.Integer(),
            nullable=False,
            comment="The train step it is for; it starts from the version of this number",
        ),
        sa.Column(
            "state", sa.Text(), server_default="leased", nullable=False, comment="Where the batch is in its life"
        ),
        sa.Column(
            "fence",
            sa.Integer(),
            server_default="0",
            nullable=False,
            comment="Raised by every trainer that takes the batch; only the newest may commit",
        ),
        sa.Column("owner", sa.Text(), nullable=True, comment="Who took it last, for people"),
        sa.Column(
            "reward_mean",
            sa.Double(),
            nullable=True,
            comment="Mean reward of the scored episodes that were closed since the last batch, filtered ones included",
        ),
        sa.Column("rewards", sa.Integer(), nullable=False, comment="How many episodes that is the mean of"),
        sa.Column(
            "filtered",
            sa.Integer(),
            nullable=False,
            comment="Groups without signal among those closed since the batch before",
        ),
        sa.Column("stale", sa.Integer(), nullable=False, comment="Groups dropped as stale when this batch was taken"),
        sa.Column(
            "leased_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its groups were fixed",
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True, comment="When it was committed or abandoned"),
        sa.CheckConstraint("(ended_at IS NULL) = (state = 'leased')", name=op.f("ck_batches_ended")),
        sa.CheckConstraint(
            "reward_mean > '-Infinity' AND reward_mean < 'Infinity'", name=op.f("ck_batches_reward_mean_finite")
        ),
        sa.CheckConstraint("state IN ('leased', 'committed', 'abandoned')", name=op.f("ck_batches_state")),
        sa.CheckConstraint("(rewards = 0) = (reward_mean IS NULL)", name=op.f("ck_batches_reward_mean")),
        sa.CheckConstraint("batch_no >= 0 AND step >= 0 AND fence >= 0", name=op.f("ck_batches_numbers")),
        sa.CheckConstraint("rewards >= 0 AND filtered >= 0 AND stale >= 0", name=op.f("ck_batches_counts")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_batches_runs")),
        sa.PrimaryKeyConstraint("run_id", "batch_no", name=op.f("pk_batches")),
        comment="Batches: groups leased together for one train step",
    )
    op.create_index(
        "uq_batches_step", "batches", ["run_id", "step"], unique=True, postgresql_where=sa.text("state <> 'abandoned'")
    )
    op.create_table(
        "publications",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("engine_id", sa.Text(), nullable=False, comment="The engine"),
        sa.Column("incarnation", sa.Text(), nullable=False, comment="Which process of it"),
        sa.Column("version", sa.Integer(), nullable=False, comment="The version it was given"),
        sa.Column(
            "state",
            sa.Text(),
            server_default="loading",
            nullable=False,
            comment="Whether the engine proved that it holds the version",
        ),
        sa.Column("reason", sa.Text(), nullable=True, comment="What was found, in words"),
        sa.Column(
            "distance",
            sa.Double(),
            nullable=True,
            comment="Mean distance of its logprobs on known tokens from the trainer's; NULL: not measured",
        ),
        sa.Column(
            "seq",
            sa.BigInteger(),
            server_default=sa.text("nextval('turns_seq')"),
            nullable=False,
            comment="Order of writing, one order with the turns; set anew at each load",
        ),
        sa.Column(
            "first_seq",
            sa.BigInteger(),
            server_default=sa.text("nextval('turns_seq')"),
            nullable=False,
            comment="The same of its first load, which a later one leaves as it is",
        ),
        sa.Column(
            "proved",
            sa.Boolean(),
            server_default="false",
            nullable=False,
            comment="Whether any of its loads was found to hold the version",
        ),
        sa.Column(
            "changed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its state last changed",
        ),
        sa.CheckConstraint(
            "distance > '-Infinity' AND distance < 'Infinity'", name=op.f("ck_publications_distance_finite")
        ),
        sa.CheckConstraint(
            "state IN ('loading', 'verified', 'unverified', 'failed')", name=op.f("ck_publications_state")
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "engine_id"], ["engines.run_id", "engines.engine_id"], name=op.f("fk_publications_engines")
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "version"],
            ["policy_versions.run_id", "policy_versions.version"],
            name=op.f("fk_publications_policy_versions"),
        ),
        sa.PrimaryKeyConstraint("run_id", "engine_id", "incarnation", "version", name=op.f("pk_publications")),
        comment="Which version was given to which life of which engine, and what the probe found",
    )
    op.create_table(
        "train_steps",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("step", sa.Integer(), nullable=False, comment="Number of the step: it made version step + 1"),
        sa.Column("batch_no", sa.Integer(), nullable=False, comment="The batch it consumed"),
        sa.Column("fence", sa.Integer(), nullable=False, comment="Under which fence it was committed"),
        sa.Column("version", sa.Integer(), nullable=False, comment="The version it made"),
        sa.Column("groups", sa.Integer(), nullable=False, comment="Groups it consumed"),
        sa.Column(
            "staleness",
            sa.Integer(),
            nullable=False,
            comment="Step minus the oldest version that sampled one of its tokens",
        ),
        sa.Column("metrics", postgresql.JSONB(), nullable=False, comment="What the step measured, by name"),
        sa.Column(
            "seq",
            sa.BigInteger(),
            server_default=sa.text("nextval('policy_versions_seq')"),
            nullable=False,
            comment="Order of writing, across tables",
        ),
        sa.Column(
            "committed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was committed",
        ),
        sa.CheckConstraint("groups >= 1 AND staleness >= 0", name=op.f("ck_train_steps_numbers")),
        sa.CheckConstraint("version = step + 1", name=op.f("ck_train_steps_version")),
        sa.ForeignKeyConstraint(
            ["run_id", "batch_no"], ["batches.run_id", "batches.batch_no"], name=op.f("fk_train_steps_batches")
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "version"],
            ["policy_versions.run_id", "policy_versions.version"],
            name=op.f("fk_train_steps_policy_versions"),
        ),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_train_steps")),
        comment="Train steps that were committed, each with the batch it consumed and the version it made",
    )
    op.create_table(
        "batch_groups",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("batch_no", sa.Integer(), nullable=False, comment="The batch"),
        sa.Column("group_no", sa.Integer(), nullable=False, comment="The group"),
        sa.Column(
            "live", sa.Boolean(), server_default="true", nullable=False, comment="False once the batch is abandoned"
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "batch_no"], ["batches.run_id", "batches.batch_no"], name=op.f("fk_batch_groups_batches")
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "group_no"], ["groups.run_id", "groups.group_no"], name=op.f("fk_batch_groups_groups")
        ),
        sa.PrimaryKeyConstraint("run_id", "batch_no", "group_no", name=op.f("pk_batch_groups")),
        comment="Groups of a batch; fixed when the batch is inserted",
    )
    op.create_index(
        "uq_batch_groups_live", "batch_groups", ["run_id", "group_no"], unique=True, postgresql_where=sa.text("live")
    )
    op.add_column(
        "groups",
        sa.Column(
            "reported_in",
            sa.Integer(),
            nullable=True,
            comment="Number of the first batch that was leased after it was closed: whose mean reward it is in",
        ),
    )
    op.create_index(
        "ix_groups_sealed",
        "groups",
        ["run_id", "group_no"],
        unique=False,
        postgresql_where=sa.text("kind = 'train' AND state = 'sealed'"),
    )
    op.create_index(
        "ix_groups_unreported",
        "groups",
        ["run_id", "group_no"],
        unique=False,
        postgresql_where=sa.text("kind = 'train' AND closed_at IS NOT NULL AND reported_in IS NULL"),
    )
    op.create_index(
        "ix_turns_provisional",
        "turns",
        ["run_id", "engine_id"],
        unique=False,
        postgresql_where=sa.text("provisional"),
    )
    op.add_column(
        "policy_versions",
        sa.Column(
            "digest", sa.Text(), nullable=True, comment="Hash of the checkpoint at `path`; NULL: it is no checkpoint"
        ),
    )
    op.add_column(
        "policy_versions",
        sa.Column(
            "probe",
            postgresql.JSONB(),
            nullable=True,
            comment="Token sequences with the trainer's logprobs before and after: how engines prove that they hold it",
        ),
    )
    op.add_column(
        "policy_versions",
        sa.Column(
            "published_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When every engine that could be reached held it; NULL: not yet",
        ),
    )


def downgrade() -> None:
    op.drop_index("ix_turns_provisional", table_name="turns", postgresql_where=sa.text("provisional"))
    op.drop_column("policy_versions", "published_at")
    op.drop_column("policy_versions", "probe")
    op.drop_column("policy_versions", "digest")
    op.drop_index(
        "ix_groups_unreported",
        table_name="groups",
        postgresql_where=sa.text("kind = 'train' AND closed_at IS NOT NULL AND reported_in IS NULL"),
    )
    op.drop_index(
        "ix_groups_sealed", table_name="groups", postgresql_where=sa.text("kind = 'train' AND state = 'sealed'")
    )
    op.drop_column("groups", "reported_in")
    op.drop_index("uq_batch_groups_live", table_name="batch_groups", postgresql_where=sa.text("live"))
    op.drop_table("batch_groups")
    op.drop_table("train_steps")
    op.drop_table("publications")
    op.drop_index("uq_batches_step", table_name="batches", postgresql_where=sa.text("state <> 'abandoned'"))
    op.drop_table("batches")
