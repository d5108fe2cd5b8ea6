"""A report for people: one HTML page with pictures, and a few plain lines. In: results of one trace, of
which the first seed is drawn. Out: text. Every figure in it is simulated, and it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from statistics import fmean
from typing import Any

import numpy as np

from plimsoll_simulator import plots
from plimsoll_simulator.comparison import Interval, bootstrap
from plimsoll_simulator.evaluation import Result, workload_of
from plimsoll_simulator.hardware import GIB, SHAPES
from plimsoll_simulator.policies import PLIMSOLL
from plimsoll_simulator.results import by_policy, headline, reference_of
from plimsoll_simulator.timeline import Mark, Timeline, read_timeline

_ASSUMPTIONS = (
    "Simulated: the engine's real scheduler and block pool and the operator's real tuner in virtual "
    "time. How long a step takes and how much memory is in use is modelled: kernel times measured on "
    "an RTX 4090 for Llama-3.1-8B there, a roofline with assumed rates for everything else; "
    "fragmentation and surprises are sized by public reports. In time means: the first token after "
    "at most 2 s and 200 ms a token for prompts up to 8k tokens, 30 s and 300 ms for longer ones. "
    "Refused, lost and late requests count alike. Clients retry once after 5 s. Requests share no "
    "prefixes."
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .7rem; text-align: left; vertical-align: top; }
p.note { color: #555; }
"""
_HEADS = (
    "policy", "setting", "worse class in time", "short in time", "long in time", "OOM kills",
    "lost in flight", "refused", "preempted per 1000",
)  # fmt: skip


def describe_traffic(results: Sequence[Result]) -> str:
    cell = results[0].cell
    workload = workload_of(cell)
    prompts = [request.input_tokens for request in workload.requests]
    outputs = [request.output_tokens for request in workload.requests]
    injected = "" if cell.injection == "B0" else f" with injection {cell.injection}"
    many = "one" if cell.replicas == 1 else str(cell.replicas)
    return (
        f"{len(prompts)} requests in {workload.span / 60:.0f} min{injected}, prompts "
        f"{_quantiles(prompts)} and outputs {_quantiles(outputs)} tokens (median, 99th percentile), "
        f"replayed on {many} {cell.hardware} with {cell.model.name}. Simulated, "
        f"{len(_seeds(results))} seeds, fragmentation x{cell.factor:g}."
    )


def describe(results: Sequence[Result]) -> tuple[str, ...]:
    """What each policy makes of the traffic, what Plimsoll does, what that saves."""
    found = by_policy(results)
    rows = [_line_of(policy, rows) for policy, rows in found.items()]
    return (describe_traffic(results), *rows, *_doings(found), *_savings(found))


def _line_of(policy: str, rows: Sequence[Result]) -> str:
    name = "Plimsoll" if policy == PLIMSOLL else policy
    cells = dict(zip(_HEADS, _cells(policy, rows), strict=True))
    return (
        f"{name} ({cells['setting']}): {cells['short in time']} of the short and {cells['long in time']} of the long "
        f"requests in time, {cells['OOM kills']} OOM kills with {cells['lost in flight']} requests "
        f"lost in flight, {cells['refused']} refused."
    )


def _doings(found: dict[str, list[Result]]) -> tuple[str, ...]:
    marks = _timeline(found[PLIMSOLL][0]).marks
    if not marks:
        return ("Plimsoll would move nothing: this traffic stays clear of every limit.",)
    parts = []
    for parameter, group in groupby(
        sorted(marks, key=lambda mark: mark.parameter), lambda mark: mark.parameter
    ):
        moves = list(group)
        ends = f"{_value(moves[0].before)} to {_value(moves[-1].after)}"
        parts.append(f"{parameter} {_times(len(moves))} ({ends})")
    return (f"What Plimsoll would do (first seed): move {', '.join(parts)}.",)


