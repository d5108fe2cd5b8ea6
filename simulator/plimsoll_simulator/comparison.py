"""Policies beside each other on the same seeds. In: one figure by policy and seed. Out: means and
paired differences with 95 % intervals by bootstrap over seeds, and the worst seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_DRAWS = 10_000
# Of the resampling, so that the same results give the same interval.
_SEED = 20260101


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Standing:
    """One policy's figure. ``difference`` to the reference is paired by seed: None for itself."""

    policy: str
    figure: Interval
    worst: float
    worst_seed: int
    difference: Interval | None


def compare(figures: Mapping[str, Mapping[int, float]], reference: str) -> tuple[Standing, ...]:
    """``figures``: by policy and seed. Only seeds that both have are paired."""
    base = figures[reference]
    return tuple(
        _stand(policy, found, base, policy == reference) for policy, found in figures.items()
    )


def _stand(
    policy: str, found: Mapping[int, float], base: Mapping[int, float], is_reference: bool
) -> Standing:
    worst_seed = min(found, key=lambda seed: (found[seed], seed))
    pairs = [found[seed] - base[seed] for seed in found if seed in base]
    return Standing(
        policy,
        bootstrap(list(found.values())),
        found[worst_seed],
        worst_seed,
        None if is_reference or not pairs else bootstrap(pairs),
    )


def bootstrap(values: list[float]) -> Interval:
    """Of the mean; one value has no width."""
    sample = np.asarray(values)
    chance = np.random.default_rng(_SEED)
    means = chance.choice(sample, (_DRAWS, len(sample))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(sample.mean()), float(low), float(high))
