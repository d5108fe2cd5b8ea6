"""The engine's core: requests, aborts and limits in, tokens and snapshots out, on one thread.

Each turn of the thread receives commands and runs one step of the EngineLoop (schedule, execute,
process). Callers on other threads put commands into an inbox and read snapshots that the core
publishes; nothing of the loop itself is shared. The core knows no torch and no HTTP.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from plimsoll_engine.admission import AdmissionState, Lengths, RefusalReason, Refused, judge
from plimsoll_engine.config import EngineConfig
from plimsoll_engine.engine_loop import EngineLoop, Sink
from plimsoll_engine.executor import Executor
from plimsoll_engine.limits import Limits, LimitsOutcome, LimitsResult
from plimsoll_engine.reports import (
    EngineSnapshot,
    FinishReason,
    RequestOutput,
    StepObserver,
)
from plimsoll_engine.sampling_params import Request
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

__all__ = [
    "EngineCore",
    "EngineSnapshot",
    "FinishReason",
    "RequestOutput",
    "Sink",
    "StepObserver",
]

log = logging.getLogger(__name__)

# Without work the loop still goes round so often: for the heartbeat and the memory figures.
_IDLE_SECONDS = 0.5
_STOP_SECONDS = 30.0


class EngineCore:
    """Sinks and the observer are called on the core's thread and must return at once.

    ``failure`` is set when the loop has died; every request then has its final output, and the
    process is to end with it.
    """

    _loop: EngineLoop

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.failure: EngineFailure | None = None
        self._config = config
        self._executor = executor
        self._observer = observer
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

        # Below: shared, under the lock.
        self._changed = threading.Condition()
        self._snapshot: EngineSnapshot | None = None
        self._admission: AdmissionState | None = None
        self._heartbeat = clock()
        # Accepted requests without a final output, and those that the published snapshot does not
        # count yet, with their prompts' tokens.
        self._accepted: set[str] = set()
        self._unseen: dict[str, int] = {}
        self._refused = dict.fromkeys(RefusalReason, 0)
        self._draining = False
        self._closed = False

        # The core thread's own: what came in since the last snapshot.
        self._received: set[str] = set()

    def start(self) -> None:
        """Loads, profiles, plans and sizes the pool, then starts the loop. Raises EngineFailure."""
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(started,), name="engine-core", daemon=True
        )
        self._thread.start()
        started.result()

    def submit(self, request: Request, sink: Sink) -> None:
        """Accepts the request, whose sink then gets exactly one final output, or raises
        admission.Refused."""
        self.submit_all([(request, sink)])

    def submit_all(self, requests: Sequence[tuple[Request, Sink]]) -> None:
        """Accepts all of them or none: they are the sequences of one client's request."""
        with self._changed:
            refused = self._judge([request for request, _ in requests])
            if refused is not None:
                self._refused[refused.reason] += 1
                raise refused
            for request, sink in requests:
                self._accepted.add(request.request_id)
                self._unseen[request.request_id] = len(request.prompt_token_ids)
                self._inbox.put(partial(self._add, request, sink))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends the request in whatever state it is; unknown ids are ignored.

        ``reason`` is STOP where the caller has found a stop string in the text.
        """
        self._inbox.put(lambda: self._abort(request_id, reason))

    def set_limits(self, revision: int, limits: Limits) -> LimitsResult:
        """Moves limits between two steps, and waits for that: at most one step."""
        result: Future[LimitsResult] = Future()
        with self._changed:
            if self._closed:
                return self._reject_limits()
            self._inbox.put(lambda: self._move_limits(revision, limits, result))
        return result.result()

    def snapshot(self) -> EngineSnapshot:
        """The engine now, also while a step runs and when none does. After ``start``."""
        now = self._clock()
        with self._changed:
            published = self._published()
            return replace(
                published,
                waiting=published.waiting + len(self._unseen),
                refused=dict(self._refused),
                draining=self._draining,
                heartbeat_age=max(0.0, now - self._heartbeat),
            )

    def drain(self, timeout: float) -> bool:
        """Refuses new requests from now on; True when all others ended within the timeout."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._accepted, timeout)

    def stop(self) -> None:
        """Aborts what is left, ends the thread and releases the device. Idempotent."""
        with self._changed:
            self._draining = True
            self._closed = True
        if self._thread is None:
            return
        # Wakes the loop, which sees that it is closed.
        self._inbox.put(lambda: None)
        self._thread.join(_STOP_SECONDS)

    # On the core's thread from here on, but for the small readers at the end.

    def _main(self, started: Future[None]) -> None:
        try:
            loop = EngineLoop(self._config, self._executor, self._observer, self._clock)
        except Exception as error:
            # An EngineFailure says it all; a traceback would only hide it.
            log.error("the engine could not start: %s", error, exc_info=not _is_told(error))
            self._shutdown_executor()
            started.set_exception(_as_failure(error, Phase.LOAD))
            return
        self._loop = loop
        self._publish()
        started.set_result(None)
        try:
            while self._turn():
                pass
            loop.abort_all()
        except Exception as error:
            log.exception("the engine has died")
            self._die(_as_failure(error, Phase.SERVING))
        finally:
            self._empty_inbox()
            self._shutdown_executor()

    def _turn(self) -> bool:
        """Receive, schedule, execute, and tell before and after. False when the core is to stop."""
        self._receive()
        if self._closed:
            return False
        step = self._loop.schedule()
        self._publish()
        self._loop.execute(step)
        self._publish()
        return True

    def _receive(self) -> None:
        """Runs all commands; waits for one only when there is no work."""
        try:
            if not self._loop.has_work:
                self._inbox.get(timeout=_IDLE_SECONDS)()
            self._empty_inbox()
        except queue.Empty:
            pass

    def _empty_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get_nowait()()

    def _publish(self) -> None:
        snapshot, admission = self._loop.snapshot(), self._loop.admission_state()
        with self._changed:
            self._snapshot, self._admission = snapshot, admission
            self._heartbeat = self._clock()
            for request_id in self._received:
                self._unseen.pop(request_id, None)
            self._changed.notify_all()
        self._received.clear()

    def _add(self, request: Request, sink: Sink) -> None:
        self._received.add(request.request_id)

        def send(output: RequestOutput) -> None:
            if output.refused is not None:
                with self._changed:
                    self._refused[output.refused.reason] += 1
            try:
                sink(output)
            finally:
                if output.finish_reason is not None:
                    with self._changed:
                        self._accepted.discard(output.request_id)

        if not self._closed:
            self._loop.add(request, send)
        elif self.failure:
            send(_final(request, FinishReason.ERROR, self.failure.message))
        else:
            send(_final(request, FinishReason.ABORT, None))

    def _abort(self, request_id: str, reason: FinishReason) -> None:
        if not self._closed:
            self._loop.abort(request_id, reason)

    def _move_limits(self, revision: int, limits: Limits, result: Future[LimitsResult]) -> None:
        if self._closed:
            result.set_result(self._reject_limits())
            return
        moved = self._loop.move_limits(revision, limits)
        # Whoever has the answer finds it in the snapshot too.
        self._publish()
        result.set_result(moved)

    def _die(self, failure: EngineFailure) -> None:
        with self._changed:
            self.failure = failure
            self._closed = True
            if self._snapshot is not None:
                self._snapshot = replace(self._snapshot, running=0, waiting=0)
        self._loop.fail_all(failure.message)
        self._empty_inbox()
        with self._changed:
            self._unseen.clear()
            self._changed.notify_all()

    def _shutdown_executor(self) -> None:
        try:
            self._executor.shutdown()
        except Exception:
            log.exception("the executor did not shut down cleanly")

    # Under the lock.

    def _judge(self, requests: Sequence[Request]) -> Refused | None:
        if self.failure is not None:
            return Refused(503, RefusalReason.ENGINE_DEAD, self.failure.message)
        if used := self._accepted.intersection(request.request_id for request in requests):
            return Refused(
                400,
                RefusalReason.DUPLICATE_REQUEST_ID,
                f"The request id {min(used)!r} is in use.",
                param="request_id",
            )
        if self._admission is None:
            raise RuntimeError("the engine has not started")
        state = replace(
            self._admission,
            arriving=tuple(self._unseen.values()),
            draining=self._draining,
        )
        return judge(
            state,
            [
                Lengths(len(request.prompt_token_ids), request.params.max_tokens)
                for request in requests
            ],
        )

    def _reject_limits(self) -> LimitsResult:
        why = f"has died: {self.failure.message}" if self.failure else "is shutting down"
        published = self._published()
        return LimitsResult(
            LimitsOutcome.REJECTED,
            f"the engine {why}",
            published.limits_revision,
            published.limits,
        )

    def _published(self) -> EngineSnapshot:
        if self._snapshot is None:
            raise RuntimeError("the engine has not started")
        return self._snapshot


def _final(request: Request, reason: FinishReason, error: str | None) -> RequestOutput:
    return RequestOutput(request.request_id, finish_reason=reason, error=error)


def _is_told(error: Exception) -> bool:
    return isinstance(error, EngineFailure) and error.failure_class is not FailureClass.ENGINE_DEAD


def _as_failure(error: Exception, phase: Phase) -> EngineFailure:
    """Anything but an EngineFailure is a bug, and ends the engine as one."""
    if isinstance(error, EngineFailure):
        return error
    failure = EngineFailure(
        FailureClass.ENGINE_DEAD, phase, f"unexpected {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure
