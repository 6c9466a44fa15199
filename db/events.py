"""What happened to a run, for people: rows are only ever added."""

from typing import Any

from .encoding import clean, encode
from .store import Store


async def add_event(store: Store, run_id: str, kind: str, text: str, data: dict[str, Any] | None = None) -> None:
    """Append an event. `kind`: one word; `text`: a sentence for people; `data`: the same for machines."""
    async with store.direct() as connection:
        await connection.execute(
            "INSERT INTO events (run_id, kind, text, data) VALUES (%s, %s, %s, %s::jsonb)",
            (run_id, clean(kind), clean(text), encode(data or {}).display),
        )
