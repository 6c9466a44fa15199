"""Runs in the terminal: one line each, or one at a glance.

Invariant: everything shown is counted from rows when it is asked for; the same facts are printed as JSON for programs.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..contracts.messages import preview
from ..contracts.states import EpisodeState, RunState
from ..contracts.text import one_line
from ..db.batches import Progress
from ..db.evaluations import EvaluationRow
from ..db.runs import RunRow, UnreadableRun
from ..db.summary import EpisodeTotals, RunSummary

_COLOURS: Final = {
    RunState.RUNNING: "green",
    RunState.PAUSED: "yellow",
    RunState.COMPLETED: "blue",
    RunState.FAILED: "red",
    RunState.CANCELLED: "dim",
}


def render_list(rows: Sequence[RunRow | UnreadableRun], console: Console) -> None:
    """A table of runs, the newest first."""
    if not rows:
        console.print(Text("There are no runs yet; start one with `atropos run start -f run.yaml`."))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state"):
        table.add_column(column, no_wrap=True)  # people copy ids
    for column in ("environments", "started", "why"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            Text(one_line(row.run_id)),
            Text(row.state, style=_COLOURS[row.state]),
            Text(one_line(", ".join(row.weights))),
            Text(f"{ago(row.created_at)} ago"),
            Text(one_line(preview(row.waiting_for or row.reason or ""))),
        )
    console.print(table)


def list_facts(rows: Sequence[RunRow | UnreadableRun]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [
        {
            "run": row.run_id,
            "name": row.name,
            "state": row.state,
            "reason": row.reason,
            "waiting_for": row.waiting_for,
            "environments": row.weights,
            "created_at": row.created_at.isoformat(),
            "ended_at": None if row.ended_at is None else row.ended_at.isoformat(),
        }
        for row in rows
    ]


def render_run(
    row: RunRow,
    summary: RunSummary,
    evaluations: Sequence[EvaluationRow],
    training: Progress,
    link: str | None,
    console: Console,
) -> None:
    """One run at a glance."""
    console.print(Text.assemble((one_line(summary.run_id), "bold"), "  ", (summary.state, _COLOURS[summary.state])))
    for label, text in (("why", summary.reason), ("waits for", summary.waiting_for)):
        if text:
            _line(console, label, one_line(text))
    for label, text in _lines(row, summary):
        _line(console, label, text)
    if row.config.trains:
        _line(console, "training", _training(row, training))
    for evaluation in evaluations:
        _line(console, "evaluation", one_line(_evaluation(evaluation)))
    if link is not None:
        _line(console, "page", link)


def _lines(row: RunRow, summary: RunSummary) -> list[tuple[str, str]]:
    seconds = wall_seconds(summary)
    groups: dict[str, int] = {}
    for count in summary.groups:
        if count.kind == "train":
            groups[count.state] = groups.get(count.state, 0) + count.count
    lines = [
        ("model", one_line(row.config.model.path)),
        ("took", f"{duration(seconds)}, started {ago(summary.created_at)} ago"),
        ("groups", _listed(groups) or "none yet"),
        ("in flight", _in_flight(summary)),
    ]
    lines += [(kind, text) for kind, totals in summary.episodes.items() if (text := _episodes(kind, totals))]
    rate = summary.turns / seconds if seconds > 0 else 0.0
    lines.append(("turns", f"{summary.turns} ({rate:.1f} a second), {summary.sampled_tokens} sampled tokens"))
    weights = ", ".join(f"{label}={weight:g}" for label, weight in row.weights.items())
    lines.append(("weights", one_line(weights)))
    return lines


def _in_flight(summary: RunSummary) -> str:
    """Evaluations have groups of their own, which the run's limit does not hold back."""
    text = f"{summary.open_groups} groups, at most {summary.concurrency} by the episodes they still play"
    return text + (f"; {summary.evaluating_groups} of evaluations" if summary.evaluating_groups else "")


