"""What the engines have been seen to do since the advisor looks, and what better limits would save.

In: the pages of each pass. Out: sums, and sentences with figures. A counter counts only between two
pages of one life of an engine; what happened between other pages is not made up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plimsoll_operator.tuning.signals import Window, increase, lengths_since
from plimsoll_operator.tuning.values import EngineReading, OOMRecord, Peaks

# The vertical pod autoscaler's margin and quantile (VPA: p90 target x 1.15; memory peaks p95).
_MARGIN = 1.15
_QUANTILE = 0.95
# An hour of windows with traffic in them.
_WINDOWS = 12.0


@dataclass(frozen=True)
class Traffic:
    """Sums over all pods since ``since`` (Unix seconds)."""

    since: float
    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0

    @property
    def recomputed_tokens(self) -> int | None:
        """About: a preempted request computes its prompt and half of its output again. None when no
        request has ended yet."""
        if not self.requests:
            return None
        mean = (self.prompt_tokens + self.generation_tokens / 2) / self.requests
        return round(self.preemptions * mean)


def add_pages(
    traffic: Traffic, before: Mapping[str, Window], after: Mapping[str, Window]
) -> Traffic:
    """``before`` and ``after`` are the windows around this pass."""
    for pod, window in after.items():
        known = before.get(pod)
        if known and known[-1].at >= window[-1].at:
            continue
        traffic = replace(
            traffic,
            requests=traffic.requests
            + round(sum(count for _, count in lengths_since(window, "output_lengths"))),
            prompt_tokens=traffic.prompt_tokens + _grown(window, "prompt_tokens_total"),
            generation_tokens=traffic.generation_tokens + _grown(window, "generation_tokens_total"),
            preemptions=traffic.preemptions + _grown(window, "preemptions_total"),
        )
    return traffic


def _grown(window: Window, counter: str) -> int:
    return round(increase(window, counter) or 0)


def peak_demand(peaks: Peaks) -> float | None:
    """Share of a pod's cache that was wanted at the peaks of past days; None before an hour of
    windows with traffic is known."""
    return peaks.demand.quantile(_QUANTILE) if peaks.demand.total >= _WINDOWS else None


def find_savings(
    traffic: Traffic, oom: OOMRecord, peaks: Peaks, pods: int, readings: tuple[EngineReading, ...]
) -> tuple[str, ...]:
    """What there is to save, in sentences; the figures are upper bounds, since no limit prevents
    everything."""
    found = []
    if oom.total:
        found.append(
            f"{oom.total} ends by memory: each lost the requests in flight and cost a start"
        )
    if traffic.preemptions:
        tokens, whole = traffic.recomputed_tokens, traffic.prompt_tokens
        text = f"{traffic.preemptions} preemptions"
        if tokens is not None and whole:
            text += f": about {tokens} tokens computed again, {tokens / whole:.1%} of all prompts'"
        found.append(text)
    peak = peak_demand(peaks)
    if peak is not None and pods and readings:
        needed = max(1, math.ceil(pods * peak * _MARGIN))
        text = (
            f"{min(peak, 9.99):.0%} of a cache was wanted at the peaks (p95 of five-minute windows)"
        )
        if needed < pods:
            text += f": for the cache's sake {needed} of {pods} pods would do"
        elif peak > 1:
            text += f": {needed} pods instead of {pods} would hold it without a queue"
        found.append(text)
    return tuple(found)
