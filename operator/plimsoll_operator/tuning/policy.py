"""Every constant of the tuner, with its source. Shares are fractions of the device's memory."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True)
class TuningPolicy:
    """Durations in seconds. The defaults suit live limits, where a move costs nothing; moves that
    need a restart are weighed first (restarts.py)."""

    # Pressure. A full cache alone is not pressure (a paged engine is meant to be full): it counts
    # with requests waiting or preempted. The public saturation detectors use 0.8 for routing; the
    # tuner takes something away from users, so it waits for more.
    pressure_usage: float = 0.90
    # With this usage and waiting requests, or with preemptions, one scrape is evidence enough.
    severe_usage: float = 0.95
    # Below this the queue waits for compute, not for memory: no memory knob helps.
    demand_usage: float = 0.50
    calm_usage: float = 0.75

    # The admitted length: down by half, up by doubling, so that few steps span the whole range.
    length_down_factor: float = 0.5
    length_up_factor: float = 2.0
    length_gain_min: float = 0.10
    # Floor where the spec asks for length tuning but guarantees none, as a share of the ceiling.
    default_floor_share: float = 0.25
    # After its own move the tuner does not judge for this many scrapes.
    settle_scrapes: float = 2.0
    # Turns. A limit that goes there and back within half an hour flaps, and at most two turns a day
    # are allowed under a load that is on and off by the minute. So the first recovery of a day is
    # quick, since most bursts come alone; one that did not last half an hour makes the next wait
    # for longer than that, a second one for a day.
    reversal_gap: float = 30 * 60.0
    reversal_memory: float = 24 * 3600.0
    recovery_waits: tuple[float, ...] = (20.0, 31 * 60.0, 24 * 3600.0)

    # The long lane: the strongest simple rule known is 70 % of the cache for prompts above 8k, with
    # a watermark of 0.05 (vLLM's PR 44594: 1065 preemptions become 187, at 5 % more throughput).
    long_share: float = 0.70
    watermark: float = 0.05
    # What is long (lane.py has the reasons).
    long_prompt_most: int = 8192
    long_prompt_of_ceiling: float = 0.25
    short_prompts_side_by_side: int = 2
    # A lane that is off by less stays: the size of the cache moves a little with the line.
    lane_deadband: float = 0.25
    # The share that short prompts need: their peak (p95) with the vertical pod autoscaler's margin
    # of 15 %, once an hour of windows is known; within the range where lanes were ever tried.
    short_quantile: float = 0.95
    short_margin: float = 1.15
    short_windows: float = 12.0
    long_share_least: float = 0.50
    long_share_most: float = 0.85
    share_deadband: float = 0.05
    share_interval: float = 10 * 60.0
    # Who has used up half of its patience, and twice as much of it as the other, gets a step of the
    # lane. A turn waits a minute, to take back what went too far; one that gives to long prompts
    # again waits longer with each turn of the last day, as recoveries do. A step of 0.10 beat 0.05 in
    # simulated bursts of long prompts (docs/log.md), and the few that lead from end to end leave
    # earlier turns in the history.
    balance_pressed: float = 0.5
    balance_ratio: float = 2.0
    balance_step: float = 0.10
    balance_most: float = 0.90
    balance_interval: float = 15.0
    turn_waits: tuple[float, ...] = (60.0, 31 * 60.0, 24 * 3600.0)
    # Preemption. The same measurement: above 0.10 there are no fewer preemptions, and 3 % less
    # throughput. It goes back once there has been room for ten minutes.
    watermark_step: float = 0.025
    watermark_most: float = 0.10
    watermark_hold: float = 10 * 60.0
    seqs_interval: float = 60.0
    seqs_down_factor: float = 0.8
    seqs_up_factor: float = 1.5
    # A long prompt may wait fifteen times as long as a short one (30 s for 2 s, Mooncake's limit of
    # an effective request).
    long_patience: float = 15.0

    # The batch budget: half after a caught allocation failure, twice after as long as an OOM blocks.
    batch_least: int = 256
    batch_hold: float = 6 * 3600.0

    # Peaks: windows of five minutes (Autopilot), upper bound x (1 + 1/days), at most x 3 (12 h).
    peak_window: float = 300.0
    overrun_quantile: float = 0.95
    overrun_margin_most: float = 3.0

    # Where a limit costs a restart: every half hour at most, after 10 minutes of calm below a third
    # of the cache, and with more gained
    # in a day than drain and start (60 to 300 s were measured of others) cost.
    valley_calm: float = 10 * 60.0
    valley_usage: float = 0.35
    restart_interval: float = 30 * 60.0
    restart_horizon: float = 24 * 3600.0
    start_time: float = 120.0

    # Free memory that must be left at the lowest moment. 3 % of a large device, but at least
    # 512 MiB (public reports of OOM under load: 72 to 304 MiB asked for, some of 1.15 GiB), and at
    # most 5 % of a small one, where activations are small as well.
    headroom_share: float = 0.03
    headroom_bytes: int = 512 * MIB
    headroom_share_max: float = 0.05
    # Smaller moves of the memory line are noise.
    utilization_step: float = 0.02
    # The most that one look at the low-water mark may take away.
    utilization_down_max: float = 0.06
    # The low-water metric covers the last 60 s: before it has passed, the old lows are still in it.
    memory_settle: float = 75.0
    raise_scrapes: float = 3.0
    raise_interval: float = 5 * 60.0

    # After an OOM: headroom grows by max(20 %, 100 MB), and nothing is raised for 6 h.
    oom_headroom_growth: float = 0.20
    oom_headroom_bytes: int = 100_000_000
    no_raise_after_oom: float = 6 * 3600.0
    # How long the value that died stays blocked: after the first death, after the second.
    blocked_once: float = 24 * 3600.0
    blocked_twice: float = 7 * 24 * 3600.0
    overrun_memory: float = 7 * 24 * 3600.0
    oom_shown: float = 24 * 3600.0
    # Failed starts of one pod before the deployment is stopped.
    start_attempts: int = 3

    window: float = 120.0
    # An engine that has not confirmed a revision after this time is reported.
    confirm_timeout: float = 60.0
    # When the effect of a change is written into its history entry.
    outcome_after: float = 30.0
    history_length: int = 20

    def headroom(self, total_bytes: int) -> float:
        """Free bytes that must be left on a device of ``total_bytes``."""
        wanted = max(self.headroom_share * total_bytes, self.headroom_bytes)
        return min(wanted, self.headroom_share_max * total_bytes)


DEFAULT_POLICY = TuningPolicy()
