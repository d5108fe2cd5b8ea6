"""From the pages of one pod to what they say together: rates, staleness, restarts.

In: a window of readings, oldest first. Out: :class:`Signals`, or Unknown with its reason. A counter
is only ever read as a rate between two pages of one life of the engine; the first page, and the
first after a restart, have none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from plimsoll_operator.tuning.values import EngineReading, LengthCounts, Unknown, UnknownReason

Window = tuple[EngineReading, ...]

COUNTERS = tuple(f.name for f in fields(EngineReading) if f.name.endswith("_total"))

# Pages that must look alike, with requests running, before the engine's word is doubted.
STALE_PAGES = 3

# What the tuner cannot do without, as the metric that has it.
REQUIRED = {
    "running": "vllm:num_requests_running",
    "preemptions_total": "vllm:num_preemptions_total",
}
STEP_COUNTER = "vllm:iteration_tokens_total_count"


@dataclass(frozen=True)
class Signals:
    """The newest reading of a pod with its rates. ``preemption_rate`` is per second; None (as in
    ``mean_queue_time``, seconds, and ``allocation_failures``, since the page before) is unknown."""

    reading: EngineReading
    preemption_rate: float | None
    mean_queue_time: float | None
    allocation_failures: float | None
    # The least that the first of a lane had waited on the last two pages, in seconds.
    short_wait: float | None = None
    long_wait: float | None = None
    # Requests that ended since the page before, by tokens.
    prompts: LengthCounts = ()
    outputs: LengthCounts = ()

    @property
    def pod(self) -> str:
        return self.reading.pod

    @property
    def usage(self) -> float:
        return self.reading.kv_cache_usage

    @property
    def pool_tokens(self) -> float | None:
        """Tokens that the usable cache holds; None when the page does not say."""
        blocks, size = self.reading.usable_blocks, self.reading.block_size
        return None if not blocks or not size else float(blocks * size)

    @property
    def predicted_usage(self) -> float | None:
        """Usage if every waiting request held as much as a running one holds now; None without a
        running request to go by."""
        running = self.reading.running
        if not running:
            return None
        return self.usage * (1 + self.reading.waiting / running)


def restarted(before: EngineReading, after: EngineReading) -> bool:
    """Another start time, or a counter that fell."""
    if None not in (before.started_at, after.started_at) and before.started_at != after.started_at:
        return True
    return any(
        old is not None and new is not None and new < old
        for old, new in ((getattr(before, name), getattr(after, name)) for name in COUNTERS)
    )


def extend(window: Window, reading: EngineReading, keep: float) -> Window:
    """Adds a page; ``keep`` seconds are kept. A restart discards everything before it, and a page
    that is not newer than the last one is the last one seen again."""
    if window and reading.at <= window[-1].at:
        return window
    if window and restarted(window[-1], reading):
        window = ()
    return (*(old for old in window if old.at >= reading.at - keep), reading)


def increase(window: Window, counter: str) -> float | None:
    """Growth of a counter between the last two pages."""
    if len(window) < 2:
        return None
    before, after = (getattr(reading, counter) for reading in window[-2:])
    return None if before is None or after is None else after - before


def on_both(window: Window, gauge: str) -> float | None:
    """What the last two pages both reach; None with fewer."""
    values = [getattr(reading, gauge) for reading in window[-2:]]
    return None if len(values) < 2 or None in values else min(values)


def lengths_since(window: Window, histogram: str) -> LengthCounts:
    """(tokens, requests) that a cumulative histogram gained between the last two pages. A request
    counts in the middle of its bucket, above the last bound at that bound."""
    if len(window) < 2:
        return ()
    before, after = (getattr(reading, histogram) for reading in window[-2:])
    if [bound for bound, _ in before] != [bound for bound, _ in after]:
        return ()
    gained, low, below = [], 0.0, 0.0
    for (_, old), (bound, new) in zip(before, after, strict=True):
        count, middle = new - old - below, (low + bound) / 2 if math.isfinite(bound) else low
        if count > 0:
            gained.append((middle, count))
        low, below = bound, new - old
    return tuple(gained)


def rate(window: Window, counter: str) -> float | None:
    """Growth per second between the last two pages."""
    growth = increase(window, counter)
    return None if growth is None else growth / (window[-1].at - window[-2].at)


def is_stale(window: Window) -> bool:
    """Requests run, yet nothing moved over the last pages, the step counter included."""
    pages = window[-STALE_PAGES:]
    if len(pages) < STALE_PAGES or not pages[-1].running or pages[-1].steps_total is None:
        return False
    said = {
        (page.kv_cache_usage, page.running, page.waiting, page.preemptions_total, page.steps_total)
        for page in pages
    }
    return len(said) == 1


def judge(window: Window) -> Signals | Unknown:
    """What the newest page of a non-empty window means."""
    reading = window[-1]
    for field, metric in REQUIRED.items():
        if getattr(reading, field) is None:
            return Unknown(
                UnknownReason.METRIC_MISSING, reading.pod, f"{metric} is not on its page", metric
            )
    if is_stale(window):
        return Unknown(
            UnknownReason.STALE,
            reading.pod,
            f"{STALE_PAGES} equal pages with {reading.running} requests running and no step made",
            STEP_COUNTER,
        )
    queued, waited = (
        increase(window, "queued_requests_total"),
        increase(window, "queue_seconds_total"),
    )
    return Signals(
        reading=reading,
        preemption_rate=rate(window, "preemptions_total"),
        mean_queue_time=None if not queued or waited is None else waited / queued,
        allocation_failures=increase(window, "allocation_failures_total"),
        short_wait=on_both(window, "short_wait"),
        long_wait=on_both(window, "long_wait"),
        prompts=lengths_since(window, "prompt_lengths"),
        outputs=lengths_since(window, "output_lengths"),
    )
