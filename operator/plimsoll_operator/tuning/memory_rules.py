"""Rules about the memory line: how much of the device the engine may fill.

Free memory that runs low is what an OOM is made of, whatever the cache says, and the answer is to
give memory back. Memory that is free while the cache is short is there for the taking, slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll_operator.tuning.bounds import Bounds, round_down
from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.pressure import worst_pressure
from plimsoll_operator.tuning.signals import Signals
from plimsoll_operator.tuning.situation import Proposal, Situation
from plimsoll_operator.tuning.values import Parameter, Rule

_BATCH = Parameter.MAX_NUM_BATCHED_TOKENS
_LINE = Parameter.GPU_MEMORY_UTILIZATION


def answer_allocation_failure(situation: Situation) -> Proposal | None:
    """The engine caught an allocation that failed: an OOM that nearly was. Half the batch budget
    where its activations are the larger part, else one step of the line."""
    failed = [signals for signals in situation.signals if signals.allocation_failures]
    if not failed:
        return None
    worst = max(failed, key=lambda s: (s.allocation_failures or 0, s.pod))
    count = worst.allocation_failures or 0
    reason = f"{worst.pod}: {count:g} allocations failed and were caught"
    inputs = {"allocationFailures": count}
    budget = _halved_budget(situation, worst)
    if budget is not None:
        return Proposal(
            _BATCH, budget, budget, Rule.ALLOCATION_FAILURE, reason,
            "steps that need half the memory for activations", inputs,
        )  # fmt: skip
    # Where the headroom is missing too, no less than its own rule would give back.
    short = _find_missing_headroom(situation)
    step = situation.policy.utilization_step if short is None else short.step
    return _utilization(
        situation,
        situation.utilization - step,
        Rule.ALLOCATION_FAILURE,
        reason,
        "more free memory for activations",
        inputs,
    )


def _halved_budget(situation: Situation, worst: Signals) -> int | None:
    """None when it may not move, is at its least, or would free less than a step of the line."""
    policy, reading, budget = situation.policy, worst.reading, situation.value(_BATCH)
    total, activations = reading.device_total_bytes, reading.planned_bytes.get("activations")
    if budget is None or not situation.settings.may_move(_BATCH) or not total or not activations:
        return None
    # The plan is for the whole budget that the engine started with.
    whole = situation.settings.max_num_batched_tokens or budget
    freed = activations * (budget / 2) / whole
    seqs = situation.value(Parameter.MAX_NUM_SEQS) or 0
    half = int(budget) // 2
    enough = freed >= policy.utilization_step * total
    return half if enough and half >= max(policy.batch_least, seqs) else None


def restore_batch(situation: Situation) -> Proposal | None:
    """Long without a failure and with memory to spare: twice the budget, up to the spec's."""
    budget, whole = (
        situation.limits.max_num_batched_tokens,
        situation.settings.max_num_batched_tokens,
    )
    if budget is None or whole is None or budget >= whole or situation.soon_after_oom():
        return None
    if min(situation.since(_BATCH), situation.since(_LINE)) < situation.policy.batch_hold:
        return None
    if not situation.settings.may_move(_BATCH) or _least_spare(situation, 2) is None:
        return None
    wanted = min(2 * budget, whole)
    return Proposal(
        _BATCH,
        wanted,
        wanted,
        Rule.AMPLE_HEADROOM,
        f"no allocation failed for {situation.policy.batch_hold / 3600:g} h",
        "prompts are computed in larger steps again",
    )


def keep_headroom(situation: Situation) -> Proposal | None:
    """Free memory at its lowest was less than the headroom: give back what is missing."""
    short = _find_missing_headroom(situation)
    if short is None:
        return None
    return _utilization(
        situation,
        situation.utilization - short.step,
        Rule.LOW_HEADROOM,
        f"{short.pod}: {_mib(short.low)} MiB free at the lowest, {_mib(short.headroom)} MiB wanted",
        "free memory returns above the headroom",
        {"freeLowWaterBytes": short.low, "headroomBytes": short.headroom},
    )


