"""Windows of pages -> rates, staleness, restarts (cases B06 and B07)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plimsoll_operator.metrics_page import read_page
from plimsoll_operator.tuning.signals import Signals, Window, extend, judge, rate
from plimsoll_operator.tuning.values import EngineReading, Unknown, UnknownReason
from support.tuning import START, reading

KEEP = 3600.0


def b07_page(preemptions: int, at: float) -> EngineReading:
    labels = 'engine="0",model_name="m"'
    found = read_page(
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.5\n"
        f"vllm:num_requests_waiting{{{labels}}} 0\n"
        f"vllm:num_requests_running{{{labels}}} 1\n"
        f"vllm:num_preemptions_total{{{labels}}} {preemptions}\n",
        pod="m-0",
        model="m",
        at=at,
    )
    assert isinstance(found, EngineReading)
    return found


def test_b07_a_counter_is_a_rate_and_a_restart_no_drop() -> None:
    window: Window = ()
    rates, lengths = [], []
    for at, preemptions in ((0, 100), (15, 130), (30, 4), (45, 4)):
        window = extend(window, b07_page(preemptions, float(at)), KEEP)
        rates.append(rate(window, "preemptions_total"))
        lengths.append(len(window))
    assert rates == [None, 2.0, None, 0.0]
    # The restart discarded the pages before it.
    assert lengths == [1, 2, 1, 2]


def test_b07_a_large_counter_that_stands_still_is_no_load() -> None:
    window: Window = ()
    for minute in range(11):
        window = extend(window, b07_page(5000, 60.0 * minute), KEEP)
        signals = judge(window)
        assert isinstance(signals, Signals)
        assert signals.preemption_rate in (None, 0.0)


def test_b07_a_new_start_time_discards_every_other_window() -> None:
    window = extend((), reading(at=START), KEEP)
    window = extend(window, reading(at=START + 5, queue_seconds_total=3.0), KEEP)
    window = extend(window, reading(at=START + 10, started_at=START + 7, steps_total=1e9), KEEP)
    assert len(window) == 1
    signals = judge(window)
    assert isinstance(signals, Signals)
    assert (signals.preemption_rate, signals.mean_queue_time) == (None, None)
    assert signals.allocation_failures is None


def test_b06_three_equal_pages_with_requests_running_are_stale() -> None:
    page = reading(kv_cache_usage=0.93, running=8, steps_total=500.0)
    window: Window = ()
    verdicts = []
    for index in range(4):
        # The process metrics and free memory move on even when the engine does not.
        window = extend(window, replace(page, at=START + 5 * index, device_free_bytes=index), KEEP)
        verdicts.append(judge(window))
    assert [isinstance(found, Unknown) for found in verdicts] == [False, False, True, True]
    last = verdicts[-1]
    assert isinstance(last, Unknown)
    assert last.reason is UnknownReason.STALE
    assert last.metric == "vllm:iteration_tokens_total_count"


def test_b06_an_idle_engine_and_one_that_steps_are_not_stale() -> None:
    for changes in (
        {"running": 0, "steps_total": 500.0},
        {"running": 8},  # the step counter moves with the time
    ):
        window: Window = ()
        for index in range(5):
            window = extend(window, reading(at=START + 5 * index, **changes), KEEP)
        assert isinstance(judge(window), Signals)


def test_the_same_page_seen_twice_is_one_page() -> None:
    window = extend(extend((), reading(), KEEP), reading(), KEEP)
    assert len(window) == 1


def test_old_pages_are_forgotten() -> None:
    window = extend(extend((), reading(at=START), 60.0), reading(at=START + 61), 60.0)
    assert len(window) == 1


def test_a_required_metric_that_is_missing_is_named() -> None:
    missing: dict[str, Any]
    for field, metric in (
        ("running", "vllm:num_requests_running"),
        ("preemptions_total", "vllm:num_preemptions_total"),
    ):
        missing = {field: None}
        found = judge((reading(**missing),))
        assert isinstance(found, Unknown)
        assert (found.reason, found.metric) == (UnknownReason.METRIC_MISSING, metric)


def test_queue_time_is_the_mean_of_those_that_left_the_queue() -> None:
    window = (
        reading(at=START, queue_seconds_total=10.0, queued_requests_total=4.0),
        reading(at=START + 5, queue_seconds_total=22.0, queued_requests_total=7.0),
    )
    signals = judge(window)
    assert isinstance(signals, Signals)
    assert signals.mean_queue_time == 4.0
