"""A worker as its supervisor starts it."""

import asyncio
import sys
from pathlib import Path

import pytest
from atropos.settings import child_environment

from ..support.world import World

READY_S = 60.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has loaded")
@pytest.mark.parametrize(("role", "computes"), [("trainer", True), ("control", False)])
async def test_a_worker_that_trains_has_loaded_torch_once_it_is_ready(
    world: World, temporal_address: str, tmp_path: Path, role: str, computes: bool
) -> None:
    ready = tmp_path / "ready"
    variables: dict[str, str | None] = {
        "TEMPORAL_ADDRESS": temporal_address,
        "TEMPORAL_NAMESPACE": world.client.namespace,
        "DATABASE_URL": world.database,
        "ATROPOS_HOME": str(tmp_path / "home"),
        "ATROPOS_READY_FILE": str(ready),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atropos.cli.worker", "--roles", role), env=child_environment(variables, inherit=True)
    )
    try:
        async with asyncio.timeout(READY_S):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.05)
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
    finally:
        process.terminate()
        await process.wait()
    assert ("libtorch" in loaded) is computes
