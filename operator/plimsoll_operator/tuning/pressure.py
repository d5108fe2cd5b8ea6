"""Whether a pod is short of cache, or at rest.

In: the signals of one pod. Out: a :class:`Pressure` with its reason, or none. A cache that is full
with requests waiting is not an OOM, and alone not even pressure: a paged engine queues.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.signals import Signals
from plimsoll_operator.tuning.values import Settings


@dataclass(frozen=True)
class Pressure:
    """Why a pod is short of cache; ``severe``: one page is evidence enough."""

    signals: Signals
    severe: bool
    reason: str


def pressure(signals: Signals, settings: Settings, policy: TuningPolicy) -> Pressure | None:
    """Fullness counts only together with waiting, preemptions or queue time; below half a cache
    the queue is compute's, and no memory knob helps it."""
    usage, waiting = signals.usage, signals.reading.waiting
    pod = f"{signals.pod}: cache {usage:.0%} full"
    if is_preempting(signals, policy):
        rate = signals.preemption_rate
        return Pressure(signals, True, f"{pod}, {rate:.2g} preemptions/s, {waiting} waiting")
    if not waiting:
        return None
    if usage >= policy.pressure_usage:
        return Pressure(signals, usage >= policy.severe_usage, f"{pod}, {waiting} waiting")
    if usage < policy.demand_usage:
        return None
    predicted, queued = signals.predicted_usage, signals.mean_queue_time
    if predicted is not None and predicted > 1:
        reason = f"{pod}, {waiting} waiting would need {predicted:.0%} of it"
        return Pressure(signals, False, reason)
    if queued is not None and queued > settings.time_to_first_token:
        goal = settings.time_to_first_token
        return Pressure(signals, False, f"{pod}, queued for {queued:.1f} s (goal {goal:g} s)")
    return None


def worst_pressure(
    signals: Iterable[Signals], settings: Settings, policy: TuningPolicy
) -> Pressure | None:
    """Of all pods: severe before mild, then the fullest, then by name."""
    found = [
        pressed for each in signals if (pressed := pressure(each, settings, policy)) is not None
    ]
    return max(found, key=lambda p: (p.severe, p.signals.usage, p.signals.pod), default=None)


def is_preempting(signals: Signals, policy: TuningPolicy) -> bool:
    """For want of cache: below half of it a preemption has another cause."""
    return signals.usage >= policy.demand_usage and bool(signals.preemption_rate)


def is_calm(signals: Signals, policy: TuningPolicy) -> bool:
    return has_slack(signals, policy) and signals.reading.waiting == 0


def has_slack(signals: Signals, policy: TuningPolicy) -> bool:
    """Room in the cache, whoever waits. An unknown preemption rate is not slack."""
    return signals.usage < policy.calm_usage and signals.preemption_rate == 0
