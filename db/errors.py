"""What can go wrong in the store, as a tree; every message is one sentence for people, without secrets."""

import re
from typing import Final

_AROUND: Final = re.compile(r"^(?:connection failed: )?(?:connection to server .*? failed: )?(?:FATAL: +)?")
"""What libpq and psycopg put before the reason; the address is in our own sentence."""


class StoreError(Exception):
    """Base of everything the store raises on purpose."""


class StoreUnreachable(StoreError):
    """Postgres did not answer or went away. Trying again may help."""


class StoreBusy(StoreUnreachable):
    """Postgres is there, but others were in the way for longer than we wait. Trying again may help as well."""


class SchemaMismatch(StoreError):
    """The database's schema is not the one this build needs."""


class SchemaTooOld(SchemaMismatch):
    """Migrations are missing."""


class SchemaTooNew(SchemaMismatch):
    """A newer build migrated the database."""


class RunExists(StoreError):
    """The run's id is taken by a run with another document."""


class Unknown(StoreError):
    """A run, group, episode, engine or evaluation that has no row."""


class Unreadable(StoreError):
    """A row that this build cannot read: another one wrote it, with other rules."""


class Refused(StoreError):
    """A change that contradicts what is stored; nothing of it was written."""


def gist(error: BaseException) -> str:
    """What a driver's error comes down to: the last reason it gives, without the address and the advice around it."""
    lines = [line.strip() for line in str(error).splitlines() if "is the server running" not in line.lower()]
    last = next((line for line in reversed(lines) if line), type(error).__name__)
    return _AROUND.sub("", last).strip().rstrip(".") or type(error).__name__


class WrongWeights(StoreError):
    """A completion of weights that its engine was found not to hold; it has to be sampled again."""


class Unsettled(StoreError):
    """What is to be done rests on turns that are provisional still. Trying again soon helps."""
