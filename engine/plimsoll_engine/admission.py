"""Who may enter: one pure decision, the engine's and later the gate's before a stock engine.

In: the lengths of a request, the limits in force and how full the queue is. Out: None (admit) or
the refusal with its HTTP status, reason, message and Retry-After. This module knows no torch, no
scheduler and no HTTP server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class RefusalReason(StrEnum):
    """Values are the label of plimsoll:requests_rejected_total."""

    TOO_LONG = "too_long"
    OVER_ADMITTED_LENGTH = "over_admitted_length"
    TOO_MANY_SEQUENCES = "too_many_sequences"
    QUEUE_FULL = "queue_full"
    LONG_QUEUE_FULL = "long_queue_full"
    DRAINING = "draining"
    ENGINE_DEAD = "engine_dead"
    DUPLICATE_REQUEST_ID = "duplicate_request_id"


class Refused(Exception):
    """A request that is not accepted.

    Attributes:
        status: 400 (never admissible), 429 (not now) or 503 (not here).
        reason: label of the counter of refusals.
        message: for the client, in vLLM's form where vLLM has one.
        param: the request's field at fault, when there is one.
        retry_after: whole seconds from 1, with 429 alone.
    """

    def __init__(
        self,
        status: int,
        reason: RefusalReason,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after = retry_after


@dataclass(frozen=True)
class Lengths:
    """Of one sequence: a request makes one for each of its prompts and choices."""

    prompt_tokens: int
    max_tokens: int

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True)
class Queue:
    """Sequences that wait, and their tokens."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class LongQueue:
    """Long prompts that wait, in tokens. ``room``: what the lane could take of them at once;
    ``most``: how many may wait when it has taken that."""

    threshold: int
    waiting: int
    room: int
    most: int

    def behind(self, prompts: Sequence[int]) -> LongQueue:
        """When ``prompts`` have come too; those that are not long do not count."""
        return replace(self, waiting=self.waiting + self.count(prompts))

    def count(self, prompts: Sequence[int]) -> int:
        return sum(prompt for prompt in prompts if prompt > self.threshold)

    @property
    def left(self) -> int:
        """What still waits then."""
        return max(0, self.waiting - self.room)

    def has_place_for(self, prompts: Sequence[int]) -> bool:
        """The first may always wait, however long it is."""
        more = self.count(prompts)
        return not more or not self.left or self.left + more <= self.most


