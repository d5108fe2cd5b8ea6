"""Windows of five minutes: what enters the histograms, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll_operator.tuning.histogram import EMPTY
from plimsoll_operator.tuning.profile import build_profile_status, read_learned
from plimsoll_operator.tuning.values import NO_PEAKS, Unknown, UnknownReason
from support.tuning import CALM, FULL, MIB, TOTAL, Fleet, with_lane

WINDOW = 300.0


def fleet() -> Fleet:
    """At the beginning of a window."""
    return Fleet(with_lane(), now=3_000_000.0)


def test_only_whole_windows_count() -> None:
    found = fleet()
    found.idle(WINDOW - 10, **CALM)
    assert found.learned.peaks == NO_PEAKS
    found.idle(10, **CALM)
    peaks = found.learned.peaks
    assert peaks.demand.total == 1
    assert peaks.demand.quantile(1.0) == pytest.approx(0.20, rel=0.05)


def test_the_peak_of_a_window_is_its_sample() -> None:
    found = fleet()
    found.look(**FULL)
    found.idle(WINDOW, **CALM)
    # 12 waiting beside 6 running would hold three times as much.
    assert found.learned.peaks.demand.quantile(1.0) == pytest.approx(0.97 * 3, rel=0.05)


def test_an_idle_engine_teaches_nothing() -> None:
    found = fleet()
    found.idle(3 * WINDOW, running=0, kv_cache_usage=0.0)
    assert found.learned.peaks == NO_PEAKS


def test_what_is_unknown_teaches_nothing() -> None:
    found = fleet()
    for _ in range(80):
        found.see({"m-0": Unknown(UnknownReason.UNREACHABLE, "m-0", "gone")})
    assert found.learned.peaks == NO_PEAKS


def test_a_page_seen_twice_counts_once() -> None:
    found = fleet()
    page = found.page("m-0", **CALM)
    found.see({"m-0": page})
    later = replace(page, at=found.now, prompt_lengths=((100.0, 0.0),))
    found.see({"m-0": later})
    newest = replace(later, at=found.now, steps_total=found.now, prompt_lengths=((100.0, 3.0),))
    found.see({"m-0": newest})
    found.see({"m-0": newest})
    assert found.state.gathered is not None
    assert found.state.gathered.prompts == ((50.0, 3.0),)


def test_memory_above_the_line_is_kept_as_its_share() -> None:
    found = fleet()
    found.idle(WINDOW, device_free_low_water_bytes=72 * MIB, **CALM)
    # 1128 of 1200 MiB in use at a line of 0.90: 0.04 above it.
    assert found.learned.peaks.overrun.quantile(1.0) == pytest.approx(0.04, rel=0.06)


def test_the_share_of_short_prompts() -> None:
    """Nine of 512 tokens and one of about 4608 with 100 tokens of output each: short is 54 % of it."""
    found = fleet()
    busy = {"kv_cache_usage": 0.60, "running": 9}
    none, some = ((1024.0, 0.0), (8192.0, 0.0)), ((1024.0, 9.0), (8192.0, 10.0))
    empty, written = ((200.0, 0.0),), ((200.0, 10.0),)
    found.look(prompt_lengths=none, output_lengths=empty, **busy)
    found.idle(WINDOW, prompt_lengths=some, output_lengths=written, **busy)
    short, long = 9 * (512 + 100), 4608 + 100
    peaks = found.learned.peaks
    assert peaks.short.quantile(1.0) == pytest.approx(0.60 * short / (short + long), rel=0.06)
    assert peaks.prompts.total == peaks.outputs.total == 10
    # With outputs known, what runs is foretold to grow: nothing is, where the cache's size is not.
    assert peaks.demand.quantile(1.0) == pytest.approx(0.60, rel=0.05)


def test_a_window_with_a_queue_says_nothing_of_short_prompts() -> None:
    found = fleet()
    found.look(prompt_lengths=((1024.0, 0.0),), **FULL)
    found.idle(WINDOW, prompt_lengths=((1024.0, 9.0),), **FULL)
    assert found.learned.peaks.short == EMPTY
    assert found.learned.peaks.prompts.total == 9


def test_a_restarted_operator_goes_on_with_what_is_written() -> None:
    found = fleet()
    for _ in range(3):
        found.idle(WINDOW, device_free_low_water_bytes=TOTAL // 20, **CALM)
    read = read_learned({"status": build_profile_status(found.learned)})
    assert read == found.learned
    assert read.peaks.demand.total == pytest.approx(3, rel=0.01)
    again = replace(found, learned=read, state=replace(found.state, gathered=None))
    assert again.look(**CALM).learned == found.look(**CALM).learned


def test_buckets_that_are_none_are_left_out() -> None:
    weights = {"12": 3.0, "x": 1.0, "-1": 1.0, "99999": 1.0, "13": -2.0, "14": "much"}
    entry = {"time": "2026-12-02T00:00:00Z", "weights": weights}
    status = {"peaks": {"demand": entry, "short": {"weights": {}}, "newer": entry, "prompts": 4}}
    peaks = read_learned({"status": status}).peaks
    assert peaks.demand.weights == ((12, 3.0),)
    assert peaks.short == peaks.prompts == EMPTY
