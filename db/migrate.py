"""Bring a database to the schema of this build, or say what is wrong with it.

Invariant: all missing migrations run in one transaction behind one advisory lock, so that two processes that start
together migrate once, and a migration that fails leaves the schema as it was. A migration never waits long for a
table: whoever wants to write would wait behind it. It gives up after a moment, with all it did, and tries again.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg.errors import LockNotAvailable
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from .errors import SchemaTooNew, SchemaTooOld, StoreBusy, StoreError
from .store import CONNECT_TIMEOUT_S, parse_url, unreachable

LOCK: Final = 0x6174726F706F73
"""Any fixed number; this one spells `atropos`."""
_HOW: Final = "run `atropos db upgrade`"
LOCK_S: Final = 3
"""Seconds that a migration waits for a table which somebody reads or writes, and all later ones behind it."""
TRIES: Final = 10
_APART_S: Final = 2.0


def upgrade(url: str, revision: str = "head") -> None:
    """Run the migrations that are missing. Safe to call from several processes at once.

    Raises StoreUnreachable, StoreBusy where somebody holds a table for long, or SchemaTooNew where a newer build was
    here.
    """

    def migrate(connection: Connection) -> None:
        _refuse_newer(_current(connection), _scripts())
        command.upgrade(_config(connection), revision)

    _changed(url, migrate)


def downgrade(url: str, revision: str) -> None:
    """Undo migrations down to `revision` (`base`: all, and with them every row). For tests and emergencies."""
    _changed(url, lambda connection: command.downgrade(_config(connection), revision))


def _changed(url: str, change: Callable[[Connection], None]) -> None:
    """Change the schema alone. Raises StoreBusy where a table could not be had in many tries."""
    for again in reversed(range(TRIES)):
        try:
            with _transaction(url) as connection:
                # Behind another migration we wait as long as it takes: nobody waits behind us for that.
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
                connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_S}s'"))
                change(connection)
                break
        except DBAPIError as error:
            if not isinstance(error.orig, LockNotAvailable):
                raise
            if not again:
                raise StoreBusy(
                    "The schema was not changed: a table is in use by a transaction that does not end (an export, a "
                    "dump or a session of psql, say); let that finish and try again."
                ) from error
        time.sleep(_APART_S)


def revisions(url: str) -> tuple[str | None, str]:
    """The schema that the database has (None: no tables yet), and the one this build needs."""
    with _transaction(url) as connection:
        return _current(connection), str(_scripts().get_current_head())


def check(url: str) -> None:
    """Raise SchemaTooOld or SchemaTooNew unless the database has exactly this build's schema."""
    scripts = _scripts()
    with _transaction(url) as connection:
        current = _current(connection)
    _refuse_newer(current, scripts)
    if current is None:
        raise SchemaTooOld(f"The database has no tables of Atropos yet: {_HOW}.")
    if current != scripts.get_current_head():
        raise SchemaTooOld(f"The database has schema {current}, this build needs {scripts.get_current_head()}: {_HOW}.")


def _refuse_newer(current: str | None, scripts: ScriptDirectory) -> None:
    if current is not None and current not in {script.revision for script in scripts.walk_revisions()}:
        raise SchemaTooNew(
            f"The database has schema {current}, which this build does not know: "
            "a newer build migrated it; upgrade this installation."
        )


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


@contextmanager
def _transaction(url: str) -> Iterator[Connection]:
    parsed = parse_url(url)
    options = {"connect_timeout": CONNECT_TIMEOUT_S, "prepare_threshold": None}
    engine = create_engine(parsed, poolclass=NullPool, connect_args=options)
    try:
        connection = engine.connect()
    except DBAPIError as error:
        raise unreachable(parsed, error.orig or error) from error
    with connection, connection.begin():
        yield connection


def main(arguments: list[str] | None = None) -> int:
    """`python -m atropos.db.migrate upgrade|check [--url URL]`; the URL defaults to DATABASE_URL."""
    parser = argparse.ArgumentParser(prog="python -m atropos.db.migrate", description="Migrate the trajectory store.")
    parser.add_argument("command", choices=("upgrade", "check"))
    parser.add_argument("--url", help="postgresql://user:password@host:port/database; default: DATABASE_URL")
    chosen = parser.parse_args(arguments)
    url = chosen.url or _configured_url()
    if url is None:
        parser.error("no database is named: pass --url or set DATABASE_URL")
    try:
        (upgrade if chosen.command == "upgrade" else check)(url)
    except StoreError as error:
        print(error, file=sys.stderr)
        return 1
    print("The schema is up to date.")
    return 0


def _configured_url() -> str | None:
    from ..settings import load_settings

    configured = load_settings().database_url
    return None if configured is None else configured.get_secret_value()


if __name__ == "__main__":
    sys.exit(main())
