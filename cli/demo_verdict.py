"""What the demo must have shown, and its last line.

Invariant: a bound is judged only where enough was played for it; what is not judged is named, so that a short demo
never looks like a whole one that passed.
"""

from dataclasses import dataclass
from typing import Any, Final

from .chaos.report import ChaosReport
from .demo_report import RunReport
from .demo_run import DemoSize

_FIRST_AT_MOST: Final = 0.40
_LAST_AT_LEAST: Final = 0.90
_EVALUATED_AT_LEAST: Final = 0.85
_CONTROL_AT_MOST: Final = 0.50


@dataclass(frozen=True)
class Verdict:
    """`failures`: what is not as it should be, in words; none: the demo has shown what it should."""

    failures: tuple[str, ...]
    unjudged: tuple[str, ...]
    """Names of the figures of the last line that were not judged."""


def judge(run: RunReport, control: RunReport, size: DemoSize, chaos: ChaosReport | None = None) -> Verdict:
    """Hold the figures against their bounds."""
    bounds = (
        ("reward_first", run.reward_first, None, _FIRST_AT_MOST, size.begins),
        ("reward_last", run.reward_last, _LAST_AT_LEAST, None, size.whole),
        ("eval_reward", run.eval_reward, _EVALUATED_AT_LEAST, None, size.whole),
        ("control_reward", control.reward, None, _CONTROL_AT_MOST, size.begins),
    )
    failures = [*run.problems, *(f"the control: {problem}" for problem in control.problems)]
    for name, value, least, most, judged in bounds:
        if not judged:
            continue
        if value is None:
            failures.append(f"{name} is missing")
        elif least is not None and value < least:
            failures.append(f"{name} is {value:.3f}; at least {least:.2f} is expected")
        elif most is not None and value > most:
            failures.append(f"{name} is {value:.3f}; at most {most:.2f} is expected")
    for report in (run, control):
        failures += [f"the audit of {report.run}: {one.check}: {one.row}" for one in report.audit.violations]
    if chaos is not None:
        failures += chaos.failures
    doubted = control.in_doubt + (0 if chaos is not None and chaos.kills_engines else run.in_doubt)
    if doubted:
        failures.append(f"{doubted} episodes rest on weights that no engine has proved, and no engine was killed")
    return Verdict(tuple(failures), tuple(name for name, *_, judged in bounds if not judged))


def last_line(run: RunReport, control: RunReport, verdict: Verdict, seed: int, wall_s: float) -> dict[str, Any]:
    """The JSON object of the last line. `wall_s`: seconds of the whole demo, the making of the policy included."""
    audits = (run.audit, control.audit)
    return {
        "run": run.run,
        "episodes": run.episodes,
        "turns": run.turns,
        "steps": len(run.steps),
        "reward_first": _rounded(run.reward_first),
        "reward_last": _rounded(run.reward_last),
        "eval_reward": _rounded(run.eval_reward),
        "control_reward": _rounded(control.reward),
        "audit": {
            "violations": sum(len(one.violations) for one in audits),
            "checked": {name: sum(one.checked[name] for one in audits) for name in run.audit.checked},
        },
        "seed": seed,
        "wall_s": round(wall_s, 2),
        "turns_per_s": round(run.turns / run.run_s, 2) if run.run_s > 0 else None,
        "unjudged": list(verdict.unjudged),
        "problems": list(verdict.failures),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
