"""Tasks as stored: what a task's data was when it was first drawn.

Invariant: a task's row never changes but for its quarantine, so an episode that is started again gets the same data.
"""

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from .errors import Unknown
from .models import TaskRow
from .store import Store


@dataclass(frozen=True)
class StoredTask:
    """Plain JSON data of a task and what rides along."""

    data: Any
    info: dict[str, Any]


async def load_task(store: Store, run_id: str, environment: str, task_key: str) -> StoredTask:
    """The task. Raises Unknown."""
    query = select(TaskRow.data, TaskRow.info, TaskRow.exact).where(
        TaskRow.run_id == run_id, TaskRow.environment == environment, TaskRow.task_key == task_key
    )
    async with store.begin() as connection:
        row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise Unknown(f"The run {run_id} has no task {task_key} of {environment} in the store.")
    return StoredTask(row.data, row.info) if row.exact is None else StoredTask(*json.loads(row.exact))
