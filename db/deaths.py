"""Workers that died while author code ran inside them, and what follows for that code.

Invariant: a death is a row before anything else runs in the worker's successor, and rows alone decide where code runs
next, so that workers on other machines decide alike. One death means nothing (any worker may be killed at any
moment); two over the same call are taken for its doing. An import runs nowhere else: after two it is refused. A run
that is being registered has no row yet that a death could be told of; whoever found it keeps it then.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from .errors import Refused
from .events import IMPORT_DEATH, INLINE_APART, INLINE_DEATH, add_event
from .store import Store

ENOUGH: Final = 2
"""Deaths over one call after which it runs apart; so many such calls, and every call of the function does."""

_IMPORT_DEATHS: Final = """
SELECT count(DISTINCT e.data->>'death') FROM runs r
LEFT JOIN events e ON e.run_id = r.run_id AND e.kind = %(kind)s AND e.created_at > r.changed_at
  AND e.data->>'environment' = %(environment)s
WHERE r.run_id = %(run)s GROUP BY r.run_id
"""


@dataclass(frozen=True)
class InlineCall:
    """One call of author code in a worker's own process: `call` of `owner`, an episode's or group's workflow."""

    run_id: str
    owner: str
    call: str
    function: str
    """`environment.function`, for people."""


@dataclass(frozen=True)
class Import:
    """The import of an environment of a run, by its label."""

    run_id: str
    environment: str


@dataclass(frozen=True)
class Death:
    """A worker that died, by a name of its own, and what ran in it. Told twice it counts once."""

    name: str
    running: tuple[InlineCall, ...]


@dataclass(frozen=True)
class Apart:
    """What runs in a process of its own from now on."""

    calls: frozenset[InlineCall] = frozenset()
    functions: frozenset[str] = frozenset()

    def __contains__(self, call: InlineCall) -> bool:
        return call in self.calls or call.function in self.functions


def judged(deaths: Iterable[Death]) -> Apart:
    """What has died with its worker too often to be trusted inside one."""
    names: defaultdict[InlineCall, set[str]] = defaultdict(set)
    for death in deaths:
        for call in death.running:
            names[call].add(death.name)
    calls = frozenset(call for call, died in names.items() if len(died) >= ENOUGH)
    counts = Counter(call.function for call in calls)
    return Apart(calls, frozenset(function for function, count in counts.items() if count >= ENOUGH))


async def runs_apart(store: Store, run_id: str) -> Apart:
    """What the rows say about a run."""
    return judged(await _deaths(store, run_id))


async def _deaths(store: Store, run_id: str) -> Sequence[Death]:
    async with store.direct() as connection:
        cursor = await connection.execute(
            "SELECT data->>'death', data->'running' FROM events WHERE run_id = %s AND kind = %s", (run_id, INLINE_DEATH)
        )
        rows = await cursor.fetchall()
    return [Death(name, tuple(InlineCall(run_id, *call) for call in running)) for name, running in rows]


async def record_death(store: Store, death: Death) -> None:
    """Tell every run whose code ran in the worker, and say what runs apart from now on.

    A run that this store does not know is left out: its rows went, and so did whoever would ask.
    """
    for run_id in sorted({call.run_id for call in death.running}):
        running = tuple(call for call in death.running if call.run_id == run_id)
        try:
            await _record(store, run_id, Death(death.name, running))
        except Refused:
            continue


async def _record(store: Store, run_id: str, death: Death) -> None:
    before = await _deaths(store, run_id)
    functions = ", ".join(sorted({call.function for call in death.running}))
    data = {"death": death.name, "running": [[call.owner, call.call, call.function] for call in death.running]}
    await add_event(store, run_id, INLINE_DEATH, f"a worker died while inline code ran in it: {functions}", data)
    old, new = judged(before), judged([*before, death])
    for call in sorted(new.calls - old.calls, key=lambda one: (one.owner, one.call)):
        text = (
            f"inline code of {call.function} killed its worker twice ({call.call} of {call.owner}); "
            f'it now runs in a process of its own; mark it run="process"'
        )
        await add_event(
            store, run_id, INLINE_APART, text, {"function": call.function, "owner": call.owner, "call": call.call}
        )
    for function in sorted(new.functions - old.functions):
        text = (
            f"inline code of {function} killed workers over several calls; "
            f'all its calls in this run now run in processes of their own; mark it run="process"'
        )
        await add_event(store, run_id, INLINE_APART, text, {"function": function})


async def record_import_death(store: Store, name: str, imported: Import) -> bool:
    """Tell the run of a worker that died over an import. False where the store does not know the run (yet)."""
    text = f"a worker died while it imported the environment {imported.environment}"
    try:
        data = {"death": name, "environment": imported.environment}
        await add_event(store, imported.run_id, IMPORT_DEATH, text, data)
    except Refused:
        return False
    return True


async def import_deaths(store: Store, imported: Import) -> int | None:
    """How many workers died over it since the run's state last changed: a person who resumes it has put that right.

    None where the store does not know the run.
    """
    if "\0" in imported.run_id + imported.environment:  # not even a question that Postgres can be asked
        return None
    values = {"run": imported.run_id, "environment": imported.environment, "kind": IMPORT_DEATH}
    async with store.direct() as connection:
        row = await (await connection.execute(_IMPORT_DEATHS, values)).fetchone()
    return None if row is None else int(row[0])
