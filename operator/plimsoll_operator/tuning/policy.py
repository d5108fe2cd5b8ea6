"""Every constant of the tuner, with its source. Shares are fractions of the device's memory."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True)
class TuningPolicy:
    """Durations in seconds. The defaults suit live limits (Plimsoll's own engine), where a move
    costs nothing; an engine that must be restarted needs a slower policy."""

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
    calm_window: float = 20.0
    # Each lowering that followed a raise within this time doubles the calm window (flapping load).
    reversal_memory: float = 30 * 60.0
    calm_window_max: float = 15 * 60.0

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
    history_length: int = 10

    def headroom(self, total_bytes: int) -> float:
        """Free bytes that must be left on a device of ``total_bytes``."""
        wanted = max(self.headroom_share * total_bytes, self.headroom_bytes)
        return min(wanted, self.headroom_share_max * total_bytes)


DEFAULT_POLICY = TuningPolicy()
