"""The engine without threads: requests and limits in, one step at a time, outputs to sinks.

Everything here runs on one thread, the core's (or a test's, or the simulator's). It knows no torch
(an Executor computes), no HTTP and no lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from plimsoll_engine.admission import AdmissionState, Lengths, refuse_for_now
from plimsoll_engine.batch_budget import BatchBudget
from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.config import EngineConfig
from plimsoll_engine.device_watch import DeviceWatch
from plimsoll_engine.executor import AllocationFailure, Executor, SampledToken, StepBatch
from plimsoll_engine.limits import Limits, LimitsResult
from plimsoll_engine.live_limits import LiveLimits, scheduler_limits
from plimsoll_engine.memory import format_bytes
from plimsoll_engine.reports import (
    EngineSnapshot,
    FinishedRequest,
    FinishReason,
    MemoryClass,
    RequestOutput,
    StepObserver,
    StepStats,
)
from plimsoll_engine.resizing import PoolResizer
from plimsoll_engine.sampling_params import Request
from plimsoll_engine.scheduler import ScheduledStep, Scheduler
from plimsoll_engine.sequence import Sequence, build_chunk, find_stop
from plimsoll_engine.startup import bounds_of, plan_start
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

log = logging.getLogger(__name__)

Sink = Callable[[RequestOutput], None]

# So many requests given up in a row, each alone in a minimal step: the device is beyond help.
MAX_LOST_IN_A_ROW = 3


@dataclass(eq=False)
class LiveRequest:
    sequence: Sequence
    sink: Sink
    queued_time: float
    first_scheduled_time: float | None = None
    last_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None


class EngineLoop:
    """Raises EngineFailure, from the constructor too, when the engine cannot go on."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        observer: StepObserver | None,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._observer = observer
        self._clock = clock
        self._started_at = clock()
        start = plan_start(config, executor)
        log.info("%s", start.memory.format())
        self._model = start.model
        self._max_waiting = config.max_num_queued_reqs
        self._max_waiting_tokens = config.max_num_queued_tokens
        self._max_running = config.max_num_seqs
        self._planned_pool = start.planned_pool
        self._pool = self._commit_pool(start.memory.num_blocks)
        self._prefix_caching = config.enable_prefix_caching
        self._scheduler = Scheduler(
            self._pool,
            config.block_size,
            scheduler_limits(start.limits),
            prefix_caching=config.enable_prefix_caching,
        )
        self._resizer = PoolResizer(self._pool, self._scheduler, executor)
        bytes_per_block = start.memory.figures.bytes_per_block
        self._watch = DeviceWatch(executor, clock(), lambda: self._pool.committed * bytes_per_block)
        self._limits = LiveLimits(
            start.limits,
            start.revision,
            plan=start.memory,
            bounds=bounds_of(config, start.memory),
            scheduler=self._scheduler,
            resizer=self._resizer,
            executor=executor,
            watch=self._watch,
        )
        self._budget = BatchBudget()
        self._live: dict[str, LiveRequest] = {}
        self._steps = 0
        self._preemptions = 0
        self._preemptions_unreported = 0
        self._recomputed_tokens = 0
        self._allocation_failures = 0
        self._lost_in_a_row = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, request: Request, sink: Sink) -> None:
        """The request has been admitted; its id is not in use. It runs to its end however the
        limits move from here on. Only when the pool shrank below it while it came here, and the
        memory is gone already, is it refused after all."""
        lengths = Lengths(len(request.prompt_token_ids), request.params.max_tokens)
        try:
            self._resizer.make_fit(self._scheduler.blocks_for(lengths.total))
        except AllocationFailure as failure:
            log.warning("request %s is refused late: %s", request.request_id, failure)
            output = RequestOutput(
                request.request_id,
                finish_reason=FinishReason.ERROR,
                refused=refuse_for_now(self.admission_state(), lengths),
            )
            _send(sink, output)
            return
        sequence = self._scheduler.add(request)
        self._live[request.request_id] = LiveRequest(sequence, sink, self._clock())

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if live := self._live.get(request_id):
            self._finish(live, RequestOutput(request_id, finish_reason=reason))

    def abort_all(self) -> None:
        for request_id in tuple(self._live):
            self.abort(request_id)

    def fail_all(self, error: str) -> None:
        """The end: every live request gets its final output, whatever state the engine is in."""
        live, self._live = self._live, {}
        for request_id, request in live.items():
            output = RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error)
            _send(request.sink, output)

    def move_limits(self, revision: int, asked: Limits) -> LimitsResult:
        result = self._limits.move(revision, asked, self._clock())
        self._watch.measure_if_due(self._clock())
        return result

    def step(self) -> None:
        """One iteration; with nothing to do it still looks after memory."""
        self.execute(self.schedule())

    def schedule(self) -> ScheduledStep:
        """The first half of a step: who runs in it is known, nothing is computed yet."""
        step = self._scheduler.schedule(self._budget.tokens)
        self._note(step)
        return step

    def execute(self, step: ScheduledStep) -> None:
        """The second half, which may take seconds."""
        if step.chunks and (sampled := self._compute(step)) is not None:
            self._process(step, sampled)
        self._limits.settle()
        self._watch.measure_if_due(self._clock())

    def admission_state(self) -> AdmissionState:
        return AdmissionState(
            ceiling=self._limits.plan.ceiling,
            admitted=self._limits.admitted,
            planned_pool=self._planned_pool,
            usable_pool=self._resizer.target * self._limits.plan.block_size,
            block_size=self._limits.plan.block_size,
            free_blocks=self._pool.free,
            reserved_blocks=self._scheduler.reserved_blocks,
            running=len(self._scheduler.running),
            max_running=self._scheduler.limits.max_num_seqs,
            max_running_ever=self._max_running,
            waiting=self._scheduler.num_waiting,
            max_waiting=self._max_waiting,
            next_tokens=self._scheduler.next_tokens,
            draining=False,
            waiting_tokens=self._scheduler.num_waiting_tokens,
            max_waiting_tokens=self._max_waiting_tokens,
            long_prompt_tokens=self._scheduler.limits.long_prompt_tokens,
            free_lane_blocks=self._scheduler.free_lane_blocks,
            long_queue=self._scheduler.long_queue,
        )

    def snapshot(self) -> EngineSnapshot:
        plan, admission = self._limits.plan, self.admission_state()
        return EngineSnapshot(
            started_at=self._started_at,
            model=self._model,
            device=self._watch.latest,
            classes=self._memory_classes(),
            block_size=plan.block_size,
            bytes_per_block=plan.figures.bytes_per_block,
            committed_blocks=self._pool.committed,
            usable_blocks=self._pool.usable,
            used_blocks=self._pool.used,
            kv_slots_unused=self._scheduler.slots_unused,
            ceiling=plan.ceiling,
            largest_prompt_admissible=admission.largest_prompt,
            largest_prompt_startable=admission.largest_prompt_startable,
            limits=self._limits.current,
            limits_revision=self._limits.revision,
            limits_outcome=self._limits.outcome,
            limits_reason=self._limits.reason,
            running=len(self._scheduler.running),
            waiting=self._scheduler.num_waiting,
            short_wait=self._wait_of(self._scheduler.first_short),
            long_wait=self._wait_of(self._scheduler.first_long),
            prefix_caching=self._prefix_caching,
            steps=self._steps,
            preemptions=self._preemptions,
            prefix_cache_queries=self._scheduler.prefix_cache_use.queries,
            prefix_cache_hits=self._scheduler.prefix_cache_use.hits,
            recomputed_tokens=self._recomputed_tokens,
            allocation_failures_caught=self._allocation_failures,
            refused={},
            draining=False,
            heartbeat_age=0.0,
        )

    def _wait_of(self, sequence: Sequence | None) -> float:
        return 0.0 if sequence is None else self._clock() - sequence.request.arrival_time

    def check(self) -> None:
        """Raises AssertionError when a block or a request is lost (see Scheduler.check)."""
        self._scheduler.check()
        scheduled = {*self._scheduler.running, *self._scheduler.waiting}
        assert scheduled == {live.sequence for live in self._live.values()}

    def _commit_pool(self, num_blocks: int) -> BlockPool:
        try:
            return BlockPool(self._executor.resize_kv(num_blocks), num_blocks)
        except AllocationFailure as failure:
            free = self._executor.memory().free
            raise EngineFailure(
                FailureClass.DEVICE_OOM_AT_START,
                Phase.KV_CACHE,
                f"the device refused a KV cache of {num_blocks} blocks with {format_bytes(free)} "
                f"free: {failure}. Lower --gpu-memory-utilization.",
                figures={"num_blocks": num_blocks, "free_bytes": free},
            ) from failure

    def _note(self, step: ScheduledStep) -> None:
        now = self._clock()
        for sequence in step.admitted:
            live = self._live[sequence.request_id]
            live.last_scheduled_time = now
            if live.first_scheduled_time is None:
                live.first_scheduled_time = now
        self._preemptions += len(step.preempted)
        self._preemptions_unreported += len(step.preempted)

    def _compute(self, step: ScheduledStep) -> dict[str, SampledToken] | None:
        """None when the device refused memory; nothing but the batch budget has changed then."""
        batch = StepBatch(tuple(build_chunk(c.sequence, c.start, c.count) for c in step.chunks))
        try:
            sampled = {token.request_id: token for token in self._executor.execute(batch)}
        except AllocationFailure as failure:
            self._survive(step, failure)
            return None
        for chunk in batch.chunks:
            if chunk.sampling and (
                chunk.request_id not in sampled or sampled[chunk.request_id].token_id is None
            ):
                raise RuntimeError(f"the executor gave no token for {chunk.request_id}")
        self._budget.succeeded(self._scheduler.limits.max_num_batched_tokens)
        self._lost_in_a_row = 0
        return sampled

    def _survive(self, step: ScheduledStep, failure: AllocationFailure) -> None:
        """Frees what is cached and tries less at once; a request whose single token is refused
        again and again is given up."""
        self._allocation_failures += 1
        self._executor.reclaim()
        if self._budget.refused(step.num_tokens):
            log.warning(
                "the device refused memory in a step of %d tokens of %d requests; next: %d (%s)",
                step.num_tokens,
                len(step.chunks),
                self._budget.tokens,
                failure,
            )
            return
        self._lost_in_a_row += 1
        request_id = step.chunks[0].sequence.request_id
        error = "out of device memory, even alone in a step of one token"
        log.error("request %s: %s: %s", request_id, error, failure)
        output = RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error)
        self._finish(self._live[request_id], output)
        if self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            memory = self._watch.measure(self._clock())
            raise EngineFailure(
                FailureClass.DEVICE_OOM_AT_RUNTIME,
                Phase.SERVING,
                f"the device refused memory for {self._lost_in_a_row} requests in a row, each "
                f"alone in a minimal step; {format_bytes(memory.free)} of "
                f"{format_bytes(memory.total)} free: {failure}",
                figures={
                    "free_bytes": memory.free,
                    "total_bytes": memory.total,
                    "requested_bytes": failure.requested_bytes or 0,
                    "committed_blocks": self._pool.committed,
                },
            )

    def _process(self, step: ScheduledStep, sampled: dict[str, SampledToken]) -> None:
        tokens = {
            request_id: token.token_id
            for request_id, token in sampled.items()
            if token.token_id is not None
        }
        completed = self._scheduler.complete(step, tokens)
        now = self._clock()
        for chunk in step.chunks:
            request_id = chunk.sequence.request_id
            # A sink may have aborted a request of this very step.
            live = self._live.get(request_id)
            if live is not None and live.sequence is chunk.sequence:
                self._deliver(live, sampled.get(request_id), now)
        self._steps += 1
        self._recomputed_tokens += completed.recomputed_tokens
        if self._observer:
            self._observer.step_done(
                StepStats(
                    num_tokens=step.num_tokens,
                    prompt_tokens=completed.prompt_tokens,
                    generation_tokens=len(tokens),
                    preemptions=self._preemptions_unreported,
                    recomputed_tokens=completed.recomputed_tokens,
                )
            )
        self._preemptions_unreported = 0

    def _deliver(self, live: LiveRequest, sampled: SampledToken | None, now: float) -> None:
        if sampled is not None and sampled.error is not None:
            request_id = live.sequence.request_id
            log.error("request %s: %s", request_id, sampled.error)
            self._finish(
                live,
                RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=sampled.error),
            )
            return
        new_tokens: tuple[int, ...] = ()
        if sampled is not None and sampled.token_id is not None:
            new_tokens = (sampled.token_id,)
            self._observe_token(live, now)
        stop = find_stop(live.sequence)
        output = RequestOutput(
            live.sequence.request_id,
            new_token_ids=new_tokens,
            logprobs=(sampled.logprobs,) if sampled and sampled.logprobs else (),
            prompt_logprobs=sampled.prompt_logprobs if sampled else (),
            finish_reason=stop.reason if stop else None,
            stop_reason=stop.token_id if stop else None,
            num_cached_tokens=live.sequence.cached_tokens,
            first_scheduled_time=live.first_scheduled_time,
            preemptions=live.sequence.preemptions,
        )
        if stop:
            self._finish(live, output)
        elif (new_tokens or output.prompt_logprobs) and not _send(live.sink, output):
            self.abort(output.request_id)

    def _observe_token(self, live: LiveRequest, now: float) -> None:
        if self._observer:
            if live.last_token_time is None:
                self._observer.first_token(now - live.sequence.request.arrival_time)
            else:
                self._observer.next_token(now - live.last_token_time)
        live.first_token_time = live.first_token_time or now
        live.last_token_time = now

    def _finish(self, live: LiveRequest, output: RequestOutput) -> None:
        """The one way out: blocks first, so that whoever hears of the end finds them free."""
        sequence = live.sequence
        assert output.finish_reason is not None
        self._scheduler.finish(sequence)
        del self._live[sequence.request_id]
        _send(live.sink, output)
        if self._observer:
            self._observer.request_finished(
                FinishedRequest(
                    finish_reason=output.finish_reason,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    num_generation_tokens=sequence.num_output_tokens,
                    max_tokens=sequence.params.max_tokens,
                    num_prompt_computed_tokens=max(
                        0,
                        min(sequence.high_water, sequence.num_prompt_tokens)
                        - sequence.cached_tokens,
                    ),
                    preemptions=sequence.preemptions,
                    arrival_time=sequence.request.arrival_time,
                    queued_time=live.queued_time,
                    first_scheduled_time=live.first_scheduled_time,
                    last_scheduled_time=live.last_scheduled_time,
                    first_token_time=live.first_token_time,
                    last_token_time=live.last_token_time,
                    finished_time=self._clock(),
                )
            )

    def _memory_classes(self) -> tuple[MemoryClass, ...]:
        """Weights, graphs and KV are what was allocated. What else is held between steps counts as
        runtime, what steps took on top of that in the window as activations."""
        plan, device = self._limits.plan, self._watch.latest
        figures = plan.figures
        kv_cache = self._pool.committed * figures.bytes_per_block
        resting = device.total - device.free - kv_cache
        activations = self._watch.peak_beside_kv - resting
        return (
            MemoryClass("weights", figures.weights, figures.weights),
            MemoryClass("activations", figures.activations, max(0, activations)),
            MemoryClass("graphs", figures.graphs, figures.graphs),
            MemoryClass(
                "runtime", figures.runtime, max(0, resting - figures.weights - figures.graphs)
            ),
            MemoryClass("kv_cache", plan.kv_cache, kv_cache),
        )


def _send(sink: Sink, output: RequestOutput) -> bool:
    """False when the sink failed: that is one client's trouble, not the engine's."""
    try:
        sink(output)
    except Exception:
        log.exception("the sink of request %s failed", output.request_id)
        return False
    return True
