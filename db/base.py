"""What all tables share: column types, constraint names and the checks made from the enums of `contracts`.

Invariant: states and kinds are text with a CHECK generated from the StrEnum that names them, so the database itself
refuses an unknown word, and adding one is a plain replacement of a constraint in a migration.
"""

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import CheckConstraint, DateTime, Double, LargeBinary, MetaData, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase

NAMES = {
    "pk": "pk_%(table_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(referred_table_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
}


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        float: Double(),
        bytes: LargeBinary(),
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB(),
        list[Any]: JSONB(),
    }


def one_of(column: str, words: type[StrEnum] | Iterable[str]) -> CheckConstraint:
    """The column holds one of these words (or NULL where it may)."""
    listed = ", ".join(f"'{word}'" for word in words)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


def finite(column: str) -> CheckConstraint:
    """The number is neither NaN (which Postgres sorts above infinity) nor infinite."""
    return CheckConstraint(f"{column} > '-Infinity' AND {column} < 'Infinity'", name=f"{column}_finite")
