"""The engine's core: requests, aborts and limits in, tokens and snapshots out, on one thread.

Each turn of the loop receives commands, schedules a step, executes it and processes what it gave.
The core knows no torch (an Executor computes) and no HTTP (sinks take the outputs).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.executor import Executor
from plimsoll_engine.limits import Limits, LimitsResult
from plimsoll_engine.reports import EngineSnapshot, RequestOutput, StepObserver
from plimsoll_engine.sampling_params import Request
from plimsoll_engine.termination import EngineFailure

Sink = Callable[[RequestOutput], None]


class EngineCore:
    """Sinks and the observer are called on the core's thread and must return at once."""

    failure: EngineFailure | None

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Loads, profiles, plans and sizes the pool, then starts the loop. Raises EngineFailure."""
        raise NotImplementedError

    def submit(self, request: Request, sink: Sink) -> None:
        """Accepts the request or raises admission.Refused; the sink then gets one final output."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Ends the request in whatever state it is; unknown ids are ignored."""
        raise NotImplementedError

    def set_limits(self, revision: int, limits: Limits) -> LimitsResult:
        """Moves limits between two steps; waits for that."""
        raise NotImplementedError

    def snapshot(self) -> EngineSnapshot:
        raise NotImplementedError

    def drain(self, timeout: float) -> bool:
        """Refuses new requests from now on; True when all others ended within the timeout."""
        raise NotImplementedError

    def stop(self) -> None:
        """Aborts what is left, ends the thread and releases the device."""
        raise NotImplementedError