@dataclass(frozen=True)
class _MissingHeadroom:
    """Of the pod that misses most: lowest free and wanted bytes, and the step of the line, at least
    the policy's, that gives back what is missing."""

    pod: str
    low: float
    headroom: float
    step: float


def _find_missing_headroom(situation: Situation) -> _MissingHeadroom | None:
    """None also while the last move of the line has not settled."""
    policy = situation.policy
    if situation.since(_LINE) < policy.memory_settle:
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
    return _MissingHeadroom(pod, low, headroom, step)


def use_free_memory(situation: Situation) -> Proposal | None:
    """The cache is short while memory is free: one small step up, rarely, and never soon after an
    OOM."""
    policy, reason = situation.policy, _need_for_cache(situation)
    if reason is None or situation.since(_LINE) < policy.raise_interval:
        return None
    if situation.soon_after_oom():
        return None
    # After the step the headroom must still be there twice.
    low = _least_spare(situation, 2, policy.utilization_step)
    if low is None or _would_overrun(situation, situation.utilization + policy.utilization_step):
        return None
    usage = max(signals.usage for signals in situation.signals)
    return _utilization(
        situation,
        situation.utilization + policy.utilization_step,
        Rule.AMPLE_HEADROOM,
        f"{reason}; {_mib(low)} MiB free at the lowest",
        "a larger cache",
        {"freeLowWaterBytes": low, "kvCacheUsage": usage},
    )


def _least_spare(situation: Situation, times: float, step: float = 0.0) -> float | None:
    """The lowest free bytes of all pods, when each has ``times`` the headroom and ``step`` of its
    device to spare; None otherwise, and while one is not known."""
    lows = []
    for signals in situation.signals:
        memory = _memory(signals, situation.policy)
        if memory is None:
            return None
        low, headroom, total = memory
        if low < times * headroom + step * total:
            return None
        lows.append(low)
    return min(lows, default=None)


def _would_overrun(situation: Situation, line: float) -> bool:
    """Whether the peaks of past days, above ``line``, would leave less than the headroom. The less
    is known, the larger they are taken to be (the autoscaler's upper bound)."""
    policy, overrun = situation.policy, situation.learned.peaks.overrun
    peak = overrun.quantile(policy.overrun_quantile)
    if peak is None:
        return False
    days = overrun.total * policy.peak_window / 86_400
    margin = min(1 + 1 / days, policy.overrun_margin_most) if days else policy.overrun_margin_most
    return line + margin * peak + policy.headroom_share > 1


def _need_for_cache(situation: Situation) -> str | None:
    """Pressure that lasts, or a length that only the size of the cache keeps below the ceiling;
    where the line costs a restart, what past days wanted, since it moves in a valley only."""
    settings, policy = situation.settings, situation.policy
    if _LINE not in settings.live:
        short = situation.learned.peaks.demand.share_above(1.0)
        return f"in {short:.0%} of the time more was wanted than there was" if short else None
    bounds, length = situation.bounds, situation.length
    pressed = worst_pressure(situation.signals, settings, policy)
    # n pages span n - 1 intervals, and are never exactly one interval apart.
    lasting = (policy.raise_scrapes - 1.2) * settings.scrape_interval
    if pressed is not None and (situation.pressed_for or 0.0) >= lasting:
        return pressed.reason
    longest = bounds.longest_at(situation.utilization)
    if bounds.floor is None or bounds.top is None or longest is None or length is None:
        return None
    if length < bounds.top and situation.calm_for is not None and longest < bounds.top:
        return f"the cache holds no request longer than {longest} tokens"
    return None


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
    return Proposal(_LINE, value, wanted, rule, reason, expected, inputs, limited)


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


def _mib(size: float) -> int:
    return round(size / (1024 * 1024))
