"""Results of an evaluation for people and for programs. In: results of one cell or of several. Out:
a table, JSON. Every figure in them is simulated.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from plimsoll_simulator.comparison import Interval, compare
from plimsoll_simulator.evaluation import Result
from plimsoll_simulator.policies import PLIMSOLL, REFERENCE


def headline(result: Result) -> float:
    """The attainment of the worse class: of the arrivals in the burst where there is one."""
    burst = result.summary["burst_min_class"]
    found: float = result.summary["min_class"] if burst is None else burst
    return found


def by_policy(results: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.cell.policy, []).append(result)
    return found


def reference_of(policies: Iterable[str]) -> str:
    """What differences are taken to: today's default, where it is among them."""
    return REFERENCE if REFERENCE in policies else PLIMSOLL


def build_tables(results: Sequence[Result], title: str) -> tuple[Table, Table]:
    """How the policies stand, and what they cost: two tables, so that 80 columns hold each."""
    found = by_policy(results)
    reference = reference_of(found)
    figures = {p: {r.cell.seed: headline(r) for r in rs} for p, rs in found.items()}
    busy = _mean(results, lambda s: s["prompt_busy"])
    standing = Table(
        title=title,
        caption=(
            "Attainment: share of all arrivals of the worse class that were answered in time, in "
            "the burst where there is one; means with 95 % intervals over "
            f"{len(figures[reference])} seeds. Fragmentation x{results[0].cell.factor:g}. Prompts "
            f"alone keep the device {busy:.0%} busy in the burst. *: does not start at its own "
            "length; shown with the longest that fits."
        ),
    )
    for column in ("policy", "setting", "attainment", f"minus {reference}", "worst seed"):
        standing.add_column(column, no_wrap=column == "policy")
    costs = Table()
    for column in (
        "policy", "whole run", "OOM kills", "restarts", "refused", "preempted per 1000",
        "short TTFT p99", "tokens in time",
    ):  # fmt: skip
        costs.add_column(column, no_wrap=column == "policy")
    for each in compare(figures, reference):
        rows = found[each.policy]
        name = each.policy + ("" if all(row.starts for row in rows) else "*")
        standing.add_row(
            name,
            rows[0].setting,
            _interval(each.figure),
            "" if each.difference is None else _interval(each.difference, signed=True),
            f"{each.worst:.3f} (#{each.worst_seed})",
        )
        costs.add_row(
            name,
            f"{_mean(rows, lambda s: s['min_class']):.3f}",
            str(sum(row.summary["oom_kills"] for row in rows)),
            str(sum(row.summary["restarts"] for row in rows)),
            f"{_refused(rows):.2%}",
            f"{_mean(rows, lambda s: s['preemptions_per_1000']):.1f}",
            _short_ttft(rows),
            f"{_mean(rows, lambda s: s['token_goodput']):.3f}",
        )
    return standing, costs


def _short_ttft(results: Sequence[Result]) -> str:
    """The mean of the seeds' 99th percentiles, in the burst where there is one."""
    shorts = [result.summary["short"] for result in results]
    found = [
        value
        for short in shorts
        if (value := short["burst_ttft_p99"] or short["ttft_p99"]) is not None
    ]
    return f"{sum(found) / len(found):.1f} s" if found else "none"


def format_json(results: Sequence[Result]) -> str:
    """All summaries with their inputs, and the comparison of each trace."""
    cells = []
    for result in results:
        inputs = {**asdict(result.cell), "trace": result.cell.trace.name}
        cells.append(
            {
                "inputs": inputs,
                "starts": result.starts,
                "setting": result.setting,
                "summary": result.summary,
            }
        )
    comparisons = {}
    for name in dict.fromkeys(result.cell.trace.name for result in results):
        found = by_policy(r for r in results if r.cell.trace.name == name)
        figures = {p: {r.cell.seed: headline(r) for r in rs} for p, rs in found.items()}
        reference = reference_of(found)
        comparisons[name] = {
            "reference": reference,
            "standings": [asdict(standing) for standing in compare(figures, reference)],
        }
    content = {"simulated": True, "comparisons": comparisons, "cells": cells}
    return json.dumps(content, indent=1) + "\n"


def _interval(interval: Interval, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{interval.mean:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def _mean(results: Sequence[Result], figure: Callable[[dict[str, Any]], float]) -> float:
    return statistics.fmean(figure(result.summary) for result in results)


def _refused(results: Sequence[Result]) -> float:
    """Of all arrivals, those that an empty engine could have served."""
    arrivals: int = sum(result.summary["arrivals"] for result in results)
    refused: int = sum(result.summary["admissible_refused"] for result in results)
    return refused / max(1, arrivals)
