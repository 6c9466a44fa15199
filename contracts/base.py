"""The two base models of everything that crosses a floor of the house.

Invariant: what crosses is immutable and says no to fields it does not know, so that a typo in a file a person
wrote is refused instead of ignored. Workflow inputs and results ignore unknown fields on purpose: a worker of the
previous build must still decode what a newer one wrote.
"""

from typing import Final

from pydantic import BaseModel, ConfigDict

MOST: Final = 2**31 - 1
"""The largest whole number that a column of counts, numbers or sizes holds: nothing larger is taken from a person."""


class Wire(BaseModel):
    """Inputs and results of workflows and activities: frozen, tolerant of fields a newer build added."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Strict(BaseModel):
    """What people write (run files, environment configs): frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
