"""Tables of a run: what it is, what it draws from, what it admitted and who samples for it.

Invariant: `run_id` leads every primary key, so each table can be partitioned by run. Numbers that must not be taken
twice (`groups.group_no`, `environments.next_draw`) are advanced under the lock of the run's row, in the transaction
that inserts what uses them.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from ..contracts.reasons import FailureKind
from ..contracts.states import OPEN_GROUPS, EngineState, EvaluationState, GroupState, RunState
from ..contracts.tasks import SPLITS
from .base import Base, finite, one_of

OPEN = "state IN ({})".format(", ".join(f"'{state}'" for state in sorted(OPEN_GROUPS)))
KINDS = ("train", "eval")


class Run(Base):
    """A run: its document, its state and why it waits."""

    __tablename__ = "runs"

    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Id of the run, which is its workflow's id")
    name: Mapped[str] = mapped_column(comment="Name from the run file")
    config: Mapped[dict[str, Any]] = mapped_column(comment="The validated run file")
    config_hash: Mapped[str] = mapped_column(comment="Hash of the run file: the same id with another file is refused")
    seed: Mapped[int] = mapped_column(BigInteger, comment="Seed of the order in which tasks are drawn")
    state: Mapped[str] = mapped_column(server_default=RunState.RUNNING, comment="Where the run is in its life")
    reason: Mapped[str | None] = mapped_column(comment="Why the run is in this state, in words")
    waiting_for: Mapped[str | None] = mapped_column(
        comment="Why nothing is admitted right now; NULL: it is not waiting"
    )
    concurrency: Mapped[int] = mapped_column(comment="Groups in flight at once; can be changed while the run lives")
    next_group_no: Mapped[int] = mapped_column(server_default="0", comment="Number of the next group of the run")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When the run was registered")
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When its state last changed")
    ended_at: Mapped[datetime | None] = mapped_column(comment="When it ended; NULL while it is alive")

    __table_args__ = (
        one_of("state", RunState),
        CheckConstraint("concurrency >= 1", name="concurrency"),
        CheckConstraint("next_group_no >= 0", name="next_group_no"),
        CheckConstraint("jsonb_typeof(config) = 'object'", name="config_json"),
        CheckConstraint("(ended_at IS NULL) = (state IN ('running', 'paused'))", name="ended"),
        Index(None, "created_at"),
        {"comment": "One row a run"},
    )


class EnvironmentRow(Base):
    """An environment of a run's mixture and the position of its draw."""

    __tablename__ = "environments"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True, comment="The run")
    label: Mapped[str] = mapped_column(primary_key=True, comment="What rows and pages call the environment")
    ref: Mapped[str] = mapped_column(comment="Entry point, module:Class or file it is loaded from")
    version: Mapped[str] = mapped_column(comment="Version of the environment's code when the run was registered")
    args: Mapped[dict[str, Any]] = mapped_column(comment="The environment's own configuration")
    group_size: Mapped[int] = mapped_column(comment="Episodes of a group")
    weight: Mapped[float] = mapped_column(comment="Share of the groups that count; can be changed while the run lives")
    limits: Mapped[dict[str, Any]] = mapped_column(comment="Limits of its episodes")
    next_draw: Mapped[int] = mapped_column(
        BigInteger, server_default="0", comment="First position of the seeded order that was not drawn yet"
    )

    __table_args__ = (
        CheckConstraint("group_size >= 1", name="group_size"),
        CheckConstraint("weight > 0 AND weight < 'Infinity'", name="weight"),
        CheckConstraint("next_draw >= 0", name="next_draw"),
        {"comment": "Environments of a run; the draw position moves in the transaction that admits groups"},
    )


class TaskRow(Base):
    """A task of an environment, identified by its content."""

    __tablename__ = "tasks"

    run_id: Mapped[str] = mapped_column(primary_key=True, comment="The run")
    environment: Mapped[str] = mapped_column(primary_key=True, comment="Label of its environment")
    task_key: Mapped[str] = mapped_column(primary_key=True, comment="Hash of the task's data")
    split: Mapped[str] = mapped_column(comment="train, eval or test; a key belongs to one split only")
    data: Mapped[Any] = mapped_column(JSONB, comment="The task's data, fit for display")
    info: Mapped[dict[str, Any]] = mapped_column(comment="What rides along and is not hashed")
    exact: Mapped[bytes | None] = mapped_column(
        comment="UTF-8 JSON [data, info] where JSONB cannot hold it exactly; NULL: the columns are exact"
    )
    lossy: Mapped[bool] = mapped_column(server_default="false", comment="data or info is not exact; see exact")
    quarantined_at: Mapped[datetime | None] = mapped_column(comment="When the task was taken out of the draw")
    quarantine_reason: Mapped[str | None] = mapped_column(comment="Why it was taken out, in words")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When it was first drawn")

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "environment"], ["environments.run_id", "environments.label"]),
        one_of("split", SPLITS),
        CheckConstraint("task_key <> ''", name="task_key"),
        CheckConstraint("lossy = (exact IS NOT NULL)", name="lossy"),
        CheckConstraint("(quarantined_at IS NULL) = (quarantine_reason IS NULL)", name="quarantine"),
        {"comment": "Tasks that were drawn, by run and environment"},
    )


