"""Admission by the peak that the running requests will come to: the baselines S10 and O2.

In: what each request holds and how much output is still to come. Out: the scheduler of the engine,
which admits only where the peak fits as well. S10 draws the output to come from those of requests that
ended (Past-Future, LightLLM), O2 knows it. Nobody has either in an engine here.
"""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable

from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.scheduler import Scheduler, SchedulerLimits
from plimsoll_engine.sequence import Sequence

# Output tokens of a request, all in all.
Foresight = Callable[[Sequence], int]
# Fewer say nothing of a distribution.
_LEAST_ENDED = 10


def peak_tokens(requests: Iterable[tuple[int, int]]) -> int:
    """The most that requests hold together at any time, each given as (tokens now, tokens to come).

    All grow by a token a step and give everything back at their end, so a peak is where one ends:
    with the longest to come first, the k-th ends when k hold what they had and its rest each.
    """
    held = peak = 0
    for number, (now, rest) in enumerate(sorted(requests, key=lambda r: -r[1]), start=1):
        held += now
        peak = max(peak, held + number * rest)
    return peak


def know(sequence: Sequence) -> int:
    """O2: an answer has the length that it will have."""
    return sequence.params.max_tokens


class PastOutputs:
    """S10: one draw for each request out of the outputs seen so far that are longer than its own."""

    def __init__(self) -> None:
        self._ended: list[int] = []

    def add(self, output_tokens: int) -> None:
        insort(self._ended, output_tokens)

    def draw(self, sequence: Sequence) -> int:
        """Until enough have ended, and beyond the longest, it is taken to end with the next token: what
        it may have at most would foretell too much."""
        produced = sequence.num_output_tokens
        first = bisect_right(self._ended, produced)
        longer = len(self._ended) - first
        if len(self._ended) < _LEAST_ENDED or not longer:
            return produced + 1
        # The same share of the distribution each time it is asked.
        share = random.Random(f"output {sequence.request_id}").random()
        return self._ended[first + int(share * longer)]


class PeakScheduler(Scheduler):
    """Admits where the peak of all that run then fits the usable blocks, not the prompt alone."""

    def __init__(
        self, pool: BlockPool, block_size: int, limits: SchedulerLimits, foresight: Foresight
    ) -> None:
        super().__init__(pool, block_size, limits)
        self._usable = pool
        self._size = block_size
        self._foresight = foresight

    def _fits(self, sequence: Sequence) -> bool:
        if not super()._fits(sequence):
            return False
        together = (*self.running, sequence)
        # A request alone may always run.
        fits = peak_tokens(map(self._outlook, together)) <= self._usable.usable * self._size
        return fits or not self.running

    def _outlook(self, sequence: Sequence) -> tuple[int, int]:
        """In whole blocks now; what is to come begins in the last of them."""
        rest = max(0, self._foresight(sequence) - sequence.num_output_tokens)
        blocks = max(len(sequence.blocks), self.blocks_for(len(sequence.tokens)))
        return blocks * self._size, rest
