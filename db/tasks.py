"""Tasks as stored: what a task's data was when it was first drawn.

Invariant: a task's row never changes but for its quarantine, so an episode that is started again gets the same data.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select

from ..contracts.ids import GroupKey
from .errors import Unknown
from .models import TaskRow
from .store import Store


@dataclass(frozen=True)
class StoredTask:
    """Plain JSON data of a task and what rides along."""

    data: Any
    info: dict[str, Any]


@dataclass(frozen=True)
class Opening:
    """What an episode of a group begins with."""

    environment: str
    task_key: str
    task: StoredTask


_OPENING: Final = """
SELECT g.environment, g.task_key, t.data::text, t.info::text, t.exact
FROM groups g JOIN tasks t ON t.run_id = g.run_id AND t.environment = g.environment AND t.task_key = g.task_key
WHERE g.run_id = %(run)s AND g.group_no = %(group)s
"""


async def load_opening(store: Store, key: GroupKey) -> Opening:
    """The group's environment and task, in one round trip. Raises Unknown."""
    values = {"run": key.run_id, "group": key.group_no}
    async with store.direct() as connection:
        row = await (await connection.execute(_OPENING, values, binary=True)).fetchone()
    if row is None:
        raise Unknown(f"There is no group {key.workflow_id} in the store.")
    environment, task_key, data, info, exact = row
    task_data, task_info = (json.loads(data), json.loads(info)) if exact is None else json.loads(exact)
    return Opening(environment, task_key, StoredTask(task_data, task_info))


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
