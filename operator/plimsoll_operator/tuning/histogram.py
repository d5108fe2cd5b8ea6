"""A histogram that forgets: exponential buckets, and weights that halve with time.

In: samples with their times. Out: a new histogram, or percentiles of the one there is. It knows
neither what its samples are nor where it is kept. The form is that of the Kubernetes vertical pod
autoscaler (buckets that grow by 5 %, a half-life of 24 h for memory peaks), which has it from
Google's Autopilot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

GROWTH = 1.05
HALF_LIFE = 24 * 3600.0
# Everything up to the smallest value shares one bucket; nothing in the tuner is told apart below.
SMALLEST = 1e-3
# Everything above it, some 5e9, shares one too.
HIGHEST_BUCKET = 599
# A weight below this share of the largest is forgotten.
EPSILON = 1e-4


@dataclass(frozen=True)
class Histogram:
    """``weights`` by bucket, ascending, as they were at ``reference`` (Unix seconds, whole): what is
    written into an object reads back as the same value."""

    weights: tuple[tuple[int, float], ...] = ()
    reference: float = 0.0

    @property
    def total(self) -> float:
        """Weight of all samples at the reference time: of late ones, about their number."""
        return sum(weight for _, weight in self.weights)

    def added(self, samples: Iterable[tuple[float, float]], at: float) -> Histogram:
        """With (value, weight) samples seen at ``at``. Samples older than the reference weigh as if
        they were of its time."""
        at = max(math.floor(at), self.reference)
        faded = 2.0 ** ((self.reference - at) / HALF_LIFE)
        weights = {bucket: weight * faded for bucket, weight in self.weights}
        for value, weight in samples:
            if weight > 0:
                bucket = _bucket(value)
                weights[bucket] = weights.get(bucket, 0.0) + weight
        least = EPSILON * max(weights.values(), default=0.0)
        kept = sorted((b, round(w, 6)) for b, w in weights.items() if w >= least and round(w, 6))
        return Histogram(tuple(kept), at)

    def quantile(self, share: float) -> float | None:
        """The upper end of the bucket that holds it, like the autoscaler: rather more than less.
        None of nothing."""
        wanted, passed = share * self.total, 0.0
        for bucket, weight in self.weights:
            passed += weight
            if passed >= wanted - 1e-9:
                return _upper(bucket)
        return _upper(self.weights[-1][0]) if self.weights else None

    def share_above(self, value: float) -> float | None:
        """Weight in buckets wholly above ``value``, of all weight. None of nothing."""
        total = self.total
        if not total:
            return None
        return sum(w for b, w in self.weights if _lower(b) >= value) / total

    def middles(self) -> tuple[tuple[float, float], ...]:
        """(middle of the bucket, weight), ascending."""
        return tuple(((_lower(b) + _upper(b)) / 2, weight) for b, weight in self.weights)


EMPTY = Histogram()


def _bucket(value: float) -> int:
    if value <= SMALLEST:
        return 0
    bucket = math.ceil(math.log(value / SMALLEST) / math.log(GROWTH) - 1e-9)
    return min(max(0, bucket), HIGHEST_BUCKET)


def _upper(bucket: int) -> float:
    return SMALLEST * GROWTH**bucket


def _lower(bucket: int) -> float:
    return 0.0 if bucket == 0 else _upper(bucket - 1)
