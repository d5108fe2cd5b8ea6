"""A run in a few hundred points, for a picture of it. In: a RunRecord. Out: a :class:`Timeline`.

Where a point stands for several samples it has the worst of them: the most memory in use, the
shortest admitted length, the longest queue; with several replicas, of the worst one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from plimsoll_simulator.metrics import attains
from plimsoll_simulator.records import RequestRecord, RunRecord, Sample

_POINTS = 240
# A share of fewer arrivals would jump about: so many parts has a run at most.
_PARTS = 30


@dataclass(frozen=True)
class Point:
    """``time`` in seconds; ``used`` and ``line`` as shares of the device, None while a replica is
    down; ``cache`` the share of the cache in use; ``length`` in tokens."""

    time: float
    used: float | None
    line: float | None
    cache: float
    waiting: int
    length: int


@dataclass(frozen=True)
class Part:
    """Of the arrivals from ``time`` on, the shares answered in time; None without any."""

    time: float
    short: float | None
    long: float | None


@dataclass(frozen=True)
class Mark:
    """A change of a limit."""

    time: float
    parameter: str
    before: float | None
    after: float | None
    reason: str


@dataclass(frozen=True)
class Timeline:
    points: tuple[Point, ...]
    parts: tuple[Part, ...]
    deaths: tuple[float, ...]
    marks: tuple[Mark, ...]
    # Start and end of each burst with its tail.
    windows: tuple[tuple[float, float], ...]


def draw_timeline(run: RunRecord) -> Timeline:
    span = run.workload.span
    samples = [sample for sample in run.samples if sample.time <= span]
    return Timeline(
        points=tuple(_points(samples, span / _POINTS, run.total_bytes)),
        parts=tuple(_parts(run.requests, span / _PARTS)),
        deaths=tuple(death.time for death in run.deaths),
        marks=tuple(Mark(m.time, m.parameter, m.before, m.after, m.reason) for m in run.moves),
        windows=tuple((window.start, min(window.end, span)) for window in run.workload.windows),
    )


def _points(samples: Sequence[Sample], width: float, total: int) -> Iterator[Point]:
    for number, group in groupby(samples, lambda sample: int(sample.time // width)):
        members = list(group)
        down = not all(sample.serving for sample in members)
        yield Point(
            time=number * width,
            used=None if down else round(1 - min(s.free_bytes for s in members) / total, 4),
            line=None if down else round(min(s.utilization for s in members), 4),
            cache=round(max(s.kv_usage for s in members), 4),
            waiting=max(s.waiting for s in members),
            length=min(s.admitted_length for s in members),
        )


def _parts(requests: Iterable[RequestRecord], width: float) -> Iterator[Part]:
    ordered = sorted(requests, key=lambda record: record.request.time)
    for number, group in groupby(ordered, lambda record: int(record.request.time // width)):
        members = list(group)
        short = [attains(r) for r in members if not r.request.is_long]
        long = [attains(r) for r in members if r.request.is_long]
        yield Part(number * width, _share(short), _share(long))


def _share(attained: Sequence[bool]) -> float | None:
    return round(sum(attained) / len(attained), 4) if attained else None


def read_timeline(kept: Mapping[str, Any]) -> Timeline:
    """The reverse of ``asdict``, from JSON."""
    return Timeline(
        points=tuple(Point(**point) for point in kept["points"]),
        parts=tuple(Part(**part) for part in kept["parts"]),
        deaths=tuple(kept["deaths"]),
        marks=tuple(Mark(**mark) for mark in kept["marks"]),
        windows=tuple((start, end) for start, end in kept["windows"]),
    )
