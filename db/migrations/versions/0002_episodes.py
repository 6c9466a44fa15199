"""Evaluations, groups, episodes and what they were worth."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "evaluations",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("name", sa.Text(), nullable=False, comment="Name of the evaluation inside the run"),
        sa.Column("environment", sa.Text(), nullable=False, comment="Label of the environment that is evaluated"),
        sa.Column("split", sa.Text(), nullable=False, comment="eval or test"),
        sa.Column("tasks", sa.Integer(), nullable=False, comment="Tasks of the set"),
        sa.Column("samples", sa.Integer(), nullable=False, comment="Episodes of each task"),
        sa.Column(
            "threshold",
            sa.Double(),
            server_default="1.0",
            nullable=False,
            comment="Reward from which a sample is a success",
        ),
        sa.Column("sampling", postgresql.JSONB(), nullable=False, comment="Sampling parameters it was run with"),
        sa.Column(
            "policy_version", sa.Integer(), nullable=True, comment="Version it is pinned to; NULL: whatever is served"
        ),
        sa.Column("state", sa.Text(), server_default="running", nullable=False, comment="Where it is in its life"),
        sa.Column("reason", sa.Text(), nullable=True, comment="Why it is in this state, in words"),
        sa.Column("episodes", sa.Integer(), nullable=True, comment="Scored samples"),
        sa.Column("mean_reward", sa.Double(), nullable=True, comment="Mean reward over scored samples"),
        sa.Column("pass_at", postgresql.JSONB(), nullable=True, comment="k: unbiased pass@k, mean over tasks"),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it started",
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True, comment="When it ended; NULL while it runs"),
        sa.CheckConstraint("(ended_at IS NULL) = (state = 'running')", name=op.f("ck_evaluations_ended")),
        sa.CheckConstraint(
            "mean_reward > '-Infinity' AND mean_reward < 'Infinity'", name=op.f("ck_evaluations_mean_reward_finite")
        ),
        sa.CheckConstraint("split IN ('eval', 'test')", name=op.f("ck_evaluations_split")),
        sa.CheckConstraint(
            "state <> 'completed' OR (episodes IS NOT NULL AND pass_at IS NOT NULL)",
            name=op.f("ck_evaluations_completed"),
        ),
        sa.CheckConstraint(
            "state IN ('running', 'completed', 'failed', 'cancelled')", name=op.f("ck_evaluations_state")
        ),
        sa.CheckConstraint(
            "threshold > '-Infinity' AND threshold < 'Infinity'", name=op.f("ck_evaluations_threshold_finite")
        ),
        sa.CheckConstraint("tasks >= 1 AND samples >= 1", name=op.f("ck_evaluations_sizes")),
        sa.ForeignKeyConstraint(
            ["run_id", "environment"],
            ["environments.run_id", "environments.label"],
            name=op.f("fk_evaluations_environments"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_evaluations_runs")),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_evaluations")),
        comment="Evaluations of a run and their results",
    )
    op.create_table(
        "groups",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("group_no", sa.Integer(), nullable=False, comment="Number in the run, without gaps"),
        sa.Column("kind", sa.Text(), nullable=False, comment="train or eval"),
        sa.Column("environment", sa.Text(), nullable=False, comment="Label of its environment"),
        sa.Column("task_key", sa.Text(), nullable=False, comment="Its task"),
        sa.Column(
            "draw", sa.BigInteger(), nullable=False, comment="Position in the environment's seeded order, or in the set"
        ),
        sa.Column("size", sa.Integer(), nullable=False, comment="Episodes it should have"),
        sa.Column(
            "evaluation", sa.Text(), nullable=True, comment="The evaluation it belongs to; NULL for training groups"
        ),
        sa.Column("state", sa.Text(), server_default="admitted", nullable=False, comment="Where it is in its life"),
        sa.Column("failure", sa.Text(), nullable=True, comment="Whose fault it is; set exactly where it failed"),
        sa.Column("reason", sa.Text(), nullable=True, comment="Why it is in this state, in words"),
        sa.Column("valid", sa.Integer(), nullable=True, comment="Valid members when it was closed"),
        sa.Column(
            "mean_reward", sa.Double(), nullable=True, comment="Mean over valid, scored members when it was closed"
        ),
        sa.Column(
            "sampled_tokens",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="Tokens sampled by all its episodes, failed attempts included",
        ),
        sa.Column(
            "admitted_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was admitted",
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True, comment="When its first episode started"),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True, comment="When its workflow was done with it"),
        sa.CheckConstraint(
            "(closed_at IS NULL) = (state IN ('admitted', 'running', 'waiting'))", name=op.f("ck_groups_closed")
        ),
        sa.CheckConstraint("(kind = 'eval') = (evaluation IS NOT NULL)", name=op.f("ck_groups_evaluation")),
        sa.CheckConstraint("(state = 'failed') = (failure IS NOT NULL)", name=op.f("ck_groups_failed")),
        sa.CheckConstraint(
            "failure IN ('policy', 'environment', 'tool', 'engine', 'judge', 'infrastructure', 'cancelled', 'stale')",
            name=op.f("ck_groups_failure"),
        ),
        sa.CheckConstraint("kind IN ('train', 'eval')", name=op.f("ck_groups_kind")),
        sa.CheckConstraint(
            "mean_reward > '-Infinity' AND mean_reward < 'Infinity'", name=op.f("ck_groups_mean_reward_finite")
        ),
        sa.CheckConstraint(
            "state IN ('admitted', 'running', 'waiting', 'sealed', 'leased', 'trained', 'filtered', 'failed', 'stale')",
            name=op.f("ck_groups_state"),
        ),
        sa.CheckConstraint(
            "group_no >= 0 AND draw >= 0 AND size >= 1 AND sampled_tokens >= 0", name=op.f("ck_groups_numbers")
        ),
        sa.CheckConstraint("valid BETWEEN 0 AND size", name=op.f("ck_groups_valid")),
        sa.ForeignKeyConstraint(
            ["run_id", "environment", "task_key"],
            ["tasks.run_id", "tasks.environment", "tasks.task_key"],
            name=op.f("fk_groups_tasks"),
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "evaluation"], ["evaluations.run_id", "evaluations.name"], name=op.f("fk_groups_evaluations")
        ),
        sa.PrimaryKeyConstraint("run_id", "group_no", name=op.f("pk_groups")),
        comment="Groups: G episodes of one task, admitted together and sealed together",
    )
    op.create_index(
        "ix_groups_counted",
        "groups",
        ["run_id", "kind", "environment", "state"],
        unique=False,
        postgresql_include=["sampled_tokens"],
    )
    op.create_index(
        "ix_groups_open",
        "groups",
        ["run_id", "group_no"],
        unique=False,
        postgresql_where=sa.text("state IN ('admitted', 'running', 'waiting')"),
    )
    op.create_index(
        "uq_groups_draw",
        "groups",
        ["run_id", "environment", "draw"],
        unique=True,
        postgresql_where=sa.text("kind = 'train'"),
    )
    op.create_index(
        "uq_groups_sample",
        "groups",
        ["run_id", "evaluation", "draw"],
        unique=True,
        postgresql_where=sa.text("kind = 'eval'"),
    )
    op.create_table(
        "blobs",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("digest", sa.Text(), nullable=False, comment="SHA-256 of the bytes, hexadecimal"),
        sa.Column("data", sa.LargeBinary(), nullable=False, comment="The bytes"),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When they were first stored",
        ),
        sa.CheckConstraint("digest = encode(sha256(data), 'hex')", name=op.f("ck_blobs_digest")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_blobs_runs")),
        sa.PrimaryKeyConstraint("run_id", "digest", name=op.f("pk_blobs")),
        comment="Content-addressed bytes of a run: large environment states",
    )
    op.create_table(
        "episodes",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("group_no", sa.Integer(), nullable=False, comment="Number of the group in the run"),
        sa.Column("member", sa.Integer(), nullable=False, comment="Which episode of the group, from 0"),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="Which attempt of the episode, from 0"),
        sa.Column(
            "environment_version",
            sa.Text(),
            nullable=False,
            comment="Version of the environment's code that started it",
        ),
        sa.Column("prompt", postgresql.JSONB(), nullable=False, comment="First messages, fit for display"),
        sa.Column(
            "prompt_exact",
            sa.LargeBinary(),
            nullable=True,
            comment="UTF-8 JSON of prompt where JSONB cannot hold it exactly",
        ),
        sa.Column(
            "lossy",
            sa.Boolean(),
            server_default="false",
            nullable=False,
            comment="prompt is not exact; see prompt_exact",
        ),
        sa.Column(
            "start_state", postgresql.JSONB(), nullable=True, comment="The environment's state at the start, if small"
        ),
        sa.Column(
            "start_state_blob", sa.Text(), nullable=True, comment="Digest of that state in blobs, if large or not JSONB"
        ),
        sa.Column("state", sa.Text(), server_default="running", nullable=False, comment="Where it is in its life"),
        sa.Column("stop", sa.Text(), nullable=True, comment="Why it ended; NULL while it runs"),
        sa.Column("failure", sa.Text(), nullable=True, comment="Whose fault it is where something went wrong"),
        sa.Column("reason", sa.Text(), nullable=True, comment="What went wrong, in words"),
        sa.Column(
            "reward", sa.Double(), nullable=True, comment="Weighted sum of its scores; NULL: unscored, which is not 0"
        ),
        sa.Column(
            "turns", sa.Integer(), server_default="0", nullable=False, comment="Model calls, counted when it ended"
        ),
        sa.Column(
            "sampled_tokens",
            sa.Integer(),
            server_default="0",
            nullable=False,
            comment="Tokens sampled, counted when it ended",
        ),
        sa.Column("policy_version", sa.Integer(), nullable=True, comment="Oldest version that sampled a token of it"),
        sa.Column(
            "started_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its row was written",
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True, comment="When it ended; NULL while it runs"),
        sa.CheckConstraint(
            "(state = 'running') = (stop IS NULL) AND (state = 'running') = (ended_at IS NULL)",
            name=op.f("ck_episodes_ended"),
        ),
        sa.CheckConstraint(
            "failure IN ('policy', 'environment', 'tool', 'engine', 'judge', 'infrastructure', 'cancelled', 'stale')",
            name=op.f("ck_episodes_failure"),
        ),
        sa.CheckConstraint("reward > '-Infinity' AND reward < 'Infinity'", name=op.f("ck_episodes_reward_finite")),
        sa.CheckConstraint("state <> 'done' OR stop <> 'failed'", name=op.f("ck_episodes_done")),
        sa.CheckConstraint(
            "state <> 'failed' OR (failure IS NOT NULL AND reward IS NULL)", name=op.f("ck_episodes_failed")
        ),
        sa.CheckConstraint(
            "state <> 'running' OR (failure IS NULL AND reward IS NULL)", name=op.f("ck_episodes_running")
        ),
        sa.CheckConstraint("state IN ('running', 'done', 'failed')", name=op.f("ck_episodes_state")),
        sa.CheckConstraint(
            "stop IN ('answered', 'done', 'truncated', 'condition', 'max_turns', 'max_tokens', "
            "'length', 'context_overflow', 'failed')",
            name=op.f("ck_episodes_stop"),
        ),
        sa.CheckConstraint("lossy = (prompt_exact IS NOT NULL)", name=op.f("ck_episodes_lossy")),
        sa.CheckConstraint(
            "member >= 0 AND attempt >= 0 AND turns >= 0 AND sampled_tokens >= 0", name=op.f("ck_episodes_numbers")
        ),
        sa.CheckConstraint("num_nonnulls(start_state, start_state_blob) = 1", name=op.f("ck_episodes_start_state")),
        sa.ForeignKeyConstraint(
            ["run_id", "group_no"], ["groups.run_id", "groups.group_no"], name=op.f("fk_episodes_groups")
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "start_state_blob"], ["blobs.run_id", "blobs.digest"], name=op.f("fk_episodes_blobs")
        ),
        sa.PrimaryKeyConstraint("run_id", "group_no", "member", "attempt", name=op.f("pk_episodes")),
        comment="Attempts of episodes",
    )
    op.create_index(
        "ix_episodes_running",
        "episodes",
        ["run_id", "group_no"],
        unique=False,
        postgresql_where=sa.text("state = 'running'"),
    )
    op.execute("CREATE SEQUENCE scores_seq")
    op.create_table(
        "scores",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("group_no", sa.Integer(), nullable=False, comment="Number of the group in the run"),
        sa.Column("member", sa.Integer(), nullable=False, comment="Which episode of the group, from 0"),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="Which attempt of the episode, from 0"),
        sa.Column("name", sa.Text(), nullable=False, comment="Name of the reward or metric"),
        sa.Column("scorer_version", sa.Text(), nullable=False, comment="Version of the code that scored"),
        sa.Column("value", sa.Double(), nullable=True, comment="NULL: unscored (a judge failed), which is not 0"),
        sa.Column("weight", sa.Double(), nullable=False, comment="Weight in the reward"),
        sa.Column("metric", sa.Boolean(), nullable=False, comment="Kept and shown, never part of the reward"),
        sa.Column(
            "seq",
            sa.BigInteger(),
            server_default=sa.text("nextval('scores_seq')"),
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
        sa.CheckConstraint("name <> ''", name=op.f("ck_scores_name")),
        sa.CheckConstraint("value > '-Infinity' AND value < 'Infinity'", name=op.f("ck_scores_value_finite")),
        sa.CheckConstraint("weight > '-Infinity' AND weight < 'Infinity'", name=op.f("ck_scores_weight_finite")),
        sa.ForeignKeyConstraint(
            ["run_id", "group_no", "member", "attempt"],
            ["episodes.run_id", "episodes.group_no", "episodes.member", "episodes.attempt"],
            name=op.f("fk_scores_episodes"),
        ),
        sa.PrimaryKeyConstraint(
            "run_id", "group_no", "member", "attempt", "name", "scorer_version", name=op.f("pk_scores")
        ),
        comment="Reward parts and metrics of episodes",
    )
    op.execute("ALTER SEQUENCE scores_seq OWNED BY scores.seq")
    op.create_table(
        "evaluation_samples",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column("evaluation", sa.Text(), nullable=False, comment="The evaluation"),
        sa.Column("task_key", sa.Text(), nullable=False, comment="The task"),
        sa.Column("sample", sa.Integer(), nullable=False, comment="Which sample of the task, from 0"),
        sa.Column("group_no", sa.Integer(), nullable=False, comment="Group of the episode"),
        sa.Column("member", sa.Integer(), nullable=False, comment="Member of the episode"),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="Attempt of the episode that counts"),
        sa.Column("reward", sa.Double(), nullable=True, comment="Reward of the episode; NULL: unscored or invalid"),
        sa.Column(
            "success", sa.Boolean(), nullable=True, comment="Reward reached the threshold; NULL where there is none"
        ),
        sa.CheckConstraint(
            "reward > '-Infinity' AND reward < 'Infinity'", name=op.f("ck_evaluation_samples_reward_finite")
        ),
        sa.CheckConstraint("(success IS NULL) = (reward IS NULL)", name=op.f("ck_evaluation_samples_success")),
        sa.ForeignKeyConstraint(
            ["run_id", "evaluation"],
            ["evaluations.run_id", "evaluations.name"],
            name=op.f("fk_evaluation_samples_evaluations"),
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "group_no", "member", "attempt"],
            ["episodes.run_id", "episodes.group_no", "episodes.member", "episodes.attempt"],
            name=op.f("fk_evaluation_samples_episodes"),
        ),
        sa.PrimaryKeyConstraint("run_id", "evaluation", "task_key", "sample", name=op.f("pk_evaluation_samples")),
        comment="Samples that an evaluation counted, by task",
    )
    op.execute("CREATE SEQUENCE late_results_seq")
    op.create_table(
        "late_results",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run"),
        sa.Column(
            "seq",
            sa.BigInteger(),
            server_default=sa.text("nextval('late_results_seq')"),
            nullable=False,
            comment="Order of writing",
        ),
        sa.Column("kind", sa.Text(), nullable=False, comment="turn, call, score or ending"),
        sa.Column("group_no", sa.Integer(), nullable=False, comment="Number of the group in the run"),
        sa.Column("member", sa.Integer(), nullable=False, comment="Which episode of the group"),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="Which attempt of the episode"),
        sa.Column("record", postgresql.JSONB(), nullable=False, comment="What would have been stored, fit for display"),
        sa.Column("reason", sa.Text(), nullable=False, comment="Why it was not stored, in words"),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it came",
        ),
        sa.CheckConstraint("kind IN ('turn', 'call', 'score', 'ending')", name=op.f("ck_late_results_kind")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_late_results_runs")),
        sa.PrimaryKeyConstraint("run_id", "seq", name=op.f("pk_late_results")),
        comment="Results that came after another had been stored under the same key",
    )
    op.create_index(
        "ix_late_results_episode", "late_results", ["run_id", "group_no", "member", "attempt"], unique=False
    )
    op.execute("ALTER SEQUENCE late_results_seq OWNED BY late_results.seq")


def downgrade() -> None:
    op.drop_table("late_results")
    op.drop_table("evaluation_samples")
    op.drop_table("scores")
    op.drop_table("episodes")
    op.drop_table("blobs")
    op.drop_table("groups")
    op.drop_table("evaluations")
