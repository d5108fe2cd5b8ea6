"""What a limit may be: the spec's bounds, the engines' own, and what was learned.

In: settings, readings, what was learned. Out: :class:`Bounds` and the limits in force within them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.values import (
    FIELDS,
    TUNED,
    Blocked,
    EngineReading,
    Learned,
    Limits,
    Parameter,
    Settings,
)

# What takes the lane out of force. Where nothing is held back, how long is long does not matter.
_NEUTRAL: dict[Parameter, float | None] = {
    Parameter.WATERMARK: 0.0,
    Parameter.LONG_PROMPT_SHARE: 1.0,
    Parameter.LONG_PROMPT_TOKENS: None,
}
_WHOLE_BATCH = {
    Parameter.MAX_NUM_SEQS: "max_num_seqs",
    Parameter.MAX_NUM_BATCHED_TOKENS: "max_num_batched_tokens",
}


@dataclass(frozen=True)
class Pool:
    """One pod's cache: ``usable`` blocks of ``block_size`` tokens at ``utilization``, and how many
    blocks the whole device would hold."""

    utilization: float
    usable: int
    block_size: int
    blocks_per_device: float

    def tokens_at(self, utilization: float) -> int:
        """Tokens that the cache would hold. Elsewhere than here, one block less than the sums say:
        the engine rounds bytes, and the least error would be a refusal."""
        more = math.floor((utilization - self.utilization) * self.blocks_per_device)
        return max(0, self.usable + more - (more != 0)) * self.block_size

    def least_for(self, length: int) -> float:
        """The least utilisation, in hundredths, whose cache holds one request of ``length``."""
        missing = math.ceil(length / self.block_size) - self.usable
        if missing == 0:
            return self.utilization
        return round_up(self.utilization + (missing + 1) / self.blocks_per_device)


@dataclass(frozen=True)
class Bounds:
    """``floor`` None: the length is not the tuner's. ``top`` None: no engine has said yet what
    fits. ``lowest`` and ``highest`` are the spec's; ``cap`` is the highest utilisation that is not
    blocked, None when nothing is."""

    floor: int | None
    top: int | None
    lowest: float
    highest: float
    cap: float | None
    pools: tuple[Pool, ...]

    def clamp_utilization(self, value: float) -> float:
        """The spec's minimum wins over a blocked value: it is the user's word."""
        top = self.highest if self.cap is None else min(self.highest, self.cap)
        return max(min(value, top), self.lowest)

    def lower_utilization(self, value: float, now: float, length: int | None) -> float:
        """``value`` cut to the bounds and to what a request of ``length`` needs, but never above
        ``now``: an engine refuses a line below which its admitted length would never be served."""
        return min(max(self.clamp_utilization(value), self.least_for(length)), now)

    def raise_utilization(self, value: float, now: float) -> float:
        """``value`` cut to the bounds, but never below ``now``."""
        return max(self.clamp_utilization(value), now)

    def least_for(self, length: int | None) -> float:
        """0 when it is not known."""
        if length is None:
            return 0.0
        return max((pool.least_for(length) for pool in self.pools), default=0.0)

    def longest_at(self, utilization: float) -> int | None:
        """The longest request that every cache would hold; None when it is not known."""
        return min((pool.tokens_at(utilization) for pool in self.pools), default=None)


def find_bounds(
    settings: Settings,
    readings: Iterable[EngineReading],
    learned: Learned,
    policy: TuningPolicy,
    now: float,
) -> Bounds:
    """The lowest ceiling among spec and engines is the top: during a rollout both serve."""
    readings = tuple(readings)
    ceilings = [settings.ceiling, *(reading.max_model_len_ceiling for reading in readings)]
    top = min((ceiling for ceiling in ceilings if ceiling is not None), default=None)
    floor = None
    if settings.tunes_length and top is not None:
        default = math.ceil(policy.default_floor_share * top)
        floor = min(default if settings.floor is None else settings.floor, top)
    return Bounds(
        floor=floor,
        top=top,
        lowest=settings.min_utilization,
        highest=settings.max_utilization,
        # In mode Initial a death moves where the next pods start, not those that serve.
        cap=None if settings.mode is TuningMode.INITIAL else cap(learned, policy, now),
        pools=tuple(pool for reading in readings if (pool := _pool(reading, settings)) is not None),
    )


def _pool(reading: EngineReading, settings: Settings) -> Pool | None:
    """None for a page without these figures (stock vLLM's, for one)."""
    utilization, total = reading.gpu_memory_utilization, reading.device_total_bytes
    usable, planned = reading.usable_blocks, reading.planned_bytes.get("kv_cache")
    if utilization is None or not total or not usable or not planned:
        return None
    block_size = reading.block_size or settings.block_size
    return Pool(utilization, usable, block_size, total / (planned / usable))


def active_blocks(learned: Learned, policy: TuningPolicy, now: float) -> tuple[Blocked, ...]:
    """Those whose time has not passed: a day after one death, a week after two."""
    return tuple(
        blocked
        for blocked in learned.blocked
        if now - blocked.at < (policy.blocked_once if blocked.count < 2 else policy.blocked_twice)
    )


def cap(learned: Learned, policy: TuningPolicy, now: float) -> float | None:
    """One step below the lowest value that is blocked now."""
    lowest = min(
        (blocked.utilization for blocked in active_blocks(learned, policy, now)), default=None
    )
    return None if lowest is None else round_down(lowest - policy.utilization_step)


def start_utilization(
    settings: Settings, learned: Learned, policy: TuningPolicy, now: float
) -> float:
    """Where a deployment starts that has tuned nothing yet: the spec's value, or less when the
    profile knows better."""
    start = settings.start.gpu_memory_utilization
    assert start is not None  # settings.py always fills it in
    candidates = [start]
    if blocked := active_blocks(learned, policy, now):
        retreat = min(entry.retreat for entry in blocked)
        ceiling, good = cap(learned, policy, now), learned.last_known_good
        if good is not None and ceiling is not None and good <= ceiling:
            retreat = max(retreat, good)
        candidates.append(retreat)
    if learned.overrun is not None and is_fresh(learned.overrun_at, policy, now):
        candidates.append(round_down(1 - policy.headroom_share - learned.overrun))
    return min(candidates)


def is_fresh(seen_at: float | None, policy: TuningPolicy, now: float) -> bool:
    """Whether an overrun seen then still counts."""
    return seen_at is not None and now - seen_at < policy.overrun_memory


def limits_in_force(settings: Settings, tuned: Limits, previous: Limits, bounds: Bounds) -> Limits:
    """``tuned`` within the bounds in modes Auto and Initial; ``previous`` in Hold; the spec's
    values otherwise.

    Off and Advise take the spec's utilisation as it stands, blocked or not: that is what they are
    for.
    """
    start, utilization = settings.start.gpu_memory_utilization, previous.gpu_memory_utilization
    assert start is not None  # settings.py always fills it in
    if settings.mode in TUNED:
        chosen = tuned.gpu_memory_utilization
        utilization = bounds.clamp_utilization(start if chosen is None else chosen)
    elif settings.mode is not TuningMode.HOLD or utilization is None:
        utilization = start
    others: dict[str, Any] = {
        FIELDS[parameter]: _batch_limit(settings, tuned, previous, parameter)
        for parameter in (*_NEUTRAL, *_WHOLE_BATCH)
    }
    return Limits(_length(settings, tuned, previous, bounds), utilization, **others)


def _batch_limit(
    settings: Settings, tuned: Limits, previous: Limits, parameter: Parameter
) -> float | None:
    """None as long as nothing was sent: the engine's flag holds. Once it was, leaving it out would
    leave the old value in force."""
    if not settings.may_move(parameter):
        return None
    sent, chosen = previous.value(parameter), tuned.value(parameter)
    if settings.mode is TuningMode.HOLD:
        return sent
    whole = whole_batch(settings, parameter)
    if settings.mode in TUNED and chosen is not None:
        return chosen if whole is None else min(chosen, whole)
    if sent is None:
        return None
    return _NEUTRAL.get(parameter, whole)


def whole_batch(settings: Settings, parameter: Parameter) -> int | None:
    """What the spec allows in one step; None for other limits, and where a flag decides."""
    field = _WHOLE_BATCH.get(parameter)
    found: int | None = None if field is None else getattr(settings, field)
    return found


def _length(settings: Settings, tuned: Limits, previous: Limits, bounds: Bounds) -> int | None:
    wanted = settings.start.max_model_len
    if settings.mode is TuningMode.HOLD and previous.max_model_len is not None:
        wanted = previous.max_model_len
    elif settings.mode in TUNED and bounds.floor is not None and tuned.max_model_len:
        wanted = max(tuned.max_model_len, bounds.floor)
    elif wanted is None and previous.max_model_len is not None:
        # Once a length has been sent, leaving it out would leave the old one in force.
        wanted = bounds.top or previous.max_model_len
    if wanted is None:
        return None
    return wanted if bounds.top is None else min(wanted, bounds.top)


def round_down(utilization: float) -> float:
    """To hundredths: finer steps are noise, and status shows two places. The small term keeps
    0.29 (28.999... hundredths in binary) at 0.29."""
    return math.floor(utilization * 100 + 1e-6) / 100


def round_up(utilization: float) -> float:
    return math.ceil(utilization * 100 - 1e-6) / 100
