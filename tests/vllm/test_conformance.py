"""vLLM passes the suite that any engine must pass."""

import httpx
import pytest
from atropos.tests.inference.conformance import CHECKS, Check, Target

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_vllm(check: Check, client: httpx.AsyncClient, target: Target) -> None:
    await check(client, target)
