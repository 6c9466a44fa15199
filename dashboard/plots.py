"""The charts of a run: Bokeh figures over numbers and times alone.

Invariant: no text of others is in a chart; titles and axes are words of ours.
"""

from datetime import datetime
from typing import Any, Final

from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from ..db.curves import RunCurves, rates

_BLUE: Final = "#0b5cad"
_EMPTY: Final[dict[str, list[Any]]] = {"x": [], "mean": [], "low": [], "high": []}


class RunPlots:
    """Reward, lengths, throughput and, where the run trains, staleness."""

    def __init__(self, trains: bool) -> None:
        self._trains = trains
        self._rewards = ColumnDataSource(data=_EMPTY)
        self._lengths = ColumnDataSource(data={"x": [], "mean": [], "longest": []})
        self._rates = ColumnDataSource(data={"x": [], "tokens": []})
        self._staleness = ColumnDataSource(data={"x": [], "staleness": []})
        place = "train step" if trains else "time"
        kind = "linear" if trains else "datetime"
        reward = _figure(f"Reward by {place}: mean and standard deviation", kind)
        reward.varea("x", "low", "high", source=self._rewards, fill_color=_BLUE, fill_alpha=0.15)
        reward.line("x", "mean", source=self._rewards, line_color=_BLUE, line_width=2)
        reward.scatter("x", "mean", source=self._rewards, color=_BLUE, size=4)
        length = _figure(f"Sampled tokens of an episode by {place}: mean and longest", kind)
        length.line("x", "mean", source=self._lengths, line_color=_BLUE, line_width=2)
        length.line("x", "longest", source=self._lengths, line_color="#9aa5b1")
        rate = _figure("Sampled tokens a second", "datetime")
        rate.line("x", "tokens", source=self._rates, line_color=_BLUE, line_width=2)
        self.figures: list[Any] = [reward, length, rate]
        if trains:
            stale = _figure("Staleness of a step: versions behind its oldest token", "linear")
            stale.step("x", "staleness", source=self._staleness, line_color=_BLUE, mode="center")
            self.figures.append(stale)

    def show(self, curves: RunCurves) -> None:
        """Draw what was read; what has not changed is not sent."""
        over_time = curves.over_time() or curves.over_time("eval")
        points = curves.over_steps() if self._trains else over_time
        xs: list[Any] = [one.place if self._trains else _moment(one.ended) for one in points]
        scored = [(x, one) for x, one in zip(xs, points, strict=True) if one.mean is not None]
        _put(
            self._rewards,
            {
                "x": [x for x, _ in scored],
                "mean": [one.mean for _, one in scored],
                "low": [(one.mean or 0.0) - (one.spread or 0.0) for _, one in scored],
                "high": [(one.mean or 0.0) + (one.spread or 0.0) for _, one in scored],
            },
        )
        lengths = {"x": xs, "mean": [one.length for one in points], "longest": [one.longest for one in points]}
        _put(self._lengths, lengths)
        drawn = rates(over_time)
        _put(self._rates, {"x": [_moment(at) for at, _ in drawn], "tokens": [rate for _, rate in drawn]})
        steps = curves.trained
        _put(self._staleness, {"x": [row.step for row in steps], "staleness": [row.staleness for row in steps]})


def _put(source: Any, data: dict[str, list[Any]]) -> None:
    if dict(source.data) != data:
        source.data = data


def _moment(value: datetime) -> float:
    """Milliseconds, as Bokeh's axes of time count them (in UTC)."""
    return value.timestamp() * 1000.0


def _figure(title: str, kind: str) -> Any:
    made = figure(
        title=title, x_axis_type=kind, height=220, sizing_mode="stretch_width", tools="pan,wheel_zoom,box_zoom,reset"
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    return made
