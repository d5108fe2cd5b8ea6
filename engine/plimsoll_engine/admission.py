"""Who may enter: one pure decision, the engine's and later the gate's before a stock engine.

In: the lengths of a request, the limits in force and how full the queue is. Out: None (admit) or
the refusal with its HTTP status, reason, message and Retry-After. This module knows no torch, no
scheduler and no HTTP server.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RefusalReason(StrEnum):
    """Values are the label of plimsoll:requests_rejected_total."""

    TOO_LONG = "too_long"
    OVER_ADMITTED_LENGTH = "over_admitted_length"
    QUEUE_FULL = "queue_full"
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
class AdmissionState:
    """What the decision depends on, lengths in tokens.

    ``admitted`` and ``usable_pool`` move while the engine serves; ``ceiling`` and ``planned_pool``
    are those of its start.
    """

    ceiling: int
    admitted: int
    planned_pool: int
    usable_pool: int
    waiting: int
    max_waiting: int
    draining: bool

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


# The admitted length moves at the tuner's pace, a queue at the engine's.
_RETRY_AFTER_LENGTH = 5
_RETRY_AFTER_QUEUE = 2


def judge(state: AdmissionState, *, prompt_tokens: int, max_tokens: int) -> Refused | None:
    """None admits. The client's own mistake comes before the state of the engine, so that a
    request that can never succeed is not told to try again."""
    total = prompt_tokens + max_tokens
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
    if state.draining:
        return Refused(503, RefusalReason.DRAINING, "The engine is shutting down.")
    if total > state.length_now:
        return Refused(
            429,
            RefusalReason.OVER_ADMITTED_LENGTH,
            f"Requests of more than {state.length_now} tokens are not admitted at this moment "
            f"(this one: {prompt_tokens} input and {max_tokens} output tokens; up to "
            f"{state.length_ever} at other times). Please retry later.",
            param="input_tokens",
            retry_after=_RETRY_AFTER_LENGTH,
        )
    if state.waiting >= state.max_waiting:
        return Refused(
            429,
            RefusalReason.QUEUE_FULL,
            f"The queue is full: {state.waiting} requests are waiting, {state.max_waiting} may. "
            "Please retry later.",
            retry_after=_RETRY_AFTER_QUEUE,
        )
    return None
