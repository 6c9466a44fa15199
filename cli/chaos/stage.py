"""What traps need to know about the stack and the run they are set in.

Invariant: a process is frozen only inside `frozen`, which lets it go on again unless it was killed meanwhile, and it is
signalled as itself, never as a number that another process may have by now.
"""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ...contracts.ids import EpisodeKey
from ...db.store import Direct
from ..errors import CommandError
from ..stack.files import StackHome
from ..stack.process import ProcessId, is_alive, send
from ..stack.state import PartState, PartStatus, read_state
from .journal import Journal, Place
from .rows import Rows

if TYPE_CHECKING:
    from temporalio.client import Client


@dataclass(frozen=True)
class Hit:
    """A kill that landed. `items`: what was in flight, as ids that its proof is looked up by later."""

    at: datetime
    process: ProcessId
    items: tuple[str, ...]
    places: tuple[Place, ...] = ()
    """Model calls sampled and not stored at the kill."""
    tokens: int = 0
    """Of them."""


@dataclass
class Stage:
    """A run on a stack."""

    home: StackHome
    rows: Rows
    client: "Client"
    journal: Journal
    database_url: str = field(repr=False)
    _settled: set[Place] = field(default_factory=set)

    @property
    def run_id(self) -> str:
        return self.rows.run_id

    def part(self, name: str) -> PartState:
        """The part as the supervisor sees it now. Raises CommandError where there is none."""
        state = read_state(self.home)
        found = next((part for part in state.parts if part.name == name), None) if state is not None else None
        if found is None:
            raise CommandError(f"The stack in {self.home.root} has no {name}; nothing can be killed there.")
        return found

    def ready(self, name: str) -> ProcessId | None:
        """The part's process, where it is ready."""
        part = self.part(name)
        return part.process if part.status is PartStatus.READY and is_alive(part.process) else None

    async def open_calls(self, through: Direct | None = None) -> list[Place]:
        """Model calls that a token was sampled for, of running episodes, and whose turn is not stored."""
        self.journal.read()
        places = self.journal.places(without=self._settled)
        settled = await self.rows.settled(places, through)
        self._settled |= settled
        return [place for place in places if place not in settled]

    def tokens(self, places: list[Place]) -> int:
        """Tokens sampled for these calls by their newest tries."""
        self.journal.read()
        return sum(self.journal.tokens(place) for place in places)

    def episode(self, place: Place) -> EpisodeKey:
        return EpisodeKey(run_id=self.run_id, group_no=place[0], member=place[1], attempt=place[2])

    async def describe(self, workflow_id: str) -> Any:
        """The raw description of a workflow; None where Temporal does not know it or is away."""
        from temporalio.service import RPCError

        try:
            return (await self.client.get_workflow_handle(workflow_id).describe()).raw_description
        except RPCError:
            return None

    async def history(self, workflow_id: str) -> list[Any]:
        """The events of a workflow; none where Temporal does not know it."""
        from temporalio.service import RPCError

        try:
            return list((await self.client.get_workflow_handle(workflow_id).fetch_history()).events)
        except RPCError:
            return []


@contextmanager
def frozen(process: ProcessId) -> Iterator[None]:
    """Stop a process for the block; it goes on behind it, if it was not killed."""
    send(process, signal.SIGSTOP)
    try:
        yield
    finally:
        send(process, signal.SIGCONT)


async def kill(process: ProcessId) -> datetime:
    """End a process at once, and come back when it is gone; when it was killed."""
    at = datetime.now(UTC)
    send(process, signal.SIGKILL)
    while is_alive(process):  # noqa: ASYNC110 - another process's death has no event
        await asyncio.sleep(0.005)
    return at
