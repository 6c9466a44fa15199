"""More of what is illegal is refused; the oldest version of a group is a column; SQL functions that read tokens."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_SPANS = (
    "CASE WHEN jsonb_typeof(spans) <> 'array' THEN false"
    " WHEN octet_length(sampled) = 0 THEN spans = '[]'"
    " ELSE coalesce((spans->0->>2)::int = 0 AND (spans->-1->>3)::int = octet_length(sampled) / 4, false) END"
)


def _ids(column: str) -> str:
    return f"octet_length({column}) % 4 = 0 AND encode({column}, 'hex') !~ '^(?:.{{8}})*.{{6}}[89a-f]'"


_CHANGED = {
    ("episodes", "done"): (
        "state <> 'done' OR (stop <> 'failed' AND coalesce(failure, 'policy') IN ('policy', 'judge'))",
        "state <> 'done' OR stop <> 'failed'",
    ),
    ("turns", "ids"): (
        f"{_ids('prompt_delta')} AND {_ids('sampled')}",
        "octet_length(prompt_delta) % 4 = 0 AND octet_length(sampled) % 4 = 0",
    ),
    ("turns", "version"): (
        "(octet_length(sampled) = 0) = (policy_version IS NULL) AND coalesce(policy_version, 0) >= 0",
        "(octet_length(sampled) = 0) = (policy_version IS NULL)",
    ),
    ("partial_turns", "ids"): (_ids("sampled"), "octet_length(sampled) % 4 = 0 AND octet_length(sampled) > 0"),
    ("segments", "ids"): (_ids("prompt"), "octet_length(prompt) % 4 = 0"),
    ("groups", "valid"): (
        "(closed_at IS NULL) = (valid IS NULL) AND coalesce(valid, 0) BETWEEN 0 AND size",
        "valid BETWEEN 0 AND size",
    ),
    ("train_steps", "numbers"): (
        "groups >= 1 AND staleness >= 0 AND step >= 0 AND fence >= 0",
        "groups >= 1 AND staleness >= 0",
    ),
}
"""(table, name): the condition from now on, and the one before."""

_ADDED = {
    ("runs", "config_json"): "jsonb_typeof(config) = 'object'",
    ("evaluations", "version"): "policy_version >= 0",
    ("evaluations", "episodes"): "episodes BETWEEN 0 AND tasks::bigint * samples",
    ("policy_versions", "label"): "label <> ''",
    ("policy_versions", "digest"): "digest IS NULL OR path IS NOT NULL",
    ("events", "kind"): "kind <> ''",
    ("groups", "mean_reward"): "mean_reward IS NULL OR coalesce(valid, 0) > 0",
    ("groups", "oldest_version"): "oldest_version >= 0",
    ("groups", "trained"): "kind = 'train' OR state NOT IN ('leased', 'trained', 'stale')",
    ("episodes", "version"): "(sampled_tokens = 0) = (policy_version IS NULL) AND coalesce(policy_version, 0) >= 0",
    ("episodes", "prompt_json"): "jsonb_typeof(prompt) = 'array'",
    ("turns", "spans"): _SPANS,
    ("turns", "message_json"): "jsonb_typeof(message) = 'object'",
    ("partial_turns", "sampled"): "octet_length(sampled) > 0",
    ("partial_turns", "spans"): _SPANS,
    ("tool_calls", "call_json"): "jsonb_typeof(call) = 'object'",
    ("tool_calls", "replies_json"): "jsonb_typeof(replies) = 'array'",
    ("evaluation_samples", "sample"): "sample >= 0",
    ("late_results", "numbers"): "group_no >= 0 AND member >= 0 AND attempt >= 0",
    ("train_steps", "metrics_json"): "jsonb_typeof(metrics) = 'object'",
    ("publications", "proved"): "state NOT IN ('verified', 'unverified') OR proved",
    ("publications", "distance"): "distance >= 0",
}

_SEALED = sa.text("kind = 'train' AND state = 'sealed'")

# The concatenation brings a stored value into memory once; without it each byte would be fetched anew.
_IDS = """
CREATE FUNCTION atropos_ids(packed bytea) RETURNS int[] LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE b bytea := packed || ''::bytea;
BEGIN
  RETURN array(
    SELECT get_byte(b, i) | (get_byte(b, i + 1) << 8) | (get_byte(b, i + 2) << 16) | (get_byte(b, i + 3) << 24)
    FROM generate_series(0, octet_length(b) - 4, 4) AS i);
