"""Real questions to real servers: each answers None when all is well, else a short reason.

Asked by the supervisor while parts start, and by `status` whenever a person wants to know.
"""

import asyncio
import http.client
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import psycopg
from pydantic import SecretStr

from ...contracts.queues import QUEUE_OF, WORKFLOWS, WorkerRole
from ...db.errors import gist
from ...settings import temporal_connect_config

if TYPE_CHECKING:
    from temporalio.client import Client

_TIMEOUT_S: Final = 3.0


def check_database(url: SecretStr) -> str | None:
    """Whether Postgres answers `SELECT 1`."""
    try:
        with psycopg.connect(url.get_secret_value(), connect_timeout=3) as connection:
            connection.execute("SELECT 1")
    except psycopg.Error as error:
        return f"no answer ({gist(error)})"
    return None


class NamedEngine(NamedTuple):
    """An engine that a live run uses. `run_id`: the newest such run."""

    url: str
    run_id: str


def engines_of_runs(url: SecretStr) -> list[NamedEngine]:
    """Engines that live runs name; none where the database has no tables of ours, or others."""
    return [NamedEngine(*found) for found in asyncio.run(_engines_of_runs(url.get_secret_value()))]


async def _engines_of_runs(url: str) -> list[tuple[str, str]]:
    from sqlalchemy.exc import SQLAlchemyError

    from ...db.engines import engines_in_use
    from ...db.errors import StoreError
    from ...db.store import open_store

    try:
        store = await open_store(url, pool_size=1)
        try:
            return await engines_in_use(store)
        finally:
            await store.close()
    except (StoreError, SQLAlchemyError):
        return []


def check_http(base_url: str, path: str = "/health", *, timeout_s: float = _TIMEOUT_S) -> str | None:
    """Whether `GET base_url + path` answers 200."""
    parts = urlsplit(base_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path.rstrip("/") + path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"no answer ({error})"
    finally:
        connection.close()
    return None if status == 200 else f"HTTP status {status}"


def check_temporal(address: str | None) -> tuple[str | None, dict[str, int]]:
    """Whether Temporal is healthy, and how many pollers each of our task queues has."""
    return asyncio.run(_check_temporal(address))


async def _check_temporal(address: str | None) -> tuple[str | None, dict[str, int]]:
    from temporalio.client import Client
    from temporalio.service import RPCError

    try:
        async with asyncio.timeout(_TIMEOUT_S):
            client = await Client.connect(**temporal_connect_config(address))
            if not await client.service_client.check_health():
                return "it says it is not serving", {}
            pollers = {role: await _count_pollers(client, role) for role in WorkerRole}
    except (RuntimeError, RPCError, OSError) as error:
        return f"no answer ({(str(error).splitlines() or ['unknown'])[0]})", {}
    except TimeoutError:
        return f"no answer within {_TIMEOUT_S:.0f} s", {}
    return None, {QUEUE_OF[role]: count for role, count in pollers.items()}


async def _count_pollers(client: "Client", role: WorkerRole) -> int:
    from temporalio.api.enums.v1 import TaskQueueType
    from temporalio.api.taskqueue.v1 import TaskQueue
    from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

    queue = QUEUE_OF[role]
    kind = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW if queue == WORKFLOWS else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    answer = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind)
    )
    return len(answer.pollers)


def unpolled(pollers: dict[str, int], roles: Iterable[str]) -> list[str]:
    """Queues of these roles that nobody polls."""
    return [queue for role in roles if not pollers.get(queue := QUEUE_OF[WorkerRole(role)], 0)]
