"""`up`, `down` and `status` as plain functions that return models.

Invariants: `up` twice, or from two shells, is one stack and two successes; `down` stops what the state file names
and nothing else, and with nothing to stop it is a success too; `status` changes nothing.
"""

from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from ...settings import Settings
from . import probes
from .addresses import Address, Addresses, DatabaseAddress, Origin, resolve_addresses
from .apps import WORKERS
from .errors import StackError
from .files import StackHome, explain_os_errors, hold_lock
from .options import StackOptions
from .process import send, wait_gone
from .running import AlreadyRunning, Progress, await_other, await_ready, end, launch
from .state import PartState, PartStatus, Phase, StackState, launched, read_state
from .supervisor import stop_leftovers

_STOP_SIGNAL: Final = 15
_SUPERVISOR_GRACE_S: Final = 15.0
"""On top of the parts' own graces."""
_ASKED_AT_ONCE: Final = 16
"""Engines; one that is away takes seconds to say so."""
_ATTEMPTS: Final = 3
"""A stack found running may be on its way down; then it is our turn."""


class UpResult(BaseModel):
    """What `up` found or made."""

    model_config = ConfigDict(frozen=True)

    already_running: bool
    state: StackState


class DownResult(BaseModel):
    """What `down` stopped."""

    model_config = ConfigDict(frozen=True)

    home: Path
    stopped: tuple[str, ...]
    """Names of the parts that were running; empty where nothing was."""
    starting: bool = False
    """It was not up yet: whoever waits in `up` is told that it was stopped."""


class Health(StrEnum):
    """What a probe found."""

    OK = "ok"
    STARTING = "starting"
    FAILING = "failing"
    NOT_STARTED = "not started"


class PartReport(BaseModel):
    """One line of `status`."""

    model_config = ConfigDict(frozen=True)

    name: str
    address: str
    source: str
    health: Health
    detail: str | None = None
    pid: int | None = None
    restarts: int = 0


class StackStatus(BaseModel):
    """All of `status`."""

    model_config = ConfigDict(frozen=True)

    home: Path
    running: bool
    phase: Phase | None = None
    error: str | None = None
    """Why the last start failed."""
    supervisor_pid: int | None = None
    temporal_ui: str | None = None
    notes: tuple[str, ...] = ()
    parts: tuple[PartReport, ...] = ()

    @property
    def there(self) -> bool:
        """Whether there is something to work with: a stack, or a Temporal and a Postgres from elsewhere."""
        have = {part.name for part in self.parts if part.health is not Health.NOT_STARTED}
        return self.running or {"temporal", "postgres"} <= have

    @property
    def healthy(self) -> bool:
        """Whether nothing that should answer fails to."""
        return all(part.health in (Health.OK, Health.NOT_STARTED) for part in self.parts)


def only_missing(options: StackOptions, addresses: Addresses) -> StackOptions:
    """Leave out the parts that are configured explicitly or were found running (see `resolve_addresses`)."""
    outside = (Origin.SETTINGS, Origin.FOUND)
    found = addresses.temporal.value if addresses.temporal.origin is Origin.FOUND else None
    return options.model_copy(
        update={
            "temporal": options.temporal and addresses.temporal.origin not in outside,
            "temporal_address": options.temporal_address or found,
            "postgres": options.postgres and addresses.database.origin not in outside,
            "engine_model": None if addresses.engine.origin in outside else options.engine_model,
        }
    )


def up(home: Path, options: StackOptions, *, progress: Progress | None = None) -> UpResult:
    """Start the stack of this home, or find it running, and wait until every part was ready.

    Raises `StackError` where it cannot start; then, and on Ctrl-C, everything is stopped again.
    """
    place = StackHome(home)
    place.prepare()
    for _ in range(_ATTEMPTS):
        state = read_state(place)
        if state is None or not state.supervised():
            try:
                return UpResult(already_running=False, state=_start(place, options, progress))
            except AlreadyRunning:
                pass  # another shell was quicker
        if other := await_other(place, progress):
            return UpResult(already_running=True, state=other)
    raise StackError(f"The stack in {place.root} keeps being stopped by someone; see {place.log('supervisor')}.")


