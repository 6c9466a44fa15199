"""Engines that a person took out."""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_OLD = ("ready", "down", "draining", "quarantined", "removed")
_NEW = ("ready", "down", "draining", "drained", "quarantined", "removed")


def _allow(states: tuple[str, ...]) -> None:
    op.drop_constraint(op.f("ck_engines_state"), "engines", type_="check")
    words = ", ".join(f"'{state}'" for state in states)
    op.create_check_constraint(op.f("ck_engines_state"), "engines", f"state IN ({words})")


def upgrade() -> None:
    _allow(_NEW)


def downgrade() -> None:
    """A drained engine goes back to work once it has been asked."""
    op.execute("UPDATE engines SET state = 'down' WHERE state = 'drained'")
    _allow(_OLD)
