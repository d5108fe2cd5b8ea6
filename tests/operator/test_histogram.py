"""The histogram that forgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from plimsoll_operator.tuning.histogram import EMPTY, GROWTH, HALF_LIFE, HIGHEST_BUCKET, Histogram

DAY = 86_400.0


def of(*values: float, at: float = 0.0) -> Histogram:
    return EMPTY.added([(value, 1.0) for value in values], at)


def test_nothing_has_no_percentile() -> None:
    assert EMPTY.quantile(0.9) is None
    assert EMPTY.share_above(0.5) is None
    assert EMPTY.total == 0


def test_percentiles_are_at_most_a_bucket_too_high() -> None:
    values = [float(value) for value in range(1, 1001)]
    histogram = of(*values)
    for share in (0.5, 0.9, 0.95):
        found = histogram.quantile(share)
        assert found is not None
        exact = 1000 * share
        assert exact <= found * (1 + 1e-9)
        assert found <= exact * GROWTH * (1 + 1e-9)


def test_a_day_halves_what_was_before() -> None:
    histogram = of(*[100.0] * 8).added([(1.0, 1.0)], HALF_LIFE)
    assert histogram.total == pytest.approx(5)
    later = histogram.added([], 2 * HALF_LIFE)
    assert later.total == pytest.approx(2.5)


def test_a_peak_is_forgotten_at_last() -> None:
    """One burst, then quiet windows: the p95 falls once the burst is less than a twentieth."""
    histogram = of(*[1.0] * 3)
    for window in range(288):
        histogram = histogram.added([(0.1, 1.0)], window * 300.0)
    assert (histogram.quantile(0.95) or 1) < 0.2
    assert (histogram.share_above(0.9) or 0) == pytest.approx(1.5 / histogram.total, rel=0.1)
    for window in range(288, 288 * 20):
        histogram = histogram.added([(0.1, 1.0)], window * 300.0)
    assert histogram.share_above(0.9) == 0


def test_a_late_sample_weighs_as_if_it_were_new() -> None:
    histogram = of(5.0, at=DAY).added([(5.0, 1.0)], 0.0)
    assert histogram.total == pytest.approx(2)
    assert histogram.reference == DAY


def test_extremes_have_a_bucket_each() -> None:
    histogram = of(0.0, 1e30)
    assert [bucket for bucket, _ in histogram.weights] == [0, HIGHEST_BUCKET]


@run(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0.1, 100)), min_size=1, max_size=30))
def test_percentiles_never_fall_with_the_share(samples: list[tuple[float, float]]) -> None:
    histogram = EMPTY.added(samples, 0.0)
    found = [histogram.quantile(share / 10) or 0.0 for share in range(1, 11)]
    assert found == sorted(found)
    assert found[-1] * (1 + 1e-9) >= max(value for value, _ in samples)
