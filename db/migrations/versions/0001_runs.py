"""Runs, what they draw from and who samples for them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False, comment="Id of the run, which is its workflow's id"),
        sa.Column("name", sa.Text(), nullable=False, comment="Name from the run file"),
        sa.Column("config", postgresql.JSONB(), nullable=False, comment="The validated run file"),
        sa.Column(
            "config_hash",
            sa.Text(),
            nullable=False,
            comment="Hash of the run file: the same id with another file is refused",
        ),
        sa.Column("seed", sa.BigInteger(), nullable=False, comment="Seed of the order in which tasks are drawn"),
        sa.Column("state", sa.Text(), server_default="running", nullable=False, comment="Where the run is in its life"),
        sa.Column("reason", sa.Text(), nullable=True, comment="Why the run is in this state, in words"),
        sa.Column(
            "waiting_for",
            sa.Text(),
            nullable=True,
            comment="Why nothing is admitted right now; NULL: it is not waiting",
        ),
        sa.Column(
            "concurrency",
            sa.Integer(),
            nullable=False,
            comment="Groups in flight at once; can be changed while the run lives",
        ),
        sa.Column(
            "next_group_no",
            sa.Integer(),
            server_default="0",
            nullable=False,
            comment="Number of the next group of the run",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the run was registered",
        ),
        sa.Column(
            "changed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its state last changed",
        ),
        sa.Column(
            "ended_at", sa.DateTime(timezone=True), nullable=True, comment="When it ended; NULL while it is alive"
        ),
        sa.CheckConstraint("(ended_at IS NULL) = (state IN ('running', 'paused'))", name=op.f("ck_runs_ended")),
        sa.CheckConstraint(
            "state IN ('running', 'paused', 'completed', 'failed', 'cancelled')", name=op.f("ck_runs_state")
        ),
        sa.CheckConstraint("concurrency >= 1", name=op.f("ck_runs_concurrency")),
        sa.CheckConstraint("next_group_no >= 0", name=op.f("ck_runs_next_group_no")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
        comment="One row a run",
    )
    op.create_index(op.f("ix_runs_created_at"), "runs", ["created_at"], unique=False)
    op.create_table(
        "environments",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("label", sa.Text(), nullable=False, comment="What rows and pages call the environment"),
        sa.Column("ref", sa.Text(), nullable=False, comment="Entry point, module:Class or file it is loaded from"),
        sa.Column(
            "version",
            sa.Text(),
            nullable=False,
            comment="Version of the environment's code when the run was registered",
        ),
        sa.Column("args", postgresql.JSONB(), nullable=False, comment="The environment's own configuration"),
        sa.Column("group_size", sa.Integer(), nullable=False, comment="Episodes of a group"),
        sa.Column(
            "weight",
            sa.Double(),
            nullable=False,
            comment="Share of the groups that count; can be changed while the run lives",
        ),
        sa.Column("limits", postgresql.JSONB(), nullable=False, comment="Limits of its episodes"),
        sa.Column(
            "next_draw",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="First position of the seeded order that was not drawn yet",
        ),
        sa.CheckConstraint("weight > 0 AND weight < 'Infinity'", name=op.f("ck_environments_weight")),
        sa.CheckConstraint("group_size >= 1", name=op.f("ck_environments_group_size")),
        sa.CheckConstraint("next_draw >= 0", name=op.f("ck_environments_next_draw")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_environments_runs")),
        sa.PrimaryKeyConstraint("run_id", "label", name=op.f("pk_environments")),
        comment="Environments of a run; the draw position moves in the transaction that admits groups",
    )
    op.create_table(
        "tasks",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("environment", sa.Text(), nullable=False, comment="Label of its environment"),
        sa.Column("task_key", sa.Text(), nullable=False, comment="Hash of the task's data"),
        sa.Column("split", sa.Text(), nullable=False, comment="train, eval or test; a key belongs to one split only"),
        sa.Column("data", postgresql.JSONB(), nullable=False, comment="The task's data, fit for display"),
        sa.Column("info", postgresql.JSONB(), nullable=False, comment="What rides along and is not hashed"),
        sa.Column(
            "exact",
            sa.LargeBinary(),
            nullable=True,
            comment="UTF-8 JSON [data, info] where JSONB cannot hold it exactly; NULL: the columns are exact",
        ),
        sa.Column(
            "lossy",
            sa.Boolean(),
            server_default="false",
            nullable=False,
            comment="data or info is not exact; see exact",
        ),
        sa.Column(
            "quarantined_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When the task was taken out of the draw",
        ),
        sa.Column("quarantine_reason", sa.Text(), nullable=True, comment="Why it was taken out, in words"),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was first drawn",
        ),
        sa.CheckConstraint("split IN ('train', 'eval', 'test')", name=op.f("ck_tasks_split")),
        sa.CheckConstraint("task_key <> ''", name=op.f("ck_tasks_task_key")),
        sa.CheckConstraint("(quarantined_at IS NULL) = (quarantine_reason IS NULL)", name=op.f("ck_tasks_quarantine")),
        sa.CheckConstraint("lossy = (exact IS NOT NULL)", name=op.f("ck_tasks_lossy")),
        sa.ForeignKeyConstraint(
            ["run_id", "environment"], ["environments.run_id", "environments.label"], name=op.f("fk_tasks_environments")
        ),
        sa.PrimaryKeyConstraint("run_id", "environment", "task_key", name=op.f("pk_tasks")),
        comment="Tasks that were drawn, by run and environment",
    )
    op.execute("CREATE SEQUENCE policy_versions_seq")
    op.create_table(
        "policy_versions",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column(
            "version", sa.Integer(), nullable=False, comment="Number of the version; 0 is what the run began with"
        ),
        sa.Column("label", sa.Text(), nullable=False, comment="What engines call these weights"),
        sa.Column("path", sa.Text(), nullable=True, comment="Where the weights are; NULL: where the engine found them"),
        sa.Column(
            "seq",
            sa.BigInteger(),
            server_default=sa.text("nextval('policy_versions_seq')"),
            nullable=False,
            comment="Order of writing, across tables",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the version came to exist",
        ),
        sa.CheckConstraint("version >= 0", name=op.f("ck_policy_versions_version")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_policy_versions_runs")),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_policy_versions")),
        comment="Versions of the policy; a version exists when its row commits",
    )
    op.create_index("uq_policy_versions_label", "policy_versions", ["run_id", "label"], unique=True)
    op.execute("ALTER SEQUENCE policy_versions_seq OWNED BY policy_versions.seq")
    op.create_table(
        "engines",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("engine_id", sa.Text(), nullable=False, comment="Derived from its URL"),
        sa.Column("kind", sa.Text(), nullable=False, comment="Which server it is"),
        sa.Column("url", sa.Text(), nullable=False, comment="Base URL"),
        sa.Column("concurrency", sa.Integer(), nullable=False, comment="Requests it is given at once"),
        sa.Column("api_key_env", sa.Text(), nullable=True, comment="Environment variable that holds its key"),
        sa.Column("state", sa.Text(), server_default="ready", nullable=False, comment="Whether it may be given work"),
        sa.Column("reason", sa.Text(), nullable=True, comment="Why it is in this state, in words"),
        sa.Column("weight_label", sa.Text(), nullable=True, comment="Weights it last reported"),
        sa.Column("incarnation", sa.Text(), nullable=True, comment="Which process of it answered last"),
        sa.Column(
            "changed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When any of this last changed",
        ),
        sa.CheckConstraint(
            "state IN ('ready', 'down', 'draining', 'quarantined', 'removed')", name=op.f("ck_engines_state")
        ),
        sa.CheckConstraint("concurrency >= 1", name=op.f("ck_engines_concurrency")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_engines_runs")),
        sa.PrimaryKeyConstraint("run_id", "engine_id", name=op.f("pk_engines")),
        comment="Inference servers of a run",
    )
    op.execute("CREATE SEQUENCE events_seq")
    op.create_table(
        "events",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column(
            "seq",
            sa.BigInteger(),
            server_default=sa.text("nextval('events_seq')"),
            nullable=False,
            comment="Order of writing; gaps mean nothing",
        ),
        sa.Column("kind", sa.Text(), nullable=False, comment="What sort of event, one word"),
        sa.Column("text", sa.Text(), nullable=False, comment="What happened, in words"),
        sa.Column("data", postgresql.JSONB(), nullable=False, comment="The same for machines"),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was written",
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_events_runs")),
        sa.PrimaryKeyConstraint("run_id", "seq", name=op.f("pk_events")),
        comment="What happened to a run; rows are only ever added",
    )
    op.execute("ALTER SEQUENCE events_seq OWNED BY events.seq")


def downgrade() -> None:
    op.drop_table("events")
    op.drop_table("engines")
    op.drop_table("policy_versions")
    op.drop_table("tasks")
    op.drop_table("environments")
    op.drop_table("runs")