class Evaluation(Base):
    """An evaluation: fixed tasks, n samples each, one set."""

    __tablename__ = "evaluations"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True, comment="The run")
    name: Mapped[str] = mapped_column(primary_key=True, comment="Name of the evaluation inside the run")
    environment: Mapped[str] = mapped_column(comment="Label of the environment that is evaluated")
    split: Mapped[str] = mapped_column(comment="eval or test")
    tasks: Mapped[int] = mapped_column(comment="Tasks of the set")
    samples: Mapped[int] = mapped_column(comment="Episodes of each task")
    threshold: Mapped[float] = mapped_column(server_default="1.0", comment="Reward from which a sample is a success")
    sampling: Mapped[dict[str, Any]] = mapped_column(comment="Sampling parameters it was run with")
    policy_version: Mapped[int | None] = mapped_column(comment="Version it is pinned to; NULL: whatever is served")
    state: Mapped[str] = mapped_column(server_default=EvaluationState.RUNNING, comment="Where it is in its life")
    reason: Mapped[str | None] = mapped_column(comment="Why it is in this state, in words")
    episodes: Mapped[int | None] = mapped_column(comment="Scored samples")
    mean_reward: Mapped[float | None] = mapped_column(comment="Mean reward over scored samples")
    pass_at: Mapped[dict[str, Any] | None] = mapped_column(comment="k: unbiased pass@k, mean over tasks")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When it started")
    ended_at: Mapped[datetime | None] = mapped_column(comment="When it ended; NULL while it runs")

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "environment"], ["environments.run_id", "environments.label"]),
        one_of("split", SPLITS[1:]),
        one_of("state", EvaluationState),
        CheckConstraint("tasks >= 1 AND samples >= 1", name="sizes"),
        CheckConstraint("policy_version >= 0", name="version"),
        CheckConstraint("episodes BETWEEN 0 AND tasks::bigint * samples", name="episodes"),
        finite("threshold"),
        finite("mean_reward"),
        CheckConstraint("(ended_at IS NULL) = (state = 'running')", name="ended"),
        CheckConstraint("state <> 'completed' OR (episodes IS NOT NULL AND pass_at IS NOT NULL)", name="completed"),
        {"comment": "Evaluations of a run and their results"},
    )


class Group(Base):
    """G episodes of one task."""

    __tablename__ = "groups"

    run_id: Mapped[str] = mapped_column(primary_key=True, comment="The run")
    group_no: Mapped[int] = mapped_column(primary_key=True, comment="Number in the run, without gaps")
    kind: Mapped[str] = mapped_column(comment="train or eval")
    environment: Mapped[str] = mapped_column(comment="Label of its environment")
    task_key: Mapped[str] = mapped_column(comment="Its task")
    draw: Mapped[int] = mapped_column(BigInteger, comment="Position in the environment's seeded order, or in the set")
    size: Mapped[int] = mapped_column(comment="Episodes it should have")
    evaluation: Mapped[str | None] = mapped_column(comment="The evaluation it belongs to; NULL for training groups")
    state: Mapped[str] = mapped_column(server_default=GroupState.ADMITTED, comment="Where it is in its life")
    failure: Mapped[str | None] = mapped_column(comment="Whose fault it is; set exactly where it failed")
    reason: Mapped[str | None] = mapped_column(comment="Why it is in this state, in words")
    valid: Mapped[int | None] = mapped_column(comment="Valid members when it was closed")
    mean_reward: Mapped[float | None] = mapped_column(comment="Mean over valid, scored members when it was closed")
    sampled_tokens: Mapped[int] = mapped_column(
        BigInteger, server_default="0", comment="Tokens sampled by all its episodes, failed attempts included"
    )
    admitted_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When it was admitted")
    started_at: Mapped[datetime | None] = mapped_column(comment="When its first episode started")
    closed_at: Mapped[datetime | None] = mapped_column(comment="When its workflow was done with it")
    oldest_version: Mapped[int | None] = mapped_column(
        comment="Oldest version that sampled a token of a valid member when it was closed; NULL: none did"
    )
    reported_in: Mapped[int | None] = mapped_column(
        comment="Number of the first batch that was leased after it was closed: whose mean reward it is in"
    )

    __table_args__ = (
        ForeignKeyConstraint(
            ["run_id", "environment", "task_key"], ["tasks.run_id", "tasks.environment", "tasks.task_key"]
        ),
        ForeignKeyConstraint(["run_id", "evaluation"], ["evaluations.run_id", "evaluations.name"]),
        ForeignKeyConstraint(["run_id", "reported_in"], ["batches.run_id", "batches.batch_no"]),
        one_of("kind", KINDS),
        one_of("state", GroupState),
        one_of("failure", FailureKind),
        CheckConstraint("group_no >= 0 AND draw >= 0 AND size >= 1 AND sampled_tokens >= 0", name="numbers"),
        CheckConstraint("(kind = 'eval') = (evaluation IS NOT NULL)", name="evaluation"),
        CheckConstraint("(state = 'failed') = (failure IS NOT NULL)", name="failed"),
        CheckConstraint(f"(closed_at IS NULL) = ({OPEN})", name="closed"),
        CheckConstraint(
            "(closed_at IS NULL) = (valid IS NULL) AND coalesce(valid, 0) BETWEEN 0 AND size", name="valid"
        ),
        CheckConstraint("mean_reward IS NULL OR coalesce(valid, 0) > 0", name="mean_reward"),
        CheckConstraint("oldest_version >= 0", name="oldest_version"),
        CheckConstraint("kind = 'train' OR state NOT IN ('leased', 'trained', 'stale')", name="trained"),
        finite("mean_reward"),
        Index("uq_groups_draw", "run_id", "environment", "draw", unique=True, postgresql_where=text("kind = 'train'")),
        Index("uq_groups_sample", "run_id", "evaluation", "draw", unique=True, postgresql_where=text("kind = 'eval'")),
        Index("ix_groups_open", "run_id", "group_no", postgresql_where=text(OPEN)),
        Index("ix_groups_sealed", "run_id", "group_no", postgresql_where=text("kind = 'train' AND state = 'sealed'")),
        Index(
            "ix_groups_ageing",
            "run_id",
            "oldest_version",
            postgresql_where=text("kind = 'train' AND state = 'sealed'"),
        ),
        Index(
            "ix_groups_unreported",
            "run_id",
            "group_no",
            postgresql_where=text("kind = 'train' AND closed_at IS NOT NULL AND reported_in IS NULL"),
        ),
        Index("ix_groups_counted", "run_id", "kind", "environment", "state", postgresql_include=["sampled_tokens"]),
        {"comment": "Groups: G episodes of one task, admitted together and sealed together"},
    )


