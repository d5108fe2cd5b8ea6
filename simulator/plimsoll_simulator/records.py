"""What a run leaves behind: of each request, of each death and restart, and samples over time.

In: the event loop fills these. Out: what ``metrics`` counts and ``report`` draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from plimsoll_simulator.workload import SimulatedRequest, Workload


class Refusal(StrEnum):
    """``NEVER``: over the ceiling, HTTP 400; ``NOT_NOW``: over what is admitted at the moment,
    HTTP 429; ``NOT_HERE``: no replica serves, connection refused or 503."""

    NEVER = "never"
    NOT_NOW = "not_now"
    NOT_HERE = "not_here"


@dataclass
class RequestRecord:
    """Times in seconds of the run; None: did not happen. A retry belongs to its request: the first
    token is that of the attempt that was answered to the end."""

    request: SimulatedRequest
    attempts: int = 0
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    # How attempts ended that were not answered.
    refusals: list[Refusal] = field(default_factory=list)
    lost: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        if self.finished is None or self.first_token is None:
            return None
        return self.first_token - self.request.time

    @property
    def time_per_output_token(self) -> float | None:
        """None when unanswered; 0 for an answer of one token."""
        if self.finished is None or self.first_token is None:
            return None
        return (self.finished - self.first_token) / max(1, self.request.output_tokens - 1)


class DeathCause(StrEnum):
    OOM = "oom"
    OOM_AT_START = "oom-at-start"
    BUSY_AT_START = "busy-at-start"


@dataclass(frozen=True)
class Death:
    time: float
    replica: str
    cause: DeathCause
    lost: int
    # Of the life that ended.
    started_at: float
    utilization: float
    needed_bytes: float


@dataclass(frozen=True)
class Restart:
    """By a controller; ``lost`` requests were not finished when the drain was over."""

    time: float
    replica: str
    lost: int


@dataclass(frozen=True)
class Move:
    """A limit that a controller moved."""

    time: float
    parameter: str
    before: float | None
    after: float | None
    reason: str


@dataclass(frozen=True)
class Sample:
    """One replica every five seconds; memory in bytes, lengths in tokens."""

    time: float
    serving: bool
    running: int
    waiting: int
    kv_usage: float
    held_tokens: int
    pool_tokens: int
    free_bytes: int
    utilization: float
    admitted_length: int


@dataclass
class RunRecord:
    workload: Workload
    requests: list[RequestRecord]
    total_bytes: int
    native_length: int
    deaths: list[Death] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    busy_seconds: float = 0.0
    # Virtual time of the last event.
    end: float = 0.0