def down(home: Path) -> DownResult:
    """Stop the stack of this home and wait for its end. Raises `StackError` where something refuses to end."""
    place = StackHome(home)
    state = read_state(place)
    supervisor = launched(place)
    if state is not None and state.supervised():
        supervisor = state.supervisor
    if state is None and supervisor is None:
        return DownResult(home=place.root, stopped=())
    running = tuple(part.name for part in state.orphans()) if state is not None else ()
    starting = supervisor is not None and (
        state is None or state.supervisor != supervisor or state.phase is Phase.STARTING
    )
    if supervisor is not None:
        send(supervisor, _STOP_SIGNAL)
        patience = sum(part.grace_s for part in (state.parts if state is not None else ())) + _SUPERVISOR_GRACE_S
        if not wait_gone(supervisor, patience):
            raise StackError(
                f"The supervisor (pid {supervisor.pid}) has not ended after {patience:.0f} s; "
                f"see {place.log('supervisor')}."
            )
    with explain_os_errors(place.root), hold_lock(place) as held:
        if held:  # otherwise somebody has started the next one already
            stop_leftovers(read_state(place))
            place.state.unlink(missing_ok=True)
    return DownResult(home=place.root, stopped=running, starting=starting)


def status(settings: Settings) -> StackStatus:
    """Look at every part: the ones of the running stack, and servers named by settings or found."""
    place = StackHome(settings.home)
    state = read_state(place)
    addresses = resolve_addresses(settings)
    running = state is not None and state.supervised()
    parts = {part.name: part for part in state.parts} if state is not None else {}

    temporal_problem, pollers = (
        probes.check_temporal(addresses.temporal.value) if addresses.temporal.value else (None, {})
    )
    database, engine = addresses.database, addresses.engine
    database_problem = probes.check_database(database.value) if database.value else None
    engine_problem = probes.check_http(engine.value) if engine.value else None
    reports = [
        _server("temporal", addresses.temporal, temporal_problem, parts),
        _server("postgres", database, database_problem, parts),
        _server("engine", engine, engine_problem, parts),
    ]
    named = probes.engines_of_runs(database.value) if database.value and database_problem is None else []
    named = [one for one in named if one.url != (engine.value or "").rstrip("/")]
    if named:
        reports = [one for one in reports if one.health is not Health.NOT_STARTED or one.name != "engine"]
        with ThreadPoolExecutor(max_workers=_ASKED_AT_ONCE) as pool:
            reports += pool.map(_named, named)
    shown = {report.name for report in reports if report.pid is not None}
    source = f"running stack in {place.root}" if running else "left over from a killed supervisor"
    reports += [
        _own(part, source, pollers)
        for part in parts.values()
        if part.name not in shown and (running or part in (state.orphans() if state else ()))
    ]
    return StackStatus(
        home=place.root,
        running=running,
        phase=state.phase if state is not None and (running or state.error) else None,
        error=state.error if state is not None else None,
        supervisor_pid=state.supervisor.pid if state is not None and running else None,
        temporal_ui=state.temporal_ui if state is not None and running else None,
        notes=state.notes if state is not None and running else (),
        parts=tuple(reports),
    )


def _start(place: StackHome, options: StackOptions, progress: Progress | None) -> StackState:
    supervisor = launch(place, options, owned=False)
    try:
        return await_ready(place, supervisor, progress)
    except BaseException:
        end(supervisor)
        place.tidy()
        raise


def _server(
    name: str, address: Address | DatabaseAddress, problem: str | None, parts: dict[str, PartState]
) -> PartReport:
    own = parts.get(name) if address.origin is Origin.STACK else None
    if address.value is None:
        health, detail = Health.NOT_STARTED, None
    elif problem is None:
        health, detail = Health.OK, own.detail if own is not None else None
    else:
        starting = own is not None and own.status is PartStatus.STARTING
        health = Health.STARTING if starting else Health.FAILING
        detail = (own.detail if own is not None else None) or problem
    return PartReport(
        name=name,
        address=address.shown(),
        source=address.source,
        health=health,
        detail=detail,
        pid=own.process.pid if own is not None and own.process is not None else None,
        restarts=own.restarts if own is not None else 0,
    )


def _named(engine: probes.NamedEngine) -> PartReport:
    """An engine that is nobody's part here: started by hand or elsewhere, and named by a run file."""
    problem = probes.check_http(engine.url)
    return PartReport(
        name="engine",
        address=engine.url,
        source=f"named by {engine.run_id}",
        health=Health.OK if problem is None else Health.FAILING,
        detail=problem,
    )


def _own(part: PartState, source: str, pollers: dict[str, int]) -> PartReport:
    detail = part.detail
    match part.status:
        case PartStatus.READY | PartStatus.DONE:
            health = Health.OK
        case PartStatus.STARTING | PartStatus.WAITING:
            health = Health.STARTING
        case _:
            health = Health.FAILING
    if health is Health.OK and part.name in WORKERS:
        idle = probes.unpolled(pollers, WORKERS[part.name].split(","))
        if idle:
            health, detail = Health.FAILING, f"nobody polls {', '.join(idle)}"
    return PartReport(
        name=part.name,
        address=part.address or "",
        source=source,
        health=health,
        detail=detail,
        pid=part.process.pid if part.process is not None else None,
        restarts=part.restarts,
    )
