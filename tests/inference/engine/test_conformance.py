"""The dev engine passes the suite that any engine must pass."""

import httpx
import pytest
from atropos.tests.inference.conformance import CHECKS, Check, Target


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_dev_engine(check: Check, client: httpx.AsyncClient, target: Target) -> None:
    await check(client, target)
