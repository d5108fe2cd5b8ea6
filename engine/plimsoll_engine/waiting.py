"""The queue of requests that wait for blocks: one order, with the long prompts findable apart.

In: sequences that arrive or are preempted, and the length from which a prompt is long. Out: the
first of the long and the first of the others. Who of the two enters, and when, is the scheduler's;
this module knows no blocks.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator

from plimsoll_engine.sequence import Sequence


class WaitingQueue:
    """Iterates in order, over long and short alike. ``long_prompt_tokens``: a prompt of more
    tokens is long; None: none is. ``num_tokens`` are the known ones of all."""

    def __init__(
        self, long_prompt_tokens: int | None = None, sequences: Iterable[Sequence] = ()
    ) -> None:
        self.num_tokens = 0
        self._long_prompt_tokens = long_prompt_tokens
        self._long: list[Sequence] = []
        self._short: list[Sequence] = []
        for sequence in sequences:
            self.add(sequence)

    def __len__(self) -> int:
        return len(self._long) + len(self._short)

    def __iter__(self) -> Iterator[Sequence]:
        return heapq.merge(self._long, self._short, key=in_order)

    @property
    def first_long(self) -> Sequence | None:
        return self._long[0] if self._long else None

    @property
    def first_short(self) -> Sequence | None:
        return self._short[0] if self._short else None

    @property
    def num_long_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._long)

    def is_long(self, sequence: Sequence) -> bool:
        threshold = self._long_prompt_tokens
        return threshold is not None and sequence.num_prompt_tokens > threshold

    def add(self, sequence: Sequence) -> None:
        insert(self._lane_of(sequence), sequence)
        self.num_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        remove(self._lane_of(sequence), sequence)
        self.num_tokens -= len(sequence.tokens)

    def _lane_of(self, sequence: Sequence) -> list[Sequence]:
        return self._long if self.is_long(sequence) else self._short


def in_order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def insert(ordered: list[Sequence], sequence: Sequence) -> None:
    bisect.insort(ordered, sequence, key=in_order)


def remove(ordered: list[Sequence], sequence: Sequence) -> None:
    """Orders are unique, so that a search finds the place."""
    index = bisect.bisect_left(ordered, sequence.order, key=in_order)
    if index == len(ordered) or ordered[index] is not sequence:
        raise ValueError(f"{sequence.request_id} is not here")
    del ordered[index]
