"""The stack's models in the terminal."""

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .commands import DownResult, Health, StackStatus, UpResult
from .files import StackHome
from .running import Progress
from .state import PartStatus, StackState, read_state

_COLOURS: Final = {
    Health.OK: "green",
    Health.STARTING: "yellow",
    Health.FAILING: "red",
    Health.NOT_STARTED: "dim",
}


def render_up(result: UpResult, console: Console) -> None:
    """Say where everything is."""
    state = result.state
    console.print("The stack is already running." if result.already_running else "The stack is up.")
    for name, value in (
        ("Temporal", state.temporal_address),
        ("Temporal UI", state.temporal_ui),
        ("Engine", state.engine_url),
    ):
        if value is not None:
            console.print(f"  {name:<12} {value}", highlight=False)
    for part in state.parts:
        if part.name in ("postgres", "dashboard") and part.address is not None:
            console.print(f"  {part.name.capitalize():<12} {part.address}", highlight=False)
    for note in state.notes:
        console.print(f"Note: {note}", style="dim", highlight=False)


def render_down(result: DownResult, console: Console) -> None:
    """Say what was stopped."""
    if result.starting:
        parts = f" Stopped: {', '.join(result.stopped)}." if result.stopped else ""
        console.print(f"The stack was still starting and is stopped.{parts}", highlight=False)
    elif result.stopped:
        console.print(f"Stopped: {', '.join(result.stopped)}.", highlight=False)
    else:
        console.print(f"Nothing is running in {result.home}.", highlight=False, soft_wrap=True)


def render_status(status: StackStatus, console: Console) -> None:
    """A table of the parts with their health."""
    if status.running:
        console.print(
            f"Stack in {status.home}: {status.phase}, supervisor pid {status.supervisor_pid}", highlight=False
        )
    elif status.there:
        console.print(f"No stack is running in {status.home}: these servers are from elsewhere.", highlight=False)
    if status.error is not None:
        console.print(f"The last start failed: {status.error}", style="red", highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("part", "health", "address"):
        table.add_column(column, no_wrap=True)  # people copy addresses
    for column in ("from", "pid", "restarts", "detail"):
        table.add_column(column, overflow="fold")
    for part in status.parts:
        table.add_row(
            part.name,
            Text(part.health, style=_COLOURS[part.health]),
            part.address,
            "this stack" if status.running and part.source.startswith("running stack") else part.source,
            "" if part.pid is None else str(part.pid),
            str(part.restarts) if part.restarts else "",
            part.detail or "",
        )
    console.print(table)
    if status.temporal_ui is not None:
        console.print(f"Temporal UI: {status.temporal_ui}", highlight=False)
    for note in status.notes:
        console.print(f"Note: {note}", style="dim", highlight=False)


def say_beginning(home: StackHome, console: Console) -> None:
    """The first line of a start, before anything is asked or loaded; a running stack is not waited for."""
    state = read_state(home)
    if state is None or not state.supervised():
        console.print(
            f"Starting the stack in {home.root} …", style="dim", highlight=False, soft_wrap=True, markup=False
        )


def show_progress(console: Console) -> Progress:
    """A progress callback that prints one line when a part starts, becomes ready or fails."""
    seen: dict[str, PartStatus] = {}

    def show(state: StackState) -> None:
        for part in state.parts:
            if seen.get(part.name) == part.status:
                continue
            seen[part.name] = part.status
            if part.status is PartStatus.STARTING:
                console.print(f"  {part.name} is starting …", style="dim", highlight=False)
            elif part.status in (PartStatus.READY, PartStatus.DONE):
                console.print(f"  {part.name} is {part.status}", style="dim", highlight=False)
            elif part.status is PartStatus.BACKOFF:
                console.print(f"  {part.name}: {part.detail}", style="yellow", highlight=False)

    return show
