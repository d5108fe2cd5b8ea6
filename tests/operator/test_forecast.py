"""The peak that running requests are foretold to hold."""

from __future__ import annotations

import random
from bisect import bisect

import pytest

from plimsoll_operator.tuning.forecast import most_that_fit, predict_peak
from plimsoll_operator.tuning.histogram import EMPTY, Histogram


def outputs(*lengths: float) -> Histogram:
    return EMPTY.added([(length, 1.0) for length in lengths], 0.0)


def test_nothing_is_foretold_of_nothing() -> None:
    assert predict_peak(1000, 4, EMPTY) is None
    assert predict_peak(0, 0, outputs(100)) is None


def test_short_outputs_beside_long_prompts_grow_by_little() -> None:
    """Each holds 10,000 tokens and ends within 100."""
    peak = predict_peak(100_000, 10, outputs(100))
    assert peak == 100_000


def test_one_length_and_no_prompt_doubles_nothing() -> None:
    """All of length 100 and seen at any time: 50 are left of each, and half as many still run when
    those have doubled. The peak of s * (50 + 100 (1 - s)) is at s = 0.75: 0.75 * 75 = 56 each."""
    peak = predict_peak(50 * 40, 40, outputs(100.0))
    assert peak == pytest.approx(56.25 * 40, rel=0.03)


@pytest.mark.parametrize("prompt", [0, 200, 2000])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_drawn_batch_peaks_where_it_was_foretold(prompt: int, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.lognormvariate(5, 1) for _ in range(4000)]
    # A running request is met with a chance that grows with its length, anywhere in it.
    totals, whole = [], 0.0
    for length in lengths:
        whole += length
        totals.append(whole)
    batch = []
    for _ in range(400):
        length = lengths[bisect(totals, draw.random() * whole)]
        batch.append((length, draw.random() * length))
    held = sum(prompt + done for _, done in batch)
    left = sorted(length - done for length, done in batch)
    # Everybody has grown alike when the next one ends.
    mean = held / len(batch)
    real = max((len(left) - index) * (mean + r) for index, r in enumerate(left))
    foretold = predict_peak(held, len(batch), outputs(*lengths))
    assert foretold == pytest.approx(max(real, held), rel=0.10)


def test_how_many_fit_grows_with_the_cache() -> None:
    found = [most_that_fit(20_000, 40, outputs(1000), pool) or 0 for pool in (10e3, 20e3, 40e3)]
    assert found == sorted(found)
    assert found[0] < 20
    assert most_that_fit(20_000, 40, EMPTY, 10e3) is None
