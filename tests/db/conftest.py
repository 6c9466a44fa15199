from collections.abc import AsyncIterator

import pytest
from atropos.db.store import Store, open_store


@pytest.fixture(scope="module")
async def store(database_url: str) -> AsyncIterator[Store]:
    """A store over the module's own database."""
    opened = await open_store(database_url)
    yield opened
    await opened.close()