@dataclass(frozen=True)
class AdmissionState:
    """What the decision depends on, lengths in tokens.

    ``admitted``, ``usable_pool`` and ``max_running`` move while the engine serves; ``ceiling``,
    ``planned_pool`` and ``max_running_ever`` are those of its start.
    """

    ceiling: int
    admitted: int
    planned_pool: int
    usable_pool: int
    block_size: int
    free_blocks: int
    # Kept free while anything runs.
    reserved_blocks: int
    running: int
    max_running: int
    max_running_ever: int
    waiting: int
    max_waiting: int
    # Tokens that the first of the waiting start with, for each running slot that is free.
    next_tokens: tuple[int, ...]
    draining: bool
    # Known tokens of all that wait, and how many may; None: no bound.
    waiting_tokens: int = 0
    max_waiting_tokens: int | None = None
    # Prompts that were accepted and that none of the above counts yet.
    arriving: tuple[int, ...] = ()
    # A prompt of more tokens is long, and has this much of the pool; None: all are alike.
    long_prompt_tokens: int | None = None
    free_lane_blocks: int | None = None
    # None: long prompts that wait have no bound of their own.
    long_queue: LongQueue | None = None

    @property
    def length_ever(self) -> int:
        """The longest request (prompt plus output) that may be accepted at some time."""
        return min(self.ceiling, self.planned_pool)

    @property
    def length_now(self) -> int:
        return min(self.length_ever, self.admitted, self.usable_pool)

    @property
    def largest_prompt(self) -> int:
        """The longest prompt that still leaves room for one token, at this moment."""
        return max(0, self.length_now - 1)

    @property
    def largest_prompt_startable(self) -> int:
        """The longest prompt that would start at once. 0 while any waits: it would wait behind."""
        if self.waiting or self.arriving or self.running >= self.max_running:
            return 0
        reserved = self.reserved_blocks if self.running else 0
        free = max(0, self.free_blocks - reserved)
        longest = min(self.largest_prompt, free * self.block_size)
        if self.long_prompt_tokens is None or self.free_lane_blocks is None:
            return longest
        in_lane = self.free_lane_blocks * self.block_size
        return min(longest, max(self.long_prompt_tokens, in_lane))

    @property
    def idle(self) -> AdmissionState:
        """The same engine with nothing to do and its limits at their widest."""
        return replace(
            self,
            usable_pool=self.planned_pool,
            free_blocks=self.planned_pool // self.block_size,
            running=0,
            max_running=self.max_running_ever,
            waiting=0,
            waiting_tokens=0,
            next_tokens=(),
            arriving=(),
        )

    def queue_behind(self, prompts: Sequence[int]) -> Queue:
        """Who waits when ``prompts`` have come too and all that can start has started. First come,
        first served: behind one that waits all others wait. The scheduler lets short ones pass a
        long one, so that its queue may be shorter."""
        arriving = (*self.arriving, *prompts)
        sequences = self.waiting + len(arriving)
        tokens = self.waiting_tokens + sum(arriving)
        running, free = self.running, self.free_blocks
        for each in (*self.next_tokens, *arriving):
            blocks = -(-each // self.block_size)
            reserved = self.reserved_blocks if running else 0
            if running >= self.max_running or blocks + reserved > free:
                break
            running, free = running + 1, free - blocks
            sequences, tokens = sequences - 1, tokens - each
        return Queue(sequences, tokens)

    def has_place_for(self, queue: Queue) -> bool:
        """One alone may always wait, however long it is."""
        most = self.max_waiting_tokens
        tokens_fit = most is None or queue.tokens <= most or queue.sequences == 1
        return queue.sequences <= self.max_waiting and tokens_fit

    @property
    def places(self) -> str:
        """How many may wait, in words."""
        if self.max_waiting_tokens is None:
            return f"{self.max_waiting}"
        return f"{self.max_waiting} of {self.max_waiting_tokens} tokens together"


# The admitted length moves at the tuner's pace, a queue at the engine's.
_RETRY_AFTER_LENGTH = 5
_RETRY_AFTER_QUEUE = 2
# A long prompt holds the lane for a while.
_RETRY_AFTER_LONG_QUEUE = 10


def judge(state: AdmissionState, sequences: Sequence[Lengths]) -> Refused | None:
    """None admits all ``sequences`` of a request. The client's own mistake comes before the state
    of the engine, so that a request that can never succeed is not told to try again."""
    longest = max(sequences, key=lambda lengths: lengths.total)
    prompt_tokens, max_tokens, total = longest.prompt_tokens, longest.max_tokens, longest.total
    prompts = [lengths.prompt_tokens for lengths in sequences]
    if total > state.length_ever:
        return Refused(
            400,
            RefusalReason.TOO_LONG,
            f"This model's maximum context length is {state.length_ever} tokens. However, you "
            f"requested {max_tokens} output tokens and your prompt contains {prompt_tokens} input "
            f"tokens, for a total of {total} tokens. Please reduce the length of the input prompt "
            "or the number of requested output tokens.",
            param="input_tokens",
        )
    queued = state.idle.queue_behind(prompts)
    if not state.has_place_for(queued):
        return Refused(
            400,
            RefusalReason.TOO_MANY_SEQUENCES,
            f"prompt times n: {len(prompts)} sequences of {sum(prompts)} prompt tokens are not "
            f"allowed in one request; expected as many as find a place in an idle engine: "
            f"{state.max_running_ever} run, within {state.planned_pool} tokens, and "
            f"{state.places} wait (of these {queued.sequences} would have to)",
            param="n",
        )
    if state.draining:
        return Refused(503, RefusalReason.DRAINING, "The engine is shutting down.")
    if total > state.length_now:
        return refuse_for_now(state, longest)
    if not state.has_place_for(state.queue_behind(prompts)):
        waiting = state.queue_behind(())
        return Refused(
            429,
            RefusalReason.QUEUE_FULL,
            f"The queue is full: {waiting.sequences} requests of {waiting.tokens} tokens are "
            f"waiting, {state.places} may, and this one has {len(prompts)} sequences of "
            f"{sum(prompts)} tokens. Please retry later.",
            retry_after=_RETRY_AFTER_QUEUE,
        )
    long_queue = state.long_queue and state.long_queue.behind(state.arriving)
    if long_queue is not None and not long_queue.has_place_for(prompts):
        return Refused(
            429,
            RefusalReason.LONG_QUEUE_FULL,
            f"Long prompts of {long_queue.left} tokens are waiting, {long_queue.most} may, and this "
            f"request has {long_queue.count(prompts)}. Please retry later; prompts of up to "
            f"{long_queue.threshold} tokens are admitted.",
            param="input_tokens",
            retry_after=_RETRY_AFTER_LONG_QUEUE,
        )
    return None


def refuse_for_now(state: AdmissionState, lengths: Lengths) -> Refused:
    """What is within the ceiling and over the length of this moment."""
    return Refused(
        429,
        RefusalReason.OVER_ADMITTED_LENGTH,
        f"Requests of more than {state.length_now} tokens are not admitted at this moment "
        f"(this one: {lengths.prompt_tokens} input and {lengths.max_tokens} output tokens; up to "
        f"{state.length_ever} at other times). Please retry later.",
        param="input_tokens",
        retry_after=_RETRY_AFTER_LENGTH,
    )
