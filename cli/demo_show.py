"""What the demo shows at its end: a table of the steps, a conversation, and where to look next."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..db.runs import get_run
from ..db.shown import load_shown
from ..db.store import Store
from .demo_report import RunReport, StepFigures, mean_reward
from .demo_verdict import Verdict
from .episode_show import render_episode

_ROWS: Final = 10


async def show_sample(store: Store, report: RunReport, page: Console) -> None:
    """One conversation in full, a successful one where there is one."""
    row = await get_run(store, report.run)
    if row is None or report.sample is None:
        return
    page.print()
    render_episode(await load_shown(store, row, report.sample), None, page)


def show_runs(run: RunReport, control: RunReport, verdict: Verdict, page: Console) -> None:
    """The table, and in a few lines what the demo has shown."""
    page.print()
    page.print(steps_table(run, control))
    checked = ", ".join(f"{count} {name}" for name, count in run.audit.checked.items())
    contradictions = len(run.audit.violations) + len(control.audit.violations)
    page.print()
    say = _sayer(page)
    say(f"Evaluation on tasks it never trained on, by the last version: {_figure(run.eval_reward)}")
    say(f"Audit: {contradictions or 'no'} contradictions in {checked}.")
    if verdict.unjudged:
        say(f"This was a short demo; not judged: {', '.join(verdict.unjudged)}.")


def steps_table(run: RunReport, control: RunReport) -> Table:
    """Per few steps what was earned, with which loss, how stale, and how fast; the control in the last row."""
    table = Table(box=None, pad_edge=False)
    for name in ("steps", "reward", "loss", "staleness", "groups without signal", "episodes/s"):
        table.add_column(name, justify="left" if name == "steps" else "right", no_wrap=name != "groups without signal")
    for part in parts(run.steps, _ROWS):
        table.add_row(*_cells(_span(part), part))
    if control.steps:
        table.add_section()
        table.add_row(*_cells("control", control.steps), style="dim")
    return table


def parts(steps: Sequence[StepFigures], rows: int) -> Iterator[Sequence[StepFigures]]:
    """The steps in at most `rows` runs of equal length; the last may be shorter."""
    length = max(1, -(-len(steps) // rows))
    for start in range(0, len(steps), length):
        yield steps[start : start + length]


def _span(part: Sequence[StepFigures]) -> str:
    first, last = part[0].step, part[-1].step
    return str(first) if first == last else f"{first}-{last}"


def _cells(name: str, part: Sequence[StepFigures]) -> tuple[str, ...]:
    losses = [one.loss for one in part if one.loss is not None]
    seconds = sum(one.seconds for one in part)
    return (
        name,
        _figure(mean_reward(part)),
        f"{sum(losses) / len(losses):+.4f}" if losses else "-",
        str(max(one.staleness for one in part)),
        str(sum(one.filtered for one in part)),
        f"{sum(one.scored for one in part) / seconds:.1f}" if seconds > 0 else "-",
    )


def say_where(home: Path, report: RunReport, page: Console) -> None:
    """What was stopped, and how to look at it again."""
    prefix = f"ATROPOS_HOME={home} atropos"
    say = _sayer(page)
    say("")
    say("All parts of the demo are stopped; what happened is kept. To look at it again:")
    say(f"  {prefix} up --no-engine        Temporal's pages and the database, as they were")
    say(f"  {prefix} run show {report.run}")
    if report.sample is not None:
        say(f"  {prefix} episode show {report.sample.workflow_id} --tokens")
    say("A stack of your own: `atropos up`, then `atropos run start -f examples/run.yaml --engine URL`.")


def _sayer(page: Console) -> Callable[[str], None]:
    return lambda text: page.print(Text(text), soft_wrap=True)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
