"""Which tokens of which requests the next step computes: continuous batching over paged memory.

In: requests, and the end of steps. Out: a ScheduledStep. There are no phases: each running request
catches up from ``computed`` to all its known tokens, a chunk at a time, under one token budget per
step. The scheduler knows no torch, no clock and no client; memory is the BlockPool's ids.

The rules, and why:

* One order for everything: (priority, arrival). It is the queue's, the running requests' and, from
  the end, that of the preemption victims. So the first of all always advances and nobody starves.
* A request is admitted when blocks for all its known tokens are free, and takes them. Admission on
  the first chunk alone ends in rounds of preemption under long prompts.
* Blocks for output are taken as they fill. When there is none, the last running request gives all
  its blocks back, keeps its tokens, and computes them again later.
* At most one preemption per step, and a preempting step admits nobody: the block shortage of one
  step can never unload the whole batch.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass

from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.sampling_params import Request
from plimsoll_engine.sequence import Sequence

MAX_PREEMPTIONS_PER_STEP = 1


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    # Share of the usable blocks that stays free when a request is admitted beside running ones.
    watermark: float = 0.0
    # A request whose prompt has more tokens is long; None: none is.
    long_prompt_tokens: int | None = None
    # Share of the usable blocks up to which long requests are admitted beside each other.
    long_prompt_share: float = 1.0


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens [start, start + count) of a sequence."""

    sequence: Sequence
    start: int
    count: int


@dataclass(frozen=True)
class ScheduledStep:
    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True)
class CompletedStep:
    """In tokens. ``prompt_tokens`` counts a prompt once, when its last token is computed."""

    prompt_tokens: int
    recomputed_tokens: int


class Scheduler:
    """``limits`` may be replaced between steps. A smaller max_num_seqs ends no running request."""

    def __init__(self, pool: BlockPool, block_size: int, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._pool = pool
        self._block_size = block_size
        self._arrivals = 0
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []

    @property
    def running(self) -> ReadOnlySequence[Sequence]:
        return self._running

    @property
    def waiting(self) -> ReadOnlySequence[Sequence]:
        return self._waiting

    @property
    def slots_unused(self) -> int:
        """Token slots in owned blocks that hold no token yet."""
        return sum(len(s.blocks) * self._block_size - s.computed for s in self._running)

    @property
    def largest_need(self) -> int:
        """Blocks that the longest live request holds at its end: the least that the pool must
        keep usable so that every request can finish."""
        sequences = [*self._running, *self._waiting]
        return max((self.blocks_for(s.max_total_tokens) for s in sequences), default=0)

    @property
    def reserved_blocks(self) -> int:
        """Left free by an admission, for the growth of those that run."""
        return int(self.limits.watermark * self._pool.usable)

    @property
    def next_blocks(self) -> tuple[int, ...]:
        """Blocks that the first of the waiting start with, for each running slot that is free."""
        slots = max(0, self.limits.max_num_seqs - len(self._running))
        return tuple(self.blocks_for(len(s.tokens)) for s in self._waiting[:slots])

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def add(self, request: Request) -> Sequence:
        """The caller has checked that the request fits the usable pool alone."""
        sequence = Sequence(request, (request.priority, self._arrivals))
        self._arrivals += 1
        bisect.insort(self._waiting, sequence, key=_order)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Ends the request in whatever state it is; its blocks are free at once."""
        self._give_back(sequence)
        (self._running if sequence in self._running else self._waiting).remove(sequence)

    def schedule(self, token_budget: int | None = None) -> ScheduledStep:
        """Takes the blocks that the step needs; computed tokens move in ``complete`` alone, so a
        step that could not be executed is simply scheduled again.

        ``token_budget`` replaces max_num_batched_tokens when it is smaller.
        """
        budget = self.limits.max_num_batched_tokens
        budget = budget if token_budget is None else min(budget, token_budget)
        chunks: list[ScheduledChunk] = []
        preempted: list[Sequence] = []
        starved = False

        # Decoding requests first: one token each, and a long prompt does not hold them up. Only
        # they allocate here; a prompt has had its blocks since its admission. So victims, from the
        # end of the order, are never in ``chunks`` yet.
        for sequence in sorted(self._running, key=lambda s: (s.remaining > 1, s.order)):
            if sequence in preempted or budget == 0:
                continue
            count = min(sequence.remaining, budget)
            if not self._make_room(sequence, sequence.computed + count, preempted):
                starved = True
                continue
            chunks.append(ScheduledChunk(sequence, sequence.computed, count))
            budget -= count

        admitted: list[Sequence] = []
        while budget and not preempted and not starved and self._admits_next():
            sequence = self._admit_next()
            admitted.append(sequence)
            count = min(sequence.remaining, budget)
            chunks.append(ScheduledChunk(sequence, 0, count))
            budget -= count
        return ScheduledStep(tuple(chunks), tuple(admitted), tuple(preempted))

    def complete(self, step: ScheduledStep, sampled: Mapping[str, int]) -> CompletedStep:
        """Enters what an executed step computed; ``sampled`` has the new token per request id.

        Requests that were finished since ``schedule`` are passed over.
        """
        prompt_tokens = recomputed_tokens = 0
        running = set(self._running)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence not in running:
                continue
            before, end = sequence.high_water, chunk.start + chunk.count
            if before < sequence.num_prompt_tokens <= end:
                prompt_tokens += sequence.num_prompt_tokens
            recomputed_tokens += max(0, min(before, end) - chunk.start)
            sequence.computed = end
            sequence.high_water = max(before, end)
            if sequence.request_id in sampled:
                sequence.tokens.append(sampled[sequence.request_id])
        return CompletedStep(prompt_tokens, recomputed_tokens)

    def check(self) -> None:
        """Raises AssertionError when a block is lost or doubled, or a request is in two places."""
        self._pool.check({s.request_id: s.blocks for s in self._running if s.blocks})
        assert not set(self._running) & set(self._waiting)
        assert self._running == sorted(self._running, key=_order)
        assert self._waiting == sorted(self._waiting, key=_order)
        for sequence in self._waiting:
            assert not sequence.blocks, sequence
            assert not sequence.computed, sequence
        for sequence in self._running:
            assert sequence.computed <= len(sequence.blocks) * self._block_size, sequence

    def _make_room(self, sequence: Sequence, end: int, preempted: list[Sequence]) -> bool:
        """Blocks for positions below ``end``, by preemption if need be. All or nothing: whatever
        the outcome, every block is with its owner or in the pool."""
        missing = max(0, self.blocks_for(end) - len(sequence.blocks))
        while (ids := self._pool.allocate(sequence.request_id, missing)) is None:
            if len(preempted) == MAX_PREEMPTIONS_PER_STEP:
                return False
            victim = self._running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.blocks += ids
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._give_back(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self._running.remove(sequence)
        bisect.insort(self._waiting, sequence, key=_order)

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.release(sequence.request_id, sequence.blocks)
        sequence.blocks = ()

    def _admits_next(self) -> bool:
        if not self._waiting or len(self._running) >= self.limits.max_num_seqs:
            return False
        # Alone, a request may take the last block: it fits, or it would not be here.
        reserve = self.reserved_blocks if self._running else 0
        return self.blocks_for(len(self._waiting[0].tokens)) + reserve <= self._pool.free

    def _admit_next(self) -> Sequence:
        sequence = self._waiting.pop(0)
        ids = self._pool.allocate(sequence.request_id, self.blocks_for(len(sequence.tokens)))
        assert ids is not None, "_admits_next has counted them"
        sequence.blocks = ids
        bisect.insort(self._running, sequence, key=_order)
        return sequence


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