class PolicyVersion(Base):
    """A version of the weights."""

    __tablename__ = "policy_versions"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True, comment="The run")
    version: Mapped[int] = mapped_column(
        primary_key=True, comment="Number of the version; 0 is what the run began with"
    )
    label: Mapped[str] = mapped_column(comment="What engines call these weights")
    path: Mapped[str | None] = mapped_column(comment="Where the weights are; NULL: where the engine found them")
    digest: Mapped[str | None] = mapped_column(comment="Hash of the checkpoint at `path`; NULL: it is no checkpoint")
    probe: Mapped[dict[str, Any] | None] = mapped_column(
        comment="Token sequences with the trainer's logprobs before and after: how engines prove that they hold it"
    )
    published_at: Mapped[datetime | None] = mapped_column(
        comment="When every engine that could be reached held it; NULL: not yet"
    )
    seq: Mapped[int] = mapped_column(
        BigInteger, server_default=text("nextval('policy_versions_seq')"), comment="Order of writing, across tables"
    )
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When the version came to exist")

    __table_args__ = (
        CheckConstraint("version >= 0", name="version"),
        CheckConstraint("label <> ''", name="label"),
        CheckConstraint("digest IS NULL OR path IS NOT NULL", name="digest"),
        Index("uq_policy_versions_label", "run_id", "label", unique=True),
        {"comment": "Versions of the policy; a version exists when its row commits"},
    )


class Engine(Base):
    """An inference server of a run."""

    __tablename__ = "engines"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True, comment="The run")
    engine_id: Mapped[str] = mapped_column(primary_key=True, comment="Derived from its URL")
    kind: Mapped[str] = mapped_column(comment="Which server it is")
    url: Mapped[str] = mapped_column(comment="Base URL")
    concurrency: Mapped[int] = mapped_column(comment="Requests it is given at once")
    api_key_env: Mapped[str | None] = mapped_column(comment="Environment variable that holds its key")
    hosted: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="How it is spoken to where it takes messages, not tokens"
    )
    state: Mapped[str] = mapped_column(server_default=EngineState.READY, comment="Whether it may be given work")
    reason: Mapped[str | None] = mapped_column(comment="Why it is in this state, in words")
    weight_label: Mapped[str | None] = mapped_column(comment="Weights it last reported")
    incarnation: Mapped[str | None] = mapped_column(comment="Which process of it answered last")
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When any of this last changed")

    __table_args__ = (
        one_of("state", EngineState),
        CheckConstraint("concurrency >= 1", name="concurrency"),
        {"comment": "Inference servers of a run"},
    )


class Event(Base):
    """Something that happened to a run, for people."""

    __tablename__ = "events"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True, comment="The run")
    seq: Mapped[int] = mapped_column(
        BigInteger,
        server_default=text("nextval('events_seq')"),
        primary_key=True,
        comment="Order of writing; gaps mean nothing",
    )
    kind: Mapped[str] = mapped_column(comment="What sort of event, one word")
    text: Mapped[str] = mapped_column(comment="What happened, in words")
    data: Mapped[dict[str, Any]] = mapped_column(comment="The same for machines")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When it was written")

    __table_args__ = (
        CheckConstraint("kind <> ''", name="kind"),
        {"comment": "What happened to a run; rows are only ever added"},
    )
