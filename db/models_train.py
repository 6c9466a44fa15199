"""Tables of training: batches, what they hold, the steps that consumed them and where each version went.

Invariant: a batch's groups are fixed when its row is inserted; only its fence and its state change. A step exists
exactly where its batch is committed, its groups are trained and its version exists: one transaction writes all four.
A group is in at most one batch that is not abandoned.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from ..contracts.states import BatchState, PublicationState
from .base import Base, finite, one_of


class Batch(Base):
    """The groups of one train step."""

    __tablename__ = "batches"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True, comment="The run")
    batch_no: Mapped[int] = mapped_column(primary_key=True, comment="Number of the batch in the run, from 0")
    step: Mapped[int] = mapped_column(comment="The train step it is for; it starts from the version of this number")
    state: Mapped[str] = mapped_column(server_default=BatchState.LEASED, comment="Where the batch is in its life")
    fence: Mapped[int] = mapped_column(
        server_default="0", comment="Raised by every trainer that takes the batch; only the newest may commit"
    )
    owner: Mapped[str | None] = mapped_column(comment="Who took it last, for people")
    reward_mean: Mapped[float | None] = mapped_column(
        comment="Mean reward of the scored episodes that were closed since the last batch, filtered ones included"
    )
    rewards: Mapped[int] = mapped_column(comment="How many episodes that is the mean of")
    filtered: Mapped[int] = mapped_column(comment="Groups without signal among those closed since the batch before")
    stale: Mapped[int] = mapped_column(comment="Groups dropped as stale when this batch was taken")
    leased_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When its groups were fixed")
    ended_at: Mapped[datetime | None] = mapped_column(comment="When it was committed or abandoned")

    __table_args__ = (
        one_of("state", BatchState),
        CheckConstraint("batch_no >= 0 AND step >= 0 AND fence >= 0", name="numbers"),
        CheckConstraint("rewards >= 0 AND filtered >= 0 AND stale >= 0", name="counts"),
        CheckConstraint("(rewards = 0) = (reward_mean IS NULL)", name="reward_mean"),
        finite("reward_mean"),
        CheckConstraint("(ended_at IS NULL) = (state = 'leased')", name="ended"),
        Index("uq_batches_leased", "run_id", unique=True, postgresql_where=text("state = 'leased'")),
        Index("uq_batches_step", "run_id", "step", unique=True, postgresql_where=text("state <> 'abandoned'")),
        {"comment": "Batches: groups leased together for one train step"},
    )


class BatchGroup(Base):
    """A group of a batch."""

    __tablename__ = "batch_groups"

    run_id: Mapped[str] = mapped_column(primary_key=True, comment="The run")
    batch_no: Mapped[int] = mapped_column(primary_key=True, comment="The batch")
    group_no: Mapped[int] = mapped_column(primary_key=True, comment="The group")
    live: Mapped[bool] = mapped_column(server_default="true", comment="False once the batch is abandoned")

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "batch_no"], ["batches.run_id", "batches.batch_no"]),
        ForeignKeyConstraint(["run_id", "group_no"], ["groups.run_id", "groups.group_no"]),
        Index("uq_batch_groups_live", "run_id", "group_no", unique=True, postgresql_where=text("live")),
        {"comment": "Groups of a batch; fixed when the batch is inserted"},
    )


class TrainStep(Base):
    """A committed train step."""

    __tablename__ = "train_steps"

    run_id: Mapped[str] = mapped_column(primary_key=True, comment="The run")
    step: Mapped[int] = mapped_column(primary_key=True, comment="Number of the step: it made version step + 1")
    batch_no: Mapped[int] = mapped_column(comment="The batch it consumed")
    fence: Mapped[int] = mapped_column(comment="Under which fence it was committed")
    version: Mapped[int] = mapped_column(comment="The version it made")
    groups: Mapped[int] = mapped_column(comment="Groups it consumed")
    staleness: Mapped[int] = mapped_column(comment="Step minus the oldest version that sampled one of its tokens")
    metrics: Mapped[dict[str, Any]] = mapped_column(comment="What the step measured, by name")
    seq: Mapped[int] = mapped_column(
        BigInteger, server_default=text("nextval('policy_versions_seq')"), comment="Order of writing, across tables"
    )
    committed_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When it was committed")

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "batch_no"], ["batches.run_id", "batches.batch_no"]),
        ForeignKeyConstraint(["run_id", "version"], ["policy_versions.run_id", "policy_versions.version"]),
        CheckConstraint("version = step + 1", name="version"),
        CheckConstraint("groups >= 1 AND staleness >= 0 AND step >= 0 AND fence >= 0", name="numbers"),
        CheckConstraint("jsonb_typeof(metrics) = 'object'", name="metrics_json"),
        Index("uq_train_steps_batch", "run_id", "batch_no", unique=True),
        {"comment": "Train steps that were committed, each with the batch it consumed and the version it made"},
    )


class Publication(Base):
    """A version on one life of one engine."""

    __tablename__ = "publications"

    run_id: Mapped[str] = mapped_column(primary_key=True, comment="The run")
    engine_id: Mapped[str] = mapped_column(primary_key=True, comment="The engine")
    incarnation: Mapped[str] = mapped_column(primary_key=True, comment="Which process of it")
    version: Mapped[int] = mapped_column(primary_key=True, comment="The version it was given")
    state: Mapped[str] = mapped_column(
        server_default=PublicationState.LOADING, comment="Whether the engine proved that it holds the version"
    )
    reason: Mapped[str | None] = mapped_column(comment="What was found, in words")
    distance: Mapped[float | None] = mapped_column(
        comment="Mean distance of its logprobs on known tokens from the trainer's; NULL: not measured"
    )
    seq: Mapped[int] = mapped_column(
        BigInteger,
        server_default=text("nextval('turns_seq')"),
        comment="Order of writing, one order with the turns; set anew at each load",
    )
    first_seq: Mapped[int] = mapped_column(
        BigInteger,
        server_default=text("nextval('turns_seq')"),
        comment="The same of its first load, which a later one leaves as it is",
    )
    proved: Mapped[bool] = mapped_column(
        server_default="false", comment="Whether any of its loads was found to hold the version"
    )
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="When its state last changed")

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "engine_id"], ["engines.run_id", "engines.engine_id"]),
        ForeignKeyConstraint(["run_id", "version"], ["policy_versions.run_id", "policy_versions.version"]),
        one_of("state", PublicationState),
        CheckConstraint("state NOT IN ('verified', 'unverified') OR proved", name="proved"),
        CheckConstraint("distance >= 0", name="distance"),
        finite("distance"),
        {"comment": "Which version was given to which life of which engine, and what the probe found"},
    )
