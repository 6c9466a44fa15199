"""What happened to a run, for people: rows are only ever added."""

from collections.abc import Sequence
from typing import Any, Final

from .encoding import clean, encode
from .store import Store

INLINE_DEATH: Final = "inline_death"
INLINE_APART: Final = "inline_apart"
INLINE_SLOW: Final = "inline_slow"
IMPORT_DEATH: Final = "import_death"
ADVICE: Final = (INLINE_APART, INLINE_SLOW)
"""Kinds that tell the author of an environment what to do."""


async def add_event(store: Store, run_id: str, kind: str, text: str, data: dict[str, Any] | None = None) -> None:
    """Append an event. `kind`: one word; `text`: a sentence for people; `data`: the same for machines."""
    async with store.direct() as connection:
        await connection.execute(
            "INSERT INTO events (run_id, kind, text, data) VALUES (%s, %s, %s, %s::jsonb)",
            (run_id, clean(kind), clean(text), encode(data or {}).display),
        )


async def add_event_once(store: Store, run_id: str, kind: str, text: str, data: dict[str, Any] | None = None) -> None:
    """Append an event unless the run has one of that kind and text."""
    async with store.direct() as connection:
        await connection.execute(
            "INSERT INTO events (run_id, kind, text, data) SELECT %(run)s, %(kind)s, %(text)s, %(data)s::jsonb "
            "WHERE NOT EXISTS (SELECT FROM events WHERE run_id = %(run)s AND kind = %(kind)s AND text = %(text)s)",
            {"run": run_id, "kind": clean(kind), "text": clean(text), "data": encode(data or {}).display},
        )


async def event_texts(store: Store, run_id: str, kinds: Sequence[str], limit: int = 5) -> list[str]:
    """What the last events of these kinds say, in their order."""
    async with store.direct() as connection:
        cursor = await connection.execute(
            "SELECT text FROM events WHERE run_id = %s AND kind = ANY(%s) ORDER BY seq DESC LIMIT %s",
            (run_id, list(kinds), limit),
        )
        return [text for (text,) in await cursor.fetchall()][::-1]
