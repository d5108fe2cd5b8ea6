"""The rules: each looks at one situation and proposes one move of one limit, or nothing.

A proposal carries the value within the bounds and the one that was wanted without them; where the
bounds leave nothing, the two differ and the value is the present one.

Two knobs answer two different things. A cache that is full with requests waiting is not an OOM: a
paged engine queues and recomputes, and what helps is to admit less for a while (length) or to give
the pool more of the memory that is free (utilisation up). Free memory that runs low is what an OOM
is made of, whatever the cache says: the answer is to give memory back (utilisation down).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plimsoll_operator.tuning.bounds import Bounds, round_down
from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.signals import Signals
from plimsoll_operator.tuning.values import (
    Change,
    Learned,
    LimitsOutcome,
    OutcomeKind,
    Parameter,
    Rule,
    Settings,
)


@dataclass(frozen=True)
class Situation:
    """What the rules see: every pod known, nothing in flight. ``pressed_for`` and ``calm_for`` are
    seconds between the first and the newest page of an unbroken run, None when there is none."""

    settings: Settings
    policy: TuningPolicy
    signals: tuple[Signals, ...]
    bounds: Bounds
    length: int | None
    utilization: float
    learned: Learned
    history: tuple[Change, ...]
    revision: int
    outcomes: Mapping[str, LimitsOutcome]
    pressed_for: float | None
    calm_for: float | None
    now: float

    def since(self, parameter: Parameter) -> float:
        """Seconds since the last change of ``parameter``; infinite when there was none."""
        times = [change.time for change in self.history if change.parameter is parameter]
        return self.now - max(times, default=float("-inf"))


@dataclass(frozen=True)
class Proposal:
    parameter: Parameter
    value: float
    uncapped: float
    rule: Rule
    reason: str
    expected: str
    inputs: Mapping[str, float] = field(default_factory=dict)
    # Why ``value`` is not ``uncapped``.
    limited: str | None = None


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
    if usage >= policy.demand_usage and signals.preemption_rate:
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


def worst_pressure(situation: Situation) -> Pressure | None:
    """Of all pods: severe before mild, then the fullest, then by name."""
    found = [
        pressed
        for signals in situation.signals
        if (pressed := pressure(signals, situation.settings, situation.policy)) is not None
    ]
    return max(found, key=lambda p: (p.severe, p.signals.usage, p.signals.pod), default=None)


def is_calm(signals: Signals, policy: TuningPolicy) -> bool:
    """An unknown preemption rate is not calm."""
    return (
        signals.usage < policy.calm_usage
        and signals.reading.waiting == 0
        and signals.preemption_rate == 0
    )


def take_back_rejected(situation: Situation) -> Proposal | None:
    """An engine refused the newest change: back to where that limit was."""
    refusals = [
        outcome
        for _, outcome in sorted(situation.outcomes.items())
        if outcome.kind is OutcomeKind.REJECTED and outcome.revision == situation.revision
    ]
    if not refusals or not situation.history:
        return None
    change = situation.history[-1]
    if change.revision != situation.revision or change.before is None:
        return None
    if change.rule in (Rule.SPEC, Rule.MODE, Rule.REJECTED):
        return None
    return Proposal(
        change.parameter,
        change.before,
        change.before,
        Rule.REJECTED,
        f"{refusals[0].pod} refused: {refusals[0].reason}",
        "the limits that held before",
    )


def answer_allocation_failure(situation: Situation) -> Proposal | None:
    """The engine caught an allocation that failed: an OOM that nearly was."""
    failed = [signals for signals in situation.signals if signals.allocation_failures]
    if not failed:
        return None
    worst = max(failed, key=lambda s: (s.allocation_failures or 0, s.pod))
    count = worst.allocation_failures or 0
    return _utilization(
        situation,
        situation.utilization - situation.policy.utilization_step,
        Rule.ALLOCATION_FAILURE,
        f"{worst.pod}: {count:g} allocations failed and were caught",
        "more free memory for activations",
        {"allocationFailures": count},
    )


def keep_headroom(situation: Situation) -> Proposal | None:
    """Free memory at its lowest was less than the headroom: give back what is missing."""
    policy = situation.policy
    if situation.since(Parameter.GPU_MEMORY_UTILIZATION) < policy.memory_settle:
        return None
    found = [
        (headroom - low, low, headroom, total, signals.pod)
        for signals in situation.signals
        if (memory := _memory(signals, policy)) is not None
        for low, headroom, total in (memory,)
        if low < headroom
    ]
    if not found:
        return None
    missing, low, headroom, total, pod = max(found)
    step = min(max(missing / total, policy.utilization_step), policy.utilization_down_max)
    return _utilization(
        situation,
        situation.utilization - step,
        Rule.LOW_HEADROOM,
        f"{pod}: {_mib(low)} MiB free at the lowest, {_mib(headroom)} MiB wanted",
        "free memory returns above the headroom",
        {"freeLowWaterBytes": low, "headroomBytes": headroom},
    )


def use_free_memory(situation: Situation) -> Proposal | None:
    """The cache is short while memory is free: one small step up, rarely, and never soon after an
    OOM."""
    policy, reason = situation.policy, _need_for_cache(situation)
    if reason is None or situation.since(Parameter.GPU_MEMORY_UTILIZATION) < policy.raise_interval:
        return None
    last_oom = situation.learned.last_oom_at
    if last_oom is not None and situation.now - last_oom < policy.no_raise_after_oom:
        return None
    lows = []
    for signals in situation.signals:
        memory = _memory(signals, policy)
        if memory is None:
            return None
        low, headroom, total = memory
        # After the step the headroom must still be there twice.
        if low < 2 * headroom + policy.utilization_step * total:
            return None
        lows.append(low)
    usage = max(signals.usage for signals in situation.signals)
    return _utilization(
        situation,
        situation.utilization + policy.utilization_step,
        Rule.AMPLE_HEADROOM,
        f"{reason}; {_mib(min(lows))} MiB free at the lowest",
        "a larger cache",
        {"freeLowWaterBytes": min(lows), "kvCacheUsage": usage},
    )


def _need_for_cache(situation: Situation) -> str | None:
    """Pressure that lasts, or a length that only the size of the cache keeps below the ceiling."""
    pressed, bounds, length = worst_pressure(situation), situation.bounds, situation.length
    # n pages span n - 1 intervals, and are never exactly one interval apart.
    lasting = (situation.policy.raise_scrapes - 1.2) * situation.settings.scrape_interval
    if pressed is not None and (situation.pressed_for or 0.0) >= lasting:
        return pressed.reason
    longest = bounds.longest_at(situation.utilization)
    if bounds.floor is None or bounds.top is None or longest is None or length is None:
        return None
    if length < bounds.top and situation.calm_for is not None and longest < bounds.top:
        return f"the cache holds no request longer than {longest} tokens"
    return None


def admit_less(situation: Situation) -> Proposal | None:
    """The cache is short: admit shorter requests only, so that those inside can finish."""
    length, floor = situation.length, situation.bounds.floor
    pressed = worst_pressure(situation)
    if length is None or floor is None or pressed is None or situation.pressed_for is None:
        return None
    interval = situation.settings.scrape_interval
    # Mild pressure must be on two pages; they are never exactly one interval apart.
    if not pressed.severe and situation.pressed_for < 0.8 * interval:
        return None
    wanted = _whole_blocks(length * situation.policy.length_down_factor, situation)
    value = max(wanted, floor)
    signals = pressed.signals
    return Proposal(
        Parameter.MAX_MODEL_LEN,
        min(value, length),
        wanted,
        Rule.PRESSURE,
        pressed.reason,
        f"requests above {min(value, length)} tokens come back later, those inside finish",
        {
            "kvCacheUsage": signals.usage,
            "waiting": signals.reading.waiting,
            "preemptionsPerSecond": signals.preemption_rate or 0.0,
        },
        f"maxModelLen is at its floor of {floor}" if wanted < floor else None,
    )


def admit_more(situation: Situation) -> Proposal | None:
    """Calm for long enough: admit longer requests again, up to the ceiling."""
    length, top, calm_for = situation.length, situation.bounds.top, situation.calm_for
    if length is None or top is None or situation.bounds.floor is None or calm_for is None:
        return None
    if length >= top:
        return None
    wait = calm_window(situation)
    if min(calm_for, situation.since(Parameter.MAX_MODEL_LEN)) < wait:
        return None
    wanted = min(int(length * situation.policy.length_up_factor), top)
    longest = situation.bounds.longest_at(situation.utilization)
    # The top itself need not be whole blocks.
    value = top if wanted >= top else _whole_blocks(wanted, situation)
    limited = None
    if longest is not None and longest < value:
        # A few blocks more are not worth a change.
        worth = longest >= length * (1 + situation.policy.length_gain_min)
        value = longest if worth else length
        limited = f"the cache holds no request longer than {longest} tokens"
    return Proposal(
        Parameter.MAX_MODEL_LEN,
        value,
        wanted,
        Rule.CALM,
        f"calm for {calm_for:.0f} s",
        f"requests up to {value} tokens are admitted again",
        {"calmSeconds": calm_for},
        limited,
    )


def calm_window(situation: Situation) -> float:
    """How long it must be calm: a settle time within a recovery, else the window, doubled for each
    lowering that followed a raise lately. A load that flaps is thus followed ever more slowly."""
    policy = situation.policy
    lengths = [c for c in situation.history if c.parameter is Parameter.MAX_MODEL_LEN]
    if lengths and lengths[-1].rule is Rule.CALM:
        return policy.settle_scrapes * situation.settings.scrape_interval
    reversals = sum(
        before.rule is Rule.CALM and after.rule is Rule.PRESSURE
        for before, after in itertools.pairwise(lengths)
        if situation.now - after.time < policy.reversal_memory
    )
    return min(policy.calm_window * 2.0**reversals, policy.calm_window_max)


# First match wins: safety, then memory that is free for the taking, then what users feel.
RULES: tuple[Callable[[Situation], Proposal | None], ...] = (
    take_back_rejected,
    answer_allocation_failure,
    keep_headroom,
    use_free_memory,
    admit_less,
    admit_more,
)


def _utilization(
    situation: Situation,
    wanted: float,
    rule: Rule,
    reason: str,
    expected: str,
    inputs: Mapping[str, float],
) -> Proposal:
    """A move of the memory line, cut to the bounds and never turned around by them.

    An engine refuses a line whose cache would not hold one request of the admitted length; where
    the length may move, it goes first.
    """
    bounds, now, length = situation.bounds, situation.utilization, situation.length
    wanted = round_down(wanted)
    if wanted > now:
        value = bounds.raise_utilization(wanted, now)
    else:
        value, cut = bounds.lower_utilization(wanted, now, length), _cut_length(situation, wanted)
        if value > bounds.clamp_utilization(wanted) and cut is not None:
            first = f"{reason}; first the length, which the cache at {wanted:.2f} must hold"
            return Proposal(Parameter.MAX_MODEL_LEN, cut, cut, rule, first, expected, inputs)
    limited = None if value == wanted else _what_limits(bounds, wanted, now, length)
    return Proposal(
        Parameter.GPU_MEMORY_UTILIZATION, value, wanted, rule, reason, expected, inputs, limited
    )


def _cut_length(situation: Situation, utilization: float) -> int | None:
    """A shorter length, at least the floor, that the cache holds at ``utilization``; None when the
    length may not move or need not."""
    bounds, length = situation.bounds, situation.length
    longest = bounds.longest_at(bounds.clamp_utilization(utilization))
    if bounds.floor is None or length is None or longest is None:
        return None
    cut = max(bounds.floor, min(length, longest))
    return cut if cut < length else None


def _what_limits(bounds: Bounds, wanted: float, now: float, length: int | None) -> str:
    least = bounds.least_for(length)
    if wanted < now and least > bounds.lowest:
        return (
            f"below a gpuMemoryUtilization of {least:.2f} the cache would not hold one request of "
            f"{length} tokens"
        )
    if wanted < now:
        return f"gpuMemoryUtilization is at its minimum of {bounds.lowest:.2f}"
    if bounds.cap is not None and bounds.cap < bounds.highest:
        return f"gpuMemoryUtilization above {bounds.cap:.2f} ended in an OOM lately"
    return f"gpuMemoryUtilization is at its maximum of {bounds.highest:.2f}"


def _memory(signals: Signals, policy: TuningPolicy) -> tuple[float, float, int] | None:
    """Lowest free bytes, wanted headroom and total of a pod; None when its page has no memory."""
    low, total = signals.reading.device_free_low_water_bytes, signals.reading.device_total_bytes
    return None if low is None or not total else (low, policy.headroom(total), total)


def _whole_blocks(length: float, situation: Situation) -> int:
    block = situation.settings.block_size
    return max(block, int(length) // block * block)


def _mib(size: float) -> int:
    return round(size / (1024 * 1024))
