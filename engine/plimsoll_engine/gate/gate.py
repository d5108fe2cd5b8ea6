"""Admission before an upstream: measures a request, judges it, holds its place while it is served.

In: demands, limits, what the upstream tells of itself. Out: a place at the upstream, or a refusal.
Everything happens on one event loop; a caller that is cancelled, also while it waits, gives its
place back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from plimsoll_engine.admission import AdmissionState, Lengths, RefusalReason, Refused, judge
from plimsoll_engine.gate.counter import TokenCounter
from plimsoll_engine.gate.demand import Demand
from plimsoll_engine.gate.lanes import LaneLimits, Lanes, Ticket
from plimsoll_engine.gate.limits import GateLimits
from plimsoll_engine.gate.upstream import Upstream
from plimsoll_engine.gate.upstream_state import UpstreamState
from plimsoll_engine.limits import Limits, LimitsResult

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """``max_tokens`` is set when the body lacks a limit of output and needs one."""

    sequences: tuple[Lengths, ...]
    max_tokens: int | None = None


class Gate:
    """``state`` is the upstream's, None while it is unknown: nothing is admitted then, but
    ``ceiling`` keeps its last value."""

    def __init__(
        self,
        upstream: Upstream,
        counter: TokenCounter,
        limits: GateLimits,
        *,
        max_model_len: int | None,
        max_waiting: int,
        max_waiting_tokens: int | None = None,
    ) -> None:
        self.upstream = upstream
        self.limits = limits
        self.state: UpstreamState | None = None
        self.draining = False
        self.refused = dict.fromkeys(RefusalReason, 0)
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._counter = counter
        self._max_model_len = max_model_len
        self._ceiling: int | None = None
        self._pool_tokens: int | None = None
        self._lanes = Lanes(self._lane_limits())
        # Whom to wake when a ticket starts.
        self._starts: dict[Ticket, asyncio.Future[None]] = {}
        self._measuring = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ceiling(self) -> int | None:
        return self._ceiling

    @property
    def running(self) -> int:
        return self._lanes.running_sequences

    @property
    def waiting(self) -> int:
        return self._lanes.waiting_sequences

    @property
    def long_running(self) -> int:
        return sum(self._lanes.limits.is_long(ticket) for ticket in self._lanes.running)

    async def observe(self) -> None:
        """Asks the upstream for its state."""
        self.state = await self.upstream.observe()
        if self.state is None:
            return
        own = self.state.model.max_model_len
        self._ceiling = own if self._max_model_len is None else min(own, self._max_model_len)
        self._pool_tokens = self.state.metrics.pool_tokens
        self._set_lanes()

    def set_limits(self, revision: int, asked: Limits) -> LimitsResult:
        utilization = None if self.state is None else self.state.metrics.gpu_memory_utilization
        result = self.limits.move(revision, asked, ceiling=self._ceiling, utilization=utilization)
        if result.reason:
            log.warning("limits %s: %s", result.outcome, result.reason)
        self._set_lanes()
        return result

    @asynccontextmanager
    async def place(self, demand: Demand, headers: Mapping[str, str]) -> AsyncIterator[int | None]:
        """Waits for a place at the upstream and holds it; gives the limit of output that the body
        lacks. Raises Refused, or ApiError when the prompt cannot be counted."""
        try:
            ticket, max_tokens = await self._admit(demand, headers)
        except Refused as refusal:
            self.refused[refusal.reason] += 1
            raise
        try:
            await self._starts[ticket]
            yield max_tokens
        finally:
            del self._starts[ticket]
            self._lanes.leave(ticket)
            self._start_waiting()
            self._note_idle()

    async def drain(self, seconds: float) -> bool:
        """Refuses new requests from now on; True when all others ended within ``seconds``."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _admit(self, demand: Demand, headers: Mapping[str, str]) -> tuple[Ticket, int | None]:
        if self.draining:
            raise Refused(503, RefusalReason.DRAINING, "The gate is shutting down.")
        if self.state is None:
            await self.observe()
        if self._ceiling is None or self.state is None:
            message = "The upstream does not answer, or has not started yet."
            raise Refused(503, RefusalReason.ENGINE_DEAD, message)
        self._check_sequences(demand)
        with self._arriving():
            measured = await self._measure(demand, headers, self._ceiling)
            # From here to the end nothing else runs: what is judged is what is entered.
            ticket = Ticket(
                len(measured.sequences),
                max(each.prompt_tokens for each in measured.sequences),
                sum(each.prompt_tokens for each in measured.sequences),
            )
            if refused := judge(self._admission_state(ticket, self._ceiling), measured.sequences):
                raise refused
            self._starts[ticket] = asyncio.get_running_loop().create_future()
            self._lanes.enter(ticket)
            self._start_waiting()
            return ticket, measured.max_tokens

    def _check_sequences(self, demand: Demand) -> None:
        """Before a list of them is made: ``n`` is any number."""
        allowed = self.limits.max_num_seqs_ever + self._max_waiting
        if demand.sequences > allowed:
            raise Refused(
                400,
                RefusalReason.TOO_MANY_SEQUENCES,
                f"prompt times n: {demand.sequences} sequences are not allowed in one request; "
                f"expected at most {allowed}",
                param="n",
            )

    @property
    def _in_hand(self) -> int:
        return self._measuring + len(self._starts)

    @contextmanager
    def _arriving(self) -> Iterator[None]:
        """Counts a request while it is measured: also these have a bound."""
        most = self.limits.max_num_seqs_ever + self._max_waiting
        if self._in_hand >= most:
            message = f"The queue is full: {self._in_hand} requests are here. Please retry later."
            raise Refused(429, RefusalReason.QUEUE_FULL, message, retry_after=2)
        self._measuring += 1
        self._note_idle()
        try:
            yield
        finally:
            self._measuring -= 1
            self._note_idle()

    async def _measure(self, demand: Demand, headers: Mapping[str, str], ceiling: int) -> Measured:
        """Counts only what a bound does not settle."""
        length, long = self.limits.admitted(ceiling), self.limits.current.long_prompt_tokens
        enough: int | None
        if demand.max_tokens is not None:
            enough = length - demand.max_tokens
        else:
            # vLLM's own default is the right one; otherwise it is set from the exact count.
            enough = length - 1 if self._is_whole(length) else None
        if enough is not None and long is not None:
            enough = min(enough, long)
        counts = [
            await self._counter.count(prompt, headers, enough=enough) for prompt in demand.prompts
        ]
        if demand.truncated_to is not None:
            counts = [min(count, demand.truncated_to) for count in counts]
        # The length may have moved meanwhile.
        length = self.limits.admitted(ceiling)
        room = max(1, length - max(counts))
        output = room if demand.max_tokens is None else demand.max_tokens
        sequences = tuple(Lengths(count, output) for count in counts for _ in range(demand.choices))
        needs_limit = demand.max_tokens is None and not self._is_whole(length)
        return Measured(sequences, room if needs_limit else None)

    def _is_whole(self, length: int) -> bool:
        """Whether the upstream, left alone, would not go beyond ``length`` either."""
        return self.state is not None and length >= self.state.model.max_model_len

    def _admission_state(self, ticket: Ticket, ceiling: int) -> AdmissionState:
        """In tokens, as blocks of one. vLLM has its own queue for its blocks, so a place is free
        or not; and it does not start with a pool below its length."""
        limits, most = self._lanes.limits, self.limits.max_num_seqs_ever
        pool = max(ceiling, self._pool_tokens or ceiling * most, ticket.prompt_tokens)
        return AdmissionState(
            ceiling=ceiling,
            admitted=self.limits.admitted(ceiling),
            planned_pool=pool,
            usable_pool=pool,
            block_size=1,
            free_blocks=pool if self._lanes.would_start(ticket) else 0,
            reserved_blocks=0,
            running=self.running,
            max_running=limits.max_num_seqs,
            max_running_ever=most,
            waiting=self.waiting,
            max_waiting=self._max_waiting,
            waiting_tokens=sum(each.prompt_tokens for each in self._lanes.waiting),
            max_waiting_tokens=self._max_waiting_tokens,
            next_tokens=(),
            draining=self.draining,
            long_queue=self._lanes.long_queue,
        )

    def _lane_limits(self) -> LaneLimits:
        current = self.limits.current
        pool, share = self._pool_tokens, current.long_prompt_share
        queue = current.long_queue_share
        return LaneLimits(
            max_num_seqs=current.max_num_seqs or self.limits.max_num_seqs_ever,
            long_prompt_tokens=current.long_prompt_tokens,
            long_room=None if pool is None or share is None else int(pool * share),
            long_queue=None if pool is None or queue is None else int(pool * queue),
        )

    def _set_lanes(self) -> None:
        self._lanes.limits = self._lane_limits()
        self._start_waiting()

    def _start_waiting(self) -> None:
        for ticket in self._lanes.start():
            if not self._starts[ticket].done():
                self._starts[ticket].set_result(None)

    def _note_idle(self) -> None:
        if self._in_hand:
            self._idle.clear()
        else:
            self._idle.set()
