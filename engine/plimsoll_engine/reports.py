"""What the core tells the outside: a request's tokens, observations of steps, and snapshots.

Frozen values and one protocol. This module knows neither who listens (the HTTP server, the metrics
page, the control channel) nor how the core comes by the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from plimsoll_engine.admission import RefusalReason, Refused
from plimsoll_engine.executor import DeviceMemory, ModelLimits, TokenLogprob
from plimsoll_engine.limits import Limits, LimitsOutcome


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class RequestOutput:
    """One step's news of a request. Exactly one output, the last, has a finish reason.

    ``new_token_ids`` includes the stop or end token that ended it. ``prompt_logprobs`` has one
    entry per prompt token computed in this step, from the prompt's second token on, in order and
    never twice; ``logprobs`` one per new token. Each entry starts with the token itself.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish_reason: FinishReason | None = None
    # The id out of stop_token_ids that ended it; None for the model's own end token.
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    # Unix seconds; None while it has never been scheduled.
    first_scheduled_time: float | None = None
    preemptions: int = 0
    # With FinishReason.ERROR: what went wrong, or why the request was refused after it was accepted.
    error: str | None = None
    refused: Refused | None = None


@dataclass(frozen=True)
class StepStats:
    """One executed step, at its end."""

    # Tokens computed in the step: prompt, output and recomputed ones.
    num_tokens: int
    # Prompts whose last token was computed for the first time in this step, in tokens.
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    recomputed_tokens: int


@dataclass(frozen=True)
class FinishedRequest:
    """The life of a request. Times are Unix seconds; None: it never came that far."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    # Tokens of the prompt that were computed, not found in the prefix cache.
    num_prompt_computed_tokens: int
    preemptions: int
    arrival_time: float
    # When it entered the core's queue, and when a step first (and, after preemptions, last)
    # took it out of there.
    queued_time: float
    first_scheduled_time: float | None
    last_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float


class StepObserver(Protocol):
    """Called on the core's thread: be quick, do not raise."""

    def step_done(self, stats: StepStats) -> None: ...

    def first_token(self, seconds_since_arrival: float) -> None:
        """Time to first token of one request."""

    def next_token(self, seconds_since_previous: float) -> None:
        """Inter-token latency, one per token after a request's first."""

    def request_finished(self, request: FinishedRequest) -> None: ...


@dataclass(frozen=True)
class MemoryClass:
    """One class of device memory: planned at start (or at the last resize) against used now."""

    name: str
    planned_bytes: int
    actual_bytes: int


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine at this moment. Bytes are the worst rank's; lengths in tokens."""

    started_at: float
    model: ModelLimits
    device: DeviceMemory
    # weights, activations, runtime, kv_cache, in this order.
    classes: tuple[MemoryClass, ...]

    block_size: int
    bytes_per_block: int
    committed_blocks: int
    usable_blocks: int
    used_blocks: int
    # Token slots in used blocks that hold no token yet.
    kv_slots_unused: int

    ceiling: int
    largest_prompt_admissible: int
    largest_prompt_startable: int
    # In force, no field is None; ``max_model_len`` is the admitted length.
    limits: Limits
    limits_revision: int
    limits_outcome: LimitsOutcome
    limits_reason: str

    running: int
    waiting: int
    # Seconds since the arrival of the first that waits, by its lane; 0 where none does.
    short_wait: float
    long_wait: float
    prefix_caching: bool
    # Counters since the start.
    steps: int
    preemptions: int
    # In tokens, of first admissions.
    prefix_cache_queries: int
    prefix_cache_hits: int
    recomputed_tokens: int
    allocation_failures_caught: int
    # Every reason has an entry.
    refused: Mapping[RefusalReason, int]
    draining: bool
    # Seconds since the core's loop last went round; grows while one step runs.
    heartbeat_age: float

    @property
    def kv_cache_usage(self) -> float:
        """0 to 1; blocks above the line, while a shrink waits for them, count as used."""
        return min(1.0, self.used_blocks / self.usable_blocks) if self.usable_blocks else 0.0
