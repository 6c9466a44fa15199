"""The reward of an episode by a chosen version of its scorers."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_REWARD = """
CREATE FUNCTION episode_reward(
  run text, group_number int, member_number int, attempt_number int, version text DEFAULT 'first'
) RETURNS double precision LANGUAGE sql STABLE PARALLEL SAFE RETURN (
  SELECT CASE WHEN bool_or(s.value IS NULL) THEN NULL ELSE sum(s.weight * s.value ORDER BY s.seq) END
  FROM (
    SELECT DISTINCT ON (name) name, value, weight, seq FROM scores
    WHERE (run_id, group_no, member, attempt) = (run, group_number, member_number, attempt_number) AND NOT metric
    ORDER BY name, value IS NULL, scorer_version <> version, CASE version WHEN 'latest' THEN -seq ELSE seq END
  ) AS s)
"""
_SAYS = (
    "The weighted sum of an episode''s scores: of each name the value of that version, or the first there is; "
    "first and latest name no version but the order of writing; NULL where a part has no value"
)


def upgrade() -> None:
    op.execute(_REWARD)
    op.execute(f"COMMENT ON FUNCTION episode_reward(text, int, int, int, text) IS '{_SAYS}'")


def downgrade() -> None:
    op.execute("DROP FUNCTION episode_reward(text, int, int, int, text)")