def _episodes(kind: str, totals: EpisodeTotals) -> str:
    if not totals.states:
        return ""
    reward = "no reward yet" if totals.mean_reward is None else f"mean reward {totals.mean_reward:.3f}"
    parts = [f"{_listed(totals.states)} episodes"]
    # A mean over evaluations is one over versions of the weights, and says nothing: each has a line of its own.
    parts.append(f"{reward} over {totals.scored} scored" if kind == "train" else f"{totals.scored} scored")
    if totals.stops:
        parts.append(f"stopped: {_listed(totals.stops)}")
    if totals.failures:
        parts.append(f"failures: {_listed(totals.failures)}")
    return "; ".join(parts)


def _training(row: RunRow, training: Progress) -> str:
    of = f" of {row.config.trainer.steps}" if row.config.trains else ""
    held = "none yet" if training.published < 0 else f"version {training.published}"
    text = f"{training.committed}{of} steps, engines hold {held}"
    if training.last is not None:
        shown = {"reward": "reward_mean", "loss": "loss", "gradient": "grad_norm"}
        found = [
            f"{name} {training.last.metrics[key]:.4g}" for name, key in shown.items() if key in training.last.metrics
        ]
        text += f"; step {training.last.step}: {', '.join(found)}, staleness {training.last.staleness}"
    return text


def _evaluation(row: EvaluationRow) -> str:
    outcome = row.outcome
    of = "" if row.policy_version is None else f" of version {row.policy_version}"
    text = f"{row.name}{of} ({row.tasks} tasks, samples of each: {row.samples}): {row.state}"
    if outcome.mean_reward is not None:
        rates = ", ".join(f"pass@{k} {value:.3f}" for k, value in outcome.pass_at.items())
        text += f", mean reward {outcome.mean_reward:.3f} over {outcome.episodes}" + (f", {rates}" if rates else "")
    return text


def run_facts(
    row: RunRow, summary: RunSummary, evaluations: Sequence[EvaluationRow], training: Progress
) -> dict[str, Any]:
    """A run at a glance for programs. `training` is absent where the run has no trainer."""
    last = training.last
    trained = {
        "steps": training.committed,
        "published_version": None if training.published < 0 else training.published,
        "last_step": None if last is None else {"step": last.step, "staleness": last.staleness, **last.metrics},
    }
    return {
        **list_facts([row])[0],
        "concurrency": summary.concurrency,
        "open_groups": summary.open_groups,
        "evaluating_groups": summary.evaluating_groups,
        "groups": [
            {"kind": c.kind, "environment": c.environment, "state": c.state, "count": c.count} for c in summary.groups
        ],
        "episodes": {
            kind: {
                "states": totals.states,
                "stops": totals.stops,
                "failures": totals.failures,
                "scored": totals.scored,
                # Those of evaluations are of several versions: each has its own below.
                **({"mean_reward": totals.mean_reward} if kind == "train" else {}),
            }
            for kind, totals in summary.episodes.items()
        },
        "turns": summary.turns,
        "sampled_tokens": summary.sampled_tokens,
        "wall_s": round(wall_seconds(summary), 3),
        "evaluations": [
            {
                "name": one.name,
                "policy_version": one.policy_version,
                "environment": one.environment,
                "split": one.split,
                "tasks": one.tasks,
                "samples": one.samples,
                "state": one.state,
                "episodes": one.outcome.episodes,
                "mean_reward": one.outcome.mean_reward,
                "pass_at": one.outcome.pass_at,
            }
            for one in evaluations
        ],
        **({"training": trained} if row.config.trains else {}),
        "config": row.config.model_dump(mode="json"),
    }


def wall_seconds(summary: RunSummary) -> float:
    """From registering the run to its end, or to now."""
    return ((summary.ended_at or datetime.now(UTC)) - summary.created_at).total_seconds()


def episodes_in(summary: RunSummary, *states: EpisodeState) -> int:
    """Attempts of both kinds in these states."""
    return sum(totals.states.get(state, 0) for totals in summary.episodes.values() for state in states)


def ago(moment: datetime) -> str:
    """How long ago, in words."""
    return duration((datetime.now(UTC) - moment).total_seconds())


def duration(seconds: float) -> str:
    """Seconds in words, two units at most."""
    whole = max(0, round(seconds))
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller} {smaller_name}"
    return f"{whole} s"


def _listed(counts: Any) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _line(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"  {label:<11}", "dim"), text), soft_wrap=True)
