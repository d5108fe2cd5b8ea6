"""Pictures of runs as SVG. In: timelines by policy. Out: SVG text. Needs matplotlib, which nothing else
here does.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from plimsoll_simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MINUTE = 60.0
_WIDTH, _HEIGHT = 10.0, 2.3
_USED, _LINE, _DEATH, _SHORT, _LONG = "#4878a8", "#d08020", "#b02020", "#2a7f62", "#8a4fa0"


def draw_memory(timelines: Mapping[str, Timeline], capacity_gib: float) -> str:
    """The device's memory in use and the line, one picture for each policy."""
    figure = _figure(len(timelines))
    for axes, (name, timeline) in zip(
        _axes(figure, len(timelines)), timelines.items(), strict=True
    ):
        minutes = [point.time / _MINUTE for point in timeline.points]
        used = [_scaled(point.used, capacity_gib) for point in timeline.points]
        line = [_scaled(point.line, capacity_gib) for point in timeline.points]
        axes.fill_between(minutes, used, alpha=0.35, color=_USED, linewidth=0)
        axes.plot(minutes, used, color=_USED, linewidth=1, label="in use")
        axes.plot(minutes, line, color=_LINE, linewidth=1.5, label="the line")
        axes.axhline(capacity_gib, color="black", linewidth=0.8, linestyle="--", label="device")
        for number, death in enumerate(timeline.deaths):
            label = "out of memory" if not number else None
            axes.axvline(death / _MINUTE, color=_DEATH, linewidth=1, label=label)
        lowest = min((value for value in used if not math.isnan(value)), default=0.0)
        axes.set_ylim(max(0.0, lowest - 1.5), capacity_gib * 1.02)
        _finish(axes, name, "GiB", timeline)
    return _svg(figure)


def draw_attainment(timelines: Mapping[str, Timeline]) -> str:
    """Shares answered in time by moment of arrival, one picture for each policy."""
    figure = _figure(len(timelines))
    for axes, (name, timeline) in zip(
        _axes(figure, len(timelines)), timelines.items(), strict=True
    ):
        for label, color in (("short", _SHORT), ("long", _LONG)):
            found = [
                (part.time / _MINUTE, share)
                for part in timeline.parts
                if (share := part.short if label == "short" else part.long) is not None
            ]
            if found:
                axes.plot(*zip(*found, strict=True), color=color, marker=".", label=label)
        axes.set_ylim(-0.05, 1.05)
        _finish(axes, name, "in time", timeline)
    return _svg(figure)


def draw_decisions(timeline: Timeline) -> str:
    """Admitted length, cache and queue over time, with a mark for each change."""
    figure = _figure(3)
    length, cache, waiting = _axes(figure, 3)
    minutes = [point.time / _MINUTE for point in timeline.points]
    length.step(minutes, [p.length for p in timeline.points], where="post", color=_LINE)
    cache.plot(minutes, [p.cache for p in timeline.points], color=_USED, linewidth=1)
    waiting.plot(minutes, [p.waiting for p in timeline.points], color=_SHORT, linewidth=1)
    for axes in (length, cache, waiting):
        for mark in timeline.marks:
            axes.axvline(mark.time / _MINUTE, color="gray", linewidth=0.6, alpha=0.6)
    _finish(length, "admitted length (grey: a change of a limit)", "tokens", timeline, legend=False)
    _finish(cache, "cache in use", "share", timeline, legend=False)
    _finish(waiting, "requests waiting", "requests", timeline, legend=False)
    return _svg(figure)


def _figure(rows: int) -> Figure:
    figure = Figure(figsize=(_WIDTH, _HEIGHT * rows), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def _axes(figure: Figure, rows: int) -> list[Axes]:
    first = figure.add_subplot(rows, 1, 1)
    return [first, *(figure.add_subplot(rows, 1, row, sharex=first) for row in range(2, rows + 1))]


def _finish(axes: Axes, title: str, unit: str, timeline: Timeline, *, legend: bool = True) -> None:
    for start, end in timeline.windows:
        axes.axvspan(start / _MINUTE, end / _MINUTE, color="black", alpha=0.06, linewidth=0)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel(unit)
    axes.set_xlabel("minutes")
    axes.label_outer()
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", fontsize=8, ncols=4)


def _scaled(share: float | None, capacity: float) -> float:
    """A gap where a replica was down."""
    return float("nan") if share is None else share * capacity


def _svg(figure: Figure) -> str:
    """The same text each time; words stay words, so that the page can be searched."""
    with matplotlib.rc_context({"svg.hashsalt": "plimsoll", "svg.fonttype": "none"}):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
