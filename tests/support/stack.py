"""One Temporal and one Postgres for the whole test session, started through the dev stack's own parts.

`database_url` gives every test module a database of its own, copied from a migrated template, so modules never
see each other's rows. `ATROPOS_TEST_DATABASE_URL` names another server to use (a superuser's URL, for instance a
Postgres 15); then only Temporal is started.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from atropos.cli.stack.options import StackOptions
from atropos.cli.stack.running import RunningStack, running_stack

EXTERNAL = os.environ.get("ATROPOS_TEST_DATABASE_URL", "").replace("postgresql+psycopg:", "postgresql:", 1) or None


class Databases:
    """Databases of one server, all dropped at the end of the session."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._made: list[str] = []
        self._template: str | None = None

    def empty(self) -> str:
        """URL of a new, empty database."""
        return self._create("")

    def fresh(self) -> str:
        """URL of a new database with the current schema."""
        if self._template is None:
            from atropos.db.migrate import upgrade

            url = self._create("")
            upgrade(url)
            self._template = urlsplit(url).path.removeprefix("/")
        return self._create(f'TEMPLATE "{self._template}"')

    def drop(self, url: str) -> None:
        """Drop a database, ending whatever sessions are left in it."""
        name = urlsplit(url).path.removeprefix("/")
        self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        self._made.remove(url)

    def drop_all(self) -> None:
        """Drop everything that was made."""
        for url in tuple(self._made):
            self.drop(url)

    def _create(self, clause: str) -> str:
        name = f"test_{uuid.uuid4().hex[:12]}"
        self._execute(f'CREATE DATABASE "{name}" {clause}')
        url = urlunsplit(urlsplit(self._server_url)._replace(path=f"/{name}"))
        self._made.append(url)
        return url

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(statement)


@pytest.fixture(scope="session")
def embedded_stack() -> Iterator[RunningStack]:
    """Temporal, and Postgres unless another one was named, for the whole session."""
    home = Path(tempfile.mkdtemp(prefix="atropos-test-", dir="/tmp"))
    home.chmod(0o755)  # Postgres must get through when the tests run as root
    options = StackOptions(postgres=EXTERNAL is None, migrate=False, workers=False)
    try:
        with running_stack(home, options) as stack:
            yield stack
    finally:
        with suppress(OSError):
            shutil.rmtree(home)


@pytest.fixture(scope="session")
def temporal_address(embedded_stack: RunningStack) -> str:
    """`host:port` of a real Temporal server with our search attributes."""
    assert embedded_stack.temporal_address is not None
    return embedded_stack.temporal_address


@pytest.fixture(scope="session")
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """The factory of databases."""
    url = EXTERNAL
    if url is None:
        stack: RunningStack = request.getfixturevalue("embedded_stack")
        assert stack.database_url is not None
        url = stack.database_url.get_secret_value()
    made = Databases(url)
    yield made
    made.drop_all()


@pytest.fixture(scope="session")
def fresh_database(databases: Databases) -> Callable[[], str]:
    """A function that makes one more migrated database and returns its URL; all are dropped at the end."""
    return databases.fresh


@pytest.fixture(scope="module")
def database_url(databases: Databases) -> Iterator[str]:
    """A migrated database for this test module alone."""
    url = databases.fresh()
    yield url
    databases.drop(url)
