"""Which tokens of which requests the next step computes: continuous batching over paged memory.

In: requests, and the end of steps. Out: a ScheduledStep. There are no phases: each running request
catches up from ``computed`` to all its known tokens, a chunk at a time, under one token budget per
step. The scheduler knows no torch, no clock and no client; memory is the BlockPool's ids.

The rules, and why:

* One order for everything: (priority, arrival). It is the queue's, the running requests' and, from
  the end, that of the preemption victims. So the first of all always advances and nobody starves.
* A request is admitted when blocks for all its known tokens are free, and takes them. Admission on
  the first chunk alone ends in rounds of preemption under long prompts.
* Long prompts have a lane of their own. They enter beside each other as long as they hold at most
  their share of the usable blocks together, and one may always run alone. A short request passes
  a long one that waits for the lane, for it takes nothing from it. It also passes one for which
  the free blocks are too few, but only until those that passed have had as many blocks as the
  pool has outside the lane: from then on nobody enters before it, and the blocks that come free
  are its. So both sides have a bound, in blocks, and a clock is not needed.
* Long prompts are computed one at a time and after the others, whose first token should not wait
  for 16 steps of somebody else's prompt; a part of each step's budget is theirs whatever comes.
  So while one is computed the next waits, and is passed without being overtaken: that ends with
  the prompt.
* Blocks that already hold the start of a request's tokens are shared with it instead of computed
  again, but for its last token, which has to be computed to sample from. A preempted request so
  finds what is left of its own.
* What a long request grows by its output is not held against the lane: preempting it would cost
  the whole prompt again for a few blocks.
* Blocks for output are taken as they fill. When there is none, the last running request gives all
  its blocks back, keeps its tokens, and computes them again later.
* At most one preemption per step, and a preempting step admits nobody: the block shortage of one
  step can never unload the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass
from itertools import islice

from plimsoll_engine.admission import LongQueue
from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.prefix_cache import PrefixHashes
from plimsoll_engine.sampling_params import Request
from plimsoll_engine.sequence import Sequence, SequenceState
from plimsoll_engine.waiting import WaitingQueue, in_order, insert, remove

MAX_PREEMPTIONS_PER_STEP = 1
# One part in so many of a step's budget is kept for a long prompt that is being computed: a
# quarter lengthens its computation fourfold at the worst, and the others' by a third.
LONG_PREFILL_BUDGET = 4


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
    # Share of the usable blocks up to which long requests may wait together; None: no bound.
    long_queue_share: float | None = None


# Not frozen: each request of each step makes one, and frozen ones take three times as long to make.
@dataclass(slots=True)
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
class PrefixCacheUse:
    """In tokens, over all first admissions: those looked for, and those found."""

    queries: int = 0
    hits: int = 0


@dataclass(frozen=True)
class CompletedStep:
    """In tokens. ``prompt_tokens`` counts a prompt once, when its last token is computed."""

    prompt_tokens: int
    recomputed_tokens: int


class Scheduler:
    """``limits`` may be replaced between steps. A smaller max_num_seqs ends no running request."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        limits: SchedulerLimits,
        *,
        prefix_caching: bool = False,
    ) -> None:
        self.prefix_cache_use = PrefixCacheUse()
        self._prefix_caching = prefix_caching
        self._limits = limits
        self._pool = pool
        self._block_size = block_size
        self._arrivals = 0
        self._running: list[Sequence] = []
        self._waiting = WaitingQueue(limits.long_prompt_tokens)

    @property
    def limits(self) -> SchedulerLimits:
        return self._limits

    @limits.setter
    def limits(self, limits: SchedulerLimits) -> None:
        if limits.long_prompt_tokens != self._limits.long_prompt_tokens:
            self._waiting = WaitingQueue(limits.long_prompt_tokens, self._waiting)
        self._limits = limits

    @property
    def running(self) -> ReadOnlySequence[Sequence]:
        return self._running

    @property
    def waiting(self) -> ReadOnlySequence[Sequence]:
        return list(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting.num_tokens

    @property
    def first_short(self) -> Sequence | None:
        """The first of those that wait and are not long."""
        return self._waiting.first_short

    @property
    def first_long(self) -> Sequence | None:
        """The first of those that wait for the lane."""
        return self._waiting.first_long

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
    def lane_capacity(self) -> int:
        """Blocks up to which long requests are admitted beside each other."""
        return int(self.limits.long_prompt_share * self._pool.usable)

    @property
    def lane_blocks(self) -> int:
        """Blocks that long requests hold."""
        return sum(len(s.blocks) for s in self._running if self._waiting.is_long(s))

    @property
    def free_lane_blocks(self) -> int:
        """Blocks that another long request may have; all of the pool for one that is alone."""
        held = self.lane_blocks
        return max(0, self.lane_capacity - held) if held else self._pool.usable

    @property
    def long_queue(self) -> LongQueue | None:
        """None: those that wait for the lane have no bound of their own."""
        threshold, share = self.limits.long_prompt_tokens, self.limits.long_queue_share
        if threshold is None or share is None:
            return None
        return LongQueue(
            threshold,
            self._waiting.num_long_tokens,
            self.free_lane_blocks * self._block_size,
            int(share * self._pool.usable) * self._block_size,
        )

    @property
    def next_tokens(self) -> tuple[int, ...]:
        """Tokens that the first of the waiting start with, for each running slot that is free."""
        slots = max(0, self.limits.max_num_seqs - len(self._running))
        return tuple(len(s.tokens) for s in islice(self._waiting, slots))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def add(self, request: Request) -> Sequence:
        """The caller has checked that the request fits the usable pool alone."""
        prefix = None
        if self._prefix_caching:
            keys = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
            prefix = PrefixHashes(self._block_size, keys)
        sequence = Sequence(request, (request.priority, self._arrivals), prefix)
        self._arrivals += 1
        self._waiting.add(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Ends the request in whatever state it is; its blocks are free at once."""
        self._give_back(sequence)
        if sequence.state is SequenceState.RUNNING:
            remove(self._running, sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED

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
        prompts: list[Sequence] = []
        running, block_size = SequenceState.RUNNING, self._block_size
        for sequence in tuple(self._running):
            start, end = sequence.computed, len(sequence.tokens)
            if end - start > 1:
                prompts.append(sequence)
                continue
            if budget == 0 or sequence.state is not running:
                continue
            full = end > len(sequence.blocks) * block_size
            if full and not self._make_room(sequence, end, preempted):
                starved = True
                continue
            chunks.append(ScheduledChunk(sequence, start, 1))
            budget -= 1
        # Some may have been victims meanwhile.
        prompts = [s for s in prompts if s.state is SequenceState.RUNNING]
        long = [s for s in prompts if self._waiting.is_long(s)]
        kept = -(-budget // LONG_PREFILL_BUDGET) if long else 0
        left = self._prefill([s for s in prompts if s not in long], budget - kept, chunks)
        admitted: list[Sequence] = []
        open_to_all = not preempted and not starved
        if open_to_all:
            left = self._admit_waiting(left, chunks, admitted, lane_open=not long)
        left = self._prefill(long, left + kept, chunks)
        if open_to_all and long:
            self._admit_waiting(left, chunks, admitted, lane_open=True)
        return ScheduledStep(tuple(chunks), tuple(admitted), tuple(preempted))

    def _prefill(
        self, sequences: Iterable[Sequence], budget: int, chunks: list[ScheduledChunk]
    ) -> int:
        """The next chunk of each, in order; what is left of the budget."""
        for sequence in sequences:
            if budget == 0:
                break
            count = min(sequence.remaining, budget)
            chunks.append(ScheduledChunk(sequence, sequence.computed, count))
            budget -= count
        return budget

    def _admit_waiting(
        self,
        budget: int,
        chunks: list[ScheduledChunk],
        admitted: list[Sequence],
        *,
        lane_open: bool,
    ) -> int:
        """Who may enter and their first chunks; what is left of the budget."""
        while budget and (entering := self._find_next(lane_open=lane_open)) is not None:
            self._admit(entering, lane_open=lane_open)
            admitted.append(entering)
            budget = self._prefill((entering,), budget, chunks)
        return budget

    def complete(self, step: ScheduledStep, sampled: Mapping[str, int]) -> CompletedStep:
        """Enters what an executed step computed; ``sampled`` has the new token per request id.

        Requests that were finished since ``schedule`` are passed over.
        """
        prompt_tokens = recomputed_tokens = 0
        running = SequenceState.RUNNING
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.state is not running:
                continue
            before, end = sequence.high_water, chunk.start + chunk.count
            if before < sequence.num_prompt_tokens <= end:
                prompt_tokens += sequence.num_prompt_tokens
            if before > chunk.start:
                recomputed_tokens += min(before, end) - chunk.start
            sequence.computed = end
            if end > before:
                sequence.high_water = end
            if sequence.prefix is not None:
                self._name_blocks(sequence)
            token = sampled.get(sequence.request_id)
            if token is not None:
                sequence.tokens.append(token)
        return CompletedStep(prompt_tokens, recomputed_tokens)

    def check(self) -> None:
        """Raises AssertionError when a block is lost or doubled, or a request is in two places."""
        self._pool.check({s.request_id: s.blocks for s in self._running if s.blocks})
        waiting = list(self._waiting)
        assert self._running == sorted(self._running, key=in_order)
        assert waiting == sorted(waiting, key=in_order)
        assert all(s.state is SequenceState.RUNNING for s in self._running)
        assert all(s.state is SequenceState.WAITING for s in waiting)
        for sequence in waiting:
            assert not sequence.blocks, sequence
            assert not sequence.computed, sequence
        for sequence in self._running:
            assert sequence.computed <= len(sequence.blocks) * self._block_size, sequence

    def _make_room(self, sequence: Sequence, end: int, preempted: list[Sequence]) -> bool:
        """Blocks for positions below ``end``, by preemption if need be. All or nothing: whatever
        the outcome, every block is with its owner or in the pool."""
        missing = self.blocks_for(end) - len(sequence.blocks)
        if missing <= 0:
            return True
        while (ids := self._pool.allocate(missing)) is None:
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
        remove(self._running, sequence)
        sequence.state = SequenceState.WAITING
        self._waiting.add(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = ()
        sequence.named_blocks = 0

    def _find_next(self, *, lane_open: bool) -> Sequence | None:
        """Who of the waiting enters now: the first, or a short one past a long one."""
        if len(self._running) >= self.limits.max_num_seqs:
            return None
        long, short = self._waiting.first_long, self._waiting.first_short
        long_first = long is not None and (short is None or long.order < short.order)
        if long is not None and long_first and lane_open and self._lane_admits(long):
            if self._fits(long):
                return long
            if not self._may_overtake(short, long):
                return None
        return short if short is not None and self._fits(short) else None

    def _fits(self, sequence: Sequence) -> bool:
        # Alone, a request may take the last block: it fits, or it would not be here.
        reserve = self.reserved_blocks if self._running else 0
        room = self._pool.free - reserve
        count = self.blocks_for(len(sequence.tokens))
        # What others hold costs nothing; it is looked for only when that decides.
        return count <= room or count - self._pool.count_owned(self._find_cached(sequence)) <= room

    def _find_cached(self, sequence: Sequence) -> tuple[int, ...]:
        """Blocks that hold the start of its tokens; at least one token is left to compute."""
        # Log-probabilities of a prompt come from computing it.
        if sequence.prefix is None or sequence.params.prompt_logprobs is not None:
            return ()
        count = (len(sequence.tokens) - 1) // self._block_size
        return self._pool.find(sequence.prefix.of(sequence.tokens, count))

    def _lane_admits(self, sequence: Sequence) -> bool:
        held = self.lane_blocks
        return not held or held + self.blocks_for(len(sequence.tokens)) <= self.lane_capacity

    def _may_overtake(self, short: Sequence | None, long: Sequence) -> bool:
        """Whether ``short`` may have blocks that ``long`` waits for."""
        if short is None or short.order[0] != long.order[0]:
            return False
        return long.overtaken_by < self._pool.usable - self.lane_capacity

    def _name_blocks(self, sequence: Sequence) -> None:
        """Makes the blocks that were filled findable."""
        full = sequence.computed // self._block_size
        if sequence.prefix is None or full <= sequence.named_blocks:
            return
        hashes = sequence.prefix.of(sequence.tokens, full)
        for place in range(sequence.named_blocks, full):
            self._pool.remember(sequence.blocks[place], hashes[place])
        sequence.named_blocks = full

    def _admit(self, sequence: Sequence, *, lane_open: bool) -> None:
        cached = self._find_cached(sequence)
        count = self.blocks_for(len(sequence.tokens))
        ids = self._pool.allocate(count - len(cached), cached)
        assert ids is not None, "_find_next has counted them"
        long = self._waiting.first_long
        passed = long is not None and long.order < sequence.order
        if long is not None and passed and lane_open and self._lane_admits(long):
            long.overtaken_by += count
        self._waiting.remove(sequence)
        sequence.blocks = ids
        sequence.named_blocks = len(cached)
        sequence.computed = len(cached) * self._block_size
        self._count_use(sequence)
        sequence.state = SequenceState.RUNNING
        insert(self._running, sequence)

    def _count_use(self, sequence: Sequence) -> None:
        """Of a request's first admission alone: to find one's own blocks again is no merit."""
        if sequence.prefix is None or sequence.preemptions:
            return
        sequence.cached_tokens = sequence.computed
        use = self.prefix_cache_use
        self.prefix_cache_use = PrefixCacheUse(
            use.queries + len(sequence.tokens), use.hits + sequence.computed
        )
