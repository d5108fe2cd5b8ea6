"""The best single setting in hindsight (O1). In: settings, how to run one. Out: who was left after
each round, and the best.

Successive halving: all settings on one seed, the better half on two, and so on, each round with
twice the seeds of the one before. The search has seeds of its own, so that the winner is judged on
seeds that it was not chosen by. Settings are a draw from the protocol's grid, with today's ways to run
vLLM always among them: the best of the draw, not of the grid.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from plimsoll_simulator.hardware import Hardware, Model
from plimsoll_simulator.policies import Pinned
from plimsoll_simulator.replica import DoesNotStart, fit

_UTILIZATIONS = (0.80, 0.85, 0.88, 0.90, 0.92, 0.94, 0.95, 0.96, 0.98)
_LENGTHS = (4096, 8192, 16_384, 32_768, 65_536, None)
_WATERMARKS = (0.0, 0.02, 0.05, 0.1)
_LANES = (None, 0.5, 0.7, 0.85)
# Always looked at: S1, S2, S3, S4, S5 and S8.
_KNOWN = (
    Pinned(0.90, None, 0.0, None),
    Pinned(0.92, None, 0.0, None),
    Pinned(0.98, None, 0.0, None),
    Pinned(0.88, 8192, 0.0, None),
    Pinned(0.92, None, 0.05, None),
    Pinned(0.92, None, 0.05, 0.7),
)
# The search's seeds begin here; an evaluation's begin at 0.
FIRST_SEED = 100_000
_LEFT = 2


@dataclass(frozen=True)
class Round:
    """Means over ``seeds`` seeds, best first."""

    seeds: int
    means: tuple[tuple[str, float], ...]


def draw_settings(hardware: Hardware, model: Model, count: int) -> tuple[Pinned, ...]:
    """``count`` settings that start, the same ones each time. Raises DoesNotStart where none
    does."""
    grid = [Pinned(*each) for each in product(_UTILIZATIONS, _LENGTHS, _WATERMARKS, _LANES)]
    random.Random("oracle").shuffle(grid)
    ordered = dict.fromkeys((*_KNOWN, *grid))
    starting = [each for each in ordered if _starts(hardware, model, each)]
    if not starting:
        fit(hardware, model, _KNOWN[2].settings)
    return tuple(starting[:count])


def _starts(hardware: Hardware, model: Model, pinned: Pinned) -> bool:
    # A length beyond the positions starts nowhere.
    if pinned.length is not None and pinned.length > model.native_length:
        return False
    try:
        fit(hardware, model, pinned.settings)
    except DoesNotStart:
        return False
    return True


def count_runs(settings: int, most_seeds: int) -> int:
    """Of the whole search: a seed that a round has seen is not run again."""
    total, left, seeds, seen = 0, settings, 1, 0
    while True:
        total += left * (seeds - seen)
        if left <= _LEFT or seeds >= most_seeds:
            return total
        left, seeds, seen = max(_LEFT, (left + 1) // 2), min(2 * seeds, most_seeds), seeds


def search(
    names: Sequence[str],
    most_seeds: int,
    score: Callable[[Iterable[tuple[str, int]]], Mapping[tuple[str, int], float]],
) -> tuple[Round, ...]:
    """``score`` runs settings on seeds; higher is better. The last round's first is the best; equal
    means are in the order of ``names``."""
    known: dict[tuple[str, int], float] = {}
    left, seeds, rounds = list(names), 1, list[Round]()
    while True:
        wanted = [(name, FIRST_SEED + seed) for seed in range(seeds) for name in left]
        known.update(score([pair for pair in wanted if pair not in known]))
        means = {
            name: fmean(known[name, FIRST_SEED + seed] for seed in range(seeds)) for name in left
        }
        ranked = sorted(left, key=lambda name: -means[name])
        rounds.append(Round(seeds, tuple((name, means[name]) for name in ranked)))
        if len(left) <= _LEFT or seeds >= most_seeds:
            return tuple(rounds)
        left = ranked[: max(_LEFT, (len(left) + 1) // 2)]
        seeds = min(2 * seeds, most_seeds)