END $$
"""

_LOGPROBS = """
CREATE FUNCTION atropos_logprobs(packed bytea) RETURNS real[] LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
BEGIN
  RETURN array(
    SELECT (CASE WHEN bits < 0 THEN -1 ELSE 1 END * CASE exponent
      WHEN 0 THEN fraction * 2::float8 ^ (-149)
      ELSE (fraction + 8388608) * 2::float8 ^ (exponent - 150) END)::real
    FROM (
      SELECT bits, (bits >> 23) & 255 AS exponent, (bits & 8388607)::float8 AS fraction
      FROM unnest(atropos_ids(packed)) AS bits
    ) AS parts);
END $$
"""

_MASK = """
CREATE FUNCTION atropos_mask(packed bytea) RETURNS int[] LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE b bytea := packed || ''::bytea;
BEGIN
  RETURN array(SELECT get_byte(b, i) FROM generate_series(0, octet_length(b) - 1) AS i);
END $$
"""

_FUNCTIONS = {
    "atropos_ids": (_IDS, "Token ids of a packed column (prompt_delta, sampled, segments.prompt) as int[]"),
    "atropos_logprobs": (_LOGPROBS, "Log-probabilities of a packed column as real[], exactly what was stored"),
    "atropos_mask": (_MASK, "The mask of a turn as int[]: 1 trains, 0 does not"),
}


def upgrade() -> None:
    op.add_column(
        "groups",
        sa.Column(
            "oldest_version",
            sa.Integer(),
            nullable=True,
            comment="Oldest version that sampled a token of a valid member when it was closed; NULL: none did",
        ),
    )
    op.execute(
        "UPDATE groups g SET oldest_version = (SELECT min(e.policy_version) FROM episodes e"
        " WHERE e.run_id = g.run_id AND e.group_no = g.group_no AND e.state = 'done') WHERE closed_at IS NOT NULL"
    )
    for (table, name), (condition, _) in _CHANGED.items():
        _replace(table, name, condition)
    for (table, name), condition in _ADDED.items():
        op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, condition)
    op.create_foreign_key(
        op.f("fk_groups_batches"), "groups", "batches", ["run_id", "reported_in"], ["run_id", "batch_no"]
    )
    op.create_index("ix_groups_ageing", "groups", ["run_id", "oldest_version"], postgresql_where=_SEALED)
    op.create_index(
        "uq_batches_leased", "batches", ["run_id"], unique=True, postgresql_where=sa.text("state = 'leased'")
    )
    op.create_index("uq_train_steps_batch", "train_steps", ["run_id", "batch_no"], unique=True)
    op.create_index(
        "uq_evaluation_samples_episode", "evaluation_samples", ["run_id", "group_no", "member"], unique=True
    )
    for name, (statement, comment) in _FUNCTIONS.items():
        op.execute(statement)
        op.execute(f"COMMENT ON FUNCTION {name}(bytea) IS '{comment}'")


def downgrade() -> None:
    for name in reversed(_FUNCTIONS):
        op.execute(f"DROP FUNCTION {name}(bytea)")
    op.drop_index("uq_evaluation_samples_episode", table_name="evaluation_samples")
    op.drop_index("uq_train_steps_batch", table_name="train_steps")
    op.drop_index("uq_batches_leased", table_name="batches", postgresql_where=sa.text("state = 'leased'"))
    op.drop_index("ix_groups_ageing", table_name="groups", postgresql_where=_SEALED)
    op.drop_constraint(op.f("fk_groups_batches"), "groups", type_="foreignkey")
    for table, name in reversed(_ADDED):
        op.drop_constraint(op.f(f"ck_{table}_{name}"), table, type_="check")
    for (table, name), (_, before) in _CHANGED.items():
        _replace(table, name, before)
    op.drop_column("groups", "oldest_version")


def _replace(table: str, name: str, condition: str) -> None:
    op.drop_constraint(op.f(f"ck_{table}_{name}"), table, type_="check")
    op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, condition)
