"""Peaks of past days: what each five minutes had as their most, kept with a half-life.

In: the pages of each pass. Out: the open window, and at its end what was learned with it in. Only
whole windows count (Autopilot's and the vertical pod autoscaler's way: the peak of a window is the
sample), and they end at round times: a restarted operator loses at most the open one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from plimsoll_operator.tuning.evidence import Evidence
from plimsoll_operator.tuning.forecast import predict_peak
from plimsoll_operator.tuning.histogram import Histogram
from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.signals import Signals
from plimsoll_operator.tuning.values import (
    Gathered,
    LengthCounts,
    Limits,
    Peaks,
    TuningInputs,
)


def gather_peaks(
    inputs: TuningInputs, evidence: Evidence, limits: Limits, policy: TuningPolicy
) -> tuple[Gathered, Peaks]:
    """The window that is open after this pass, and the peaks of the ended ones."""
    peaks, now = inputs.learned.peaks, inputs.now
    begin = now // policy.peak_window * policy.peak_window
    window = inputs.state.gathered or Gathered(begin)
    if window.since != begin:
        ended_at = window.since + policy.peak_window
        peaks, window = _closed(window, peaks, limits, ended_at), Gathered(begin)
    for signals in evidence.signals:
        seen = inputs.state.windows.get(signals.pod)
        if not seen or seen[-1].at < signals.reading.at:
            window = _looked(window, signals, peaks.outputs)
    return window, peaks


def _looked(window: Gathered, signals: Signals, outputs: Histogram) -> Gathered:
    """An idle engine teaches nothing: a window without work leaves no sample."""
    reading = signals.reading
    if not reading.running and not reading.waiting:
        return window
    held, demand = _held_at_peak(signals, outputs), signals.predicted_usage
    line, total = reading.gpu_memory_utilization, reading.device_total_bytes
    low, overrun = reading.device_free_low_water_bytes, None
    if line is not None and total and low is not None:
        overrun = max(0.0, (total - low) / total - line)
    return replace(
        window,
        demand=_most(window.demand, held if demand is None else max(held, demand)),
        unqueued=window.unqueued if reading.waiting else _most(window.unqueued, held),
        overrun=_most(window.overrun, overrun),
        prompts=_sum(window.prompts, signals.prompts),
        outputs=_sum(window.outputs, signals.outputs),
    )


def _held_at_peak(signals: Signals, outputs: Histogram) -> float:
    """Share of the cache that the running are foretold to hold at the most."""
    pool, running = signals.pool_tokens, signals.reading.running
    if not pool or not running:
        return signals.usage
    peak = predict_peak(signals.usage * pool, running, outputs)
    return signals.usage if peak is None else peak / pool


def _closed(window: Gathered, peaks: Peaks, limits: Limits, at: float) -> Peaks:
    def with_sample(histogram: Histogram, value: float | None) -> Histogram:
        return histogram if value is None else histogram.added([(value, 1.0)], at)

    def with_lengths(histogram: Histogram, counts: LengthCounts) -> Histogram:
        return histogram.added(counts, at) if counts else histogram

    short = _short_share(window, limits.long_prompt_tokens)
    return Peaks(
        demand=with_sample(peaks.demand, window.demand),
        short=with_sample(peaks.short, _product(short, window.unqueued)),
        overrun=with_sample(peaks.overrun, window.overrun),
        prompts=with_lengths(peaks.prompts, window.prompts),
        outputs=with_lengths(peaks.outputs, window.outputs),
    )


def _product(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other


def _short_share(window: Gathered, long_prompt_tokens: int | None) -> float | None:
    """Part of the tokens of the window's finished requests that was short prompts' and their
    outputs'. The page has lengths of prompts and of outputs, not of requests: a mean output each."""
    count = sum(n for _, n in window.prompts)
    if not count or long_prompt_tokens is None:
        return None
    outputs = sum(n for _, n in window.outputs)
    output = sum(length * n for length, n in window.outputs) / outputs if outputs else 0.0
    tokens = [(length, n * (length + output)) for length, n in window.prompts]
    whole = sum(part for _, part in tokens)
    return sum(part for length, part in tokens if length <= long_prompt_tokens) / whole


def _most(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def _sum(one: LengthCounts, other: LengthCounts) -> LengthCounts:
    if not other:
        return one
    return tuple(sorted((Counter(dict(one)) + Counter(dict(other))).items()))