def _savings(found: dict[str, list[Result]]) -> tuple[str, ...]:
    """Against today's default: what is better, what is worse, or that nothing is."""
    reference = reference_of(found)
    if reference == PLIMSOLL:
        return ()
    base, ours = found[reference], found[PLIMSOLL]
    pairs = zip(_points(ours), _points(base), strict=True)
    difference = bootstrap([mine - theirs for mine, theirs in pairs])
    lines = [f"Against {reference}: {_gain(difference)}."]
    for key, words in (
        ("oom_kills", "OOM kills"),
        ("lost_in_flight", "requests lost in flight"),
        ("admissible_refused", "requests refused that an empty engine could serve"),
    ):
        before, after = _total(base, key), _total(ours, key)
        if before != after:
            lines.append(f"{words[0].upper()}{words[1:]}: {after} in place of {before}.")
    return tuple(lines)


def _points(results: Sequence[Result]) -> list[float]:
    """Of a hundred, by seed."""
    return [100 * headline(each) for each in sorted(results, key=lambda each: each.cell.seed)]


def _gain(points: Interval) -> str:
    bounds = f"{points.mean:+.1f} points ({points.low:+.1f} to {points.high:+.1f})"
    if points.low > 0:
        return f"Plimsoll answers more of the worse class in time, {bounds}"
    if points.high < 0:
        return f"Plimsoll answers fewer of the worse class in time, {bounds}"
    return f"no difference in the worse class that these seeds would show, {bounds}"


def build_page(results: Sequence[Result]) -> str:
    """One file without links to anything outside."""
    found = by_policy(results)
    cell = results[0].cell
    drawn = {_title(rows[0]): _timeline(rows[0]) for rows in found.values()}
    capacity = SHAPES[cell.hardware].total_bytes / GIB
    ours = _timeline(found[PLIMSOLL][0])
    title = f"{cell.trace.name} on {cell.hardware}: what Plimsoll would do"
    lines = "".join(f"<li>{escape(line)}</li>" for line in describe(results))
    rows = [_cells(policy, rows) for policy, rows in found.items()]
    sections = (
        f"<ul>{lines}</ul>",
        _table(_HEADS, rows),
        f'<p class="note">{escape(_ASSUMPTIONS)}</p>',
        f"<h2>The memory line over time (seed {cell.seed})</h2>",
        plots.draw_memory(drawn, capacity),
        "<h2>Answered in time, by class</h2>",
        plots.draw_attainment(drawn),
        "<h2>Plimsoll's decisions</h2>",
        plots.draw_decisions(ours),
        _table(("minute", "limit", "from", "to", "why"), [_decision(mark) for mark in ours.marks]),
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>\n"
        + "\n".join(sections)
        + "</body></html>\n"
    )


def _cells(policy: str, rows: Sequence[Result]) -> tuple[str, ...]:
    figure = bootstrap([100 * headline(row) for row in rows])
    return (
        policy,
        rows[0].setting + ("" if all(row.starts for row in rows) else ", cut to what fits"),
        f"{figure.mean:.1f} % ({figure.low:.1f} to {figure.high:.1f})",
        _attainment(rows, "short"),
        _attainment(rows, "long"),
        str(_total(rows, "oom_kills")),
        str(_total(rows, "lost_in_flight")),
        str(_total(rows, "admissible_refused")),
        f"{fmean(row.summary['preemptions_per_1000'] for row in rows):.1f}",
    )


def _attainment(rows: Sequence[Result], kind: str) -> str:
    shares = [share for row in rows if (share := row.summary[kind]["attainment"]) is not None]
    return f"{100 * fmean(shares):.1f} %" if shares else "none asked"


def _decision(mark: Mark) -> tuple[str, ...]:
    minute = f"{mark.time / 60:.1f}"
    return minute, mark.parameter, _value(mark.before), _value(mark.after), mark.reason


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _title(result: Result) -> str:
    name = "Plimsoll" if result.cell.policy == PLIMSOLL else result.cell.policy
    return f"{name}: {result.setting}"


def _timeline(result: Result) -> Timeline:
    return read_timeline(result.timeline)


def _total(rows: Sequence[Result], key: str) -> int:
    values: list[Any] = [row.summary[key] for row in rows]
    return sum(values)


def _seeds(results: Sequence[Result]) -> set[int]:
    return {result.cell.seed for result in results}


def _quantiles(values: Sequence[int]) -> str:
    middle, high = np.percentile(values, [50, 99])
    return f"{middle:.0f}/{high:.0f}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _value(value: float | None) -> str:
    return "unset" if value is None else f"{value:g}"
