"""What a run with kills has shown, as the figures of the last line and as what is not as it should be.

Invariant: a kill counts only where it is proven to have hit work; what is timed is reported and not judged, since how
long a process takes to start is the machine's affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .conductor import KNOWN, Conductor, Kill
from .plan import Component, Planned
from .stage import Stage


@dataclass(frozen=True)
class ChaosReport:
    """`failures`: in words; none: nothing was lost and nothing done twice."""

    kills: tuple[Kill, ...]
    tokens_in_flight: int
    """Sampled and not stored at the kills, all of them together."""
    tokens_resampled: int
    groups_lost: int
    groups_trained_twice: int
    failures: tuple[str, ...]

    @property
    def kills_engines(self) -> bool:
        """Whether an engine may have died before it proved what it held: what it sampled so counts for nothing."""
        return any(kill.cell.component is Component.ENGINE for kill in self.kills)

    def figures(self) -> dict[str, Any]:
        """Keys of the last line."""
        return {
            "kills": [_figures(kill) for kill in self.kills],
            "tokens_resampled": self.tokens_resampled,
            "tokens_in_flight": self.tokens_in_flight,
            "groups_lost": self.groups_lost,
            "groups_trained_twice": self.groups_trained_twice,
        }


def _figures(kill: Kill) -> dict[str, Any]:
    return {
        "component": kill.cell.component,
        "moment": kill.cell.moment,
        "step": kill.step,
        "in_flight": len(kill.hit.places) or len(kill.hit.items),
        "start_s": None if kill.start_s is None else round(kill.start_s, 2),
        "recovery_s": None if kill.recovery_s is None else round(kill.recovery_s, 2),
    }


async def read_chaos(stage: Stage, conductor: Conductor, planned: Sequence[Planned]) -> ChaosReport:
    """Look up what the kills did, once the run has ended."""
    stage.journal.read()
    kills = tuple(conductor.kills)
    lost, twice = await stage.rows.lost(), await stage.rows.trained_twice()
    in_flight, resampled = sum(kill.hit.tokens for kill in kills), stage.journal.resampled()
    failures = [
        f"the kill of the {one.cell.component} ({one.cell.moment}) found no chance to land, or the run ended before "
        "it was recovered from"
        for one in planned[len(kills) :]
    ]
    for kill in kills:
        name = f"the kill of the {kill.cell.component} ({kill.cell.moment})"
        if not await KNOWN[kill.cell.component, kill.cell.moment][1](stage, kill.hit):
            failures.append(f"{name} is not proven to have hit work: {', '.join(kill.hit.items)}")
        if kill.recovery_s is None:
            failures.append(f"{name} was not recovered from within two minutes")
    failures += [f"lost: {one}" for one in lost] + [f"trained twice: {one}" for one in twice]
    if resampled > in_flight:
        failures.append(f"{resampled} tokens were sampled again, and only {in_flight} were in flight")
    return ChaosReport(kills, in_flight, resampled, len(lost), len(twice), tuple(failures))
