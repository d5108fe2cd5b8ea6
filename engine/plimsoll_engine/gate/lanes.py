"""Who of the waiting goes to the upstream next: one order of arrival, long prompts in a lane.

In: tickets that arrive and leave, and the limits. Out: the tickets that start. Pure: no event loop,
no HTTP. Two rules:

* At most ``max_num_seqs`` sequences are at the upstream; a request of more goes alone. Nobody passes
  the first that waits for a place, so a wide request is never starved by narrow ones.
* Long requests together hold at most ``long_room`` tokens; one may always run alone. Whoever waits
  for that lane is passed by short ones, which take nothing of it: a long request waits for earlier
  long ones alone, and then is the first for a place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll_engine.admission import LongQueue


@dataclass(frozen=True, eq=False)
class Ticket:
    """One request: it goes to the upstream as a whole, whatever sequences it makes there."""

    sequences: int
    # Of the longest prompt, and of all sequences together.
    longest_prompt: int
    prompt_tokens: int


@dataclass(frozen=True)
class LaneLimits:
    max_num_seqs: int
    # None: no prompt is long.
    long_prompt_tokens: int | None
    # In tokens. None: the size of the upstream's cache is unknown, and long ones go one by one.
    long_room: int | None
    # In tokens, of those that wait. None: no bound.
    long_queue: int | None = None

    def is_long(self, ticket: Ticket) -> bool:
        threshold = self.long_prompt_tokens
        return threshold is not None and ticket.longest_prompt > threshold


class Lanes:
    """``limits`` may be replaced at any time; call ``start`` afterwards."""

    def __init__(self, limits: LaneLimits) -> None:
        self.limits = limits
        # In order of arrival.
        self._waiting: dict[Ticket, None] = {}
        self._running: dict[Ticket, None] = {}

    @property
    def running(self) -> Mapping[Ticket, None]:
        return self._running

    @property
    def waiting(self) -> Mapping[Ticket, None]:
        return self._waiting

    @property
    def running_sequences(self) -> int:
        return sum(ticket.sequences for ticket in self._running)

    @property
    def waiting_sequences(self) -> int:
        return sum(ticket.sequences for ticket in self._waiting)

    @property
    def long_queue(self) -> LongQueue | None:
        """None: long ones that wait have no bound of their own."""
        limits = self.limits
        if limits.long_prompt_tokens is None or limits.long_queue is None:
            return None
        held, waiting = (
            sum(ticket.prompt_tokens for ticket in tickets if limits.is_long(ticket))
            for tickets in (self._running, self._waiting)
        )
        room = max(0, (limits.long_room or 0) - held)
        return LongQueue(limits.long_prompt_tokens, waiting, room, limits.long_queue)

    def enter(self, ticket: Ticket) -> None:
        self._waiting[ticket] = None

    def leave(self, ticket: Ticket) -> None:
        """From wherever it is; one that has left already is passed over."""
        self._waiting.pop(ticket, None)
        self._running.pop(ticket, None)

    def would_start(self, ticket: Ticket) -> bool:
        """Whether it would, behind those that wait."""
        return ticket in self._next((*self._waiting, ticket))

    def start(self) -> list[Ticket]:
        """Those that start now, in order."""
        started = self._next(tuple(self._waiting))
        for ticket in started:
            del self._waiting[ticket]
            self._running[ticket] = None
        return started

    def _next(self, tickets: tuple[Ticket, ...]) -> list[Ticket]:
        if not tickets:
            return []
        sequences = self.running_sequences
        held = [ticket.prompt_tokens for ticket in self._running if self.limits.is_long(ticket)]
        room, lane_is_blocked = self.limits.long_room or 0, False
        started = []
        for ticket in tickets:
            if sequences and sequences + ticket.sequences > self.limits.max_num_seqs:
                break
            if self.limits.is_long(ticket):
                if lane_is_blocked or (held and sum(held) + ticket.prompt_tokens > room):
                    lane_is_blocked = True
                    continue
                held.append(ticket.prompt_tokens)
            sequences += ticket.sequences
            started.append(ticket)
        return started
